"""Tensors in the safetensors files of a folder, read box by box: no rank reads or holds more than it keeps.

    files = WeightFiles("runs/mine/model")
    files.specs["lm_head.weight"]                         shape and dtype, from the headers alone
    files.read("lm_head.weight", Box((0, 0), (512, 96)))  those rows, through `safe_open(...).get_slice`
    files.fill(layout, rank, buffers)                     all that a rank stores, however its layout shards and fuses

Names, shapes and dtypes are those in the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_comm.weights import Block, Box, Layout, TensorSpec
from rlinf_workers.errors import WeightFilesError

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Dtype names of the format -> torch dtypes (safetensors' own table is private)."""
MAX_MAPPED_BYTES = 4 << 20
"""A file is memory-mapped while it is read, and touched pages count as the process's memory; after this many bytes it
is mapped again."""
MAX_NAMED = 8
"""Number of tensors that a message names."""


class WeightFiles:
    """The tensors of a folder: `model.safetensors`, or the files that `model.safetensors.index.json` lists.

    Args:
        stem: prefix of the file names.

    Raises: WeightFilesError if there are no such files, or one is truncated.
    """

    specs: Mapping[str, TensorSpec]
    """Every tensor in the files."""

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        self._file_of = _files_of(self.folder, stem)
        self._mapped: tuple[Path, Any] | None = None
        self._mapped_bytes = 0
        self.specs = {name: self._spec(name) for name in sorted(self._file_of, key=self._file_of.__getitem__)}
        self._mapped = None

    def names_by_file(self) -> Mapping[str, Sequence[str]]:
        """File name -> its tensors."""
        names: dict[str, list[str]] = {}
        for name, path in self._file_of.items():
            names.setdefault(path.name, []).append(name)
        return names

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, in its dtype; a view of the mapped file, to be copied.

        Raises: WeightFilesError for a tensor that is not in the files, or a box that exceeds it.
        """
        spec = self._spec_of(name)
        box = box or spec.whole
        stops = [first + length for first, length in zip(box.start, box.shape, strict=True)]
        if len(box.shape) != len(spec.shape) or any(stop > size for stop, size in zip(stops, spec.shape, strict=True)):
            raise WeightFilesError(f"{self._file_of[name]}: {name} has the shape {spec.shape}; {box} is not in it")
        if not box.num_elements:
            return torch.empty(box.shape, dtype=getattr(torch, spec.dtype))
        part = tuple(slice(first, stop) for first, stop in zip(box.start, stops, strict=True))
        file = self._open(name)
        tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        self._mapped_bytes += tensor.nbytes
        return tensor

    @torch.no_grad()
    def fill(self, layout: Layout, rank: int, buffers: Mapping[str, Tensor]) -> None:
        """Reads what one rank of a layout stores into its buffers, cast to their dtypes. Padding is not written.

        Args:
            buffers: contiguous, as in the layout; missing ones are not read.

        Raises: WeightFilesError naming tensors of the layout that the files do not have, or have with another shape; on
        all ranks alike, before anything is read.
        """
        self.check({name: spec.shape for name, spec in layout.specs.items()})
        for block in sorted(layout.ranks[rank].blocks, key=lambda block: self._file_of[block.name]):
            if (buffer := buffers.get(block.buffer)) is not None:
                region(buffer, block).copy_(self.read(block.name, block.box))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the files have these tensors. Raises: WeightFilesError naming those that are missing or have
        another shape."""
        missing = [name for name in shapes if name not in self.specs]
        if missing:
            raise WeightFilesError(
                f"{self.folder}: {_some(missing)} not in its safetensors files; is it another architecture?"
            )
        wrong = [
            f"{name} {list(self.specs[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if self.specs[name].shape != tuple(shape)
        ]
        if wrong:
            raise WeightFilesError(f"{self.folder}: of another shape than the model's: {_some(wrong)}")

    def _spec_of(self, name: str) -> TensorSpec:
        if name not in self.specs:
            raise WeightFilesError(f"{self.folder}: no safetensors file has {name!r}")
        return self.specs[name]

    def _spec(self, name: str) -> TensorSpec:
        try:
            tensor_slice = self._open(name).get_slice(name)
        except SafetensorError as error:
            raise WeightFilesError(f"{self._file_of[name]}: the index says it has {name!r}, but {error}") from error
        if (dtype := tensor_slice.get_dtype()) not in DTYPES:
            raise WeightFilesError(f"{self._file_of[name]}: {name} is {dtype}, which is none of {', '.join(DTYPES)}")
        return TensorSpec(tuple(tensor_slice.get_shape()), DTYPES[dtype])

    def _open(self, name: str) -> Any:
        path = self._file_of[name]
        if self._mapped is None or self._mapped[0] != path or self._mapped_bytes > MAX_MAPPED_BYTES:
            self._mapped = None  # unmap before the next is mapped
            self._mapped, self._mapped_bytes = (path, _opened(path)), 0
        return self._mapped[1]


def region(buffer: Tensor, block: Block) -> Tensor:
    """A view of a block's box in the buffer."""
    return buffer.as_strided(block.box.shape, block.strides, buffer.storage_offset() + block.offset)


def file_names(stem: str, num_files: int = 1) -> list[str]:
    """The names of the files that hold a set of tensors."""
    if num_files == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]


def index_name(stem: str) -> str:
    """Name of the index file, which maps tensors to files."""
    return f"{stem}.safetensors.index.json"


def _files_of(folder: Path, stem: str) -> dict[str, Path]:
    """Name of a tensor -> its file."""
    single, index = folder / file_names(stem)[0], folder / index_name(stem)
    if single.is_file():
        return dict.fromkeys(_opened(single).keys(), single)
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        hint = (
            f"it has {_some(others)}, a pickle that is not read; let transformers write it anew: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            if others
            else "is it the folder of a model with weights?"
        )
        raise WeightFilesError(f"{folder}: neither {single.name} nor {index.name} is there; {hint}")
    try:
        listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightFilesError(f"{index}: is no index of safetensors files ({error!r}); copy it again") from error
    missing = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if missing:
        raise WeightFilesError(f"{index}: lists {_some(missing)}, not in this folder; copy it again")
    return {name: folder / file for name, file in listed.items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightFilesError(
            f"{path}: is not a whole safetensors file ({error}); it may be truncated, a pickle, or a pointer to a "
            "file that was never fetched; copy it again"
        ) from error


def _some(names: Iterable[str]) -> str:
    first, more = list(names)[:MAX_NAMED], len(list(names)) - MAX_NAMED
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
