"""Tensors in safetensors files: one file, or several and an index, as Hugging Face folders have them.

    model.safetensors
    model-00001-of-00002.safetensors  model-00002-of-00002.safetensors  model.safetensors.index.json

A file is digested while it is written, which the writer of the safetensors library cannot do, so the format is written
here: the length of the header in 8 bytes, the header in JSON, the bytes of the tensors. The files are those of the
library to the byte. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names in the header. A file begins with the tensors of the last dtype here, so that all are aligned."""
ALIGNMENT_BYTES = 8
BLOCK_BYTES = 1 << 22
"""Small enough that the bytes are still in the cache when they are written after being digested."""


def file_names(stem: str, num_files: int) -> list[str]:
    """The names of the files that hold a set of tensors."""
    if num_files == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]


def index_name(stem: str) -> str:
    """The name of the file that says which tensor is in which file."""
    return f"{stem}.safetensors.index.json"


def index_of(files: Mapping[str, Mapping[str, int]]) -> str:
    """The content of an index.

    Args:
        files: name -> the tensors in it and their bytes.
    """
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total_size = sum(sum(tensors.values()) for tensors in files.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes tensors in host memory and brings them to the disk.

    Returns: the SHA-256 of the file, in hexadecimal.
    """
    order = list(DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: (-order.index(item[1].dtype), item[0]))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (_header(ordered), *_blocks(ordered)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, tensor in tensors:
        offsets = [first, first + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        first = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, tensor in tensors:
        content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for first in range(0, len(content), BLOCK_BYTES):
            yield content[first : first + BLOCK_BYTES]


class TensorFiles:
    """The tensors of a folder, of which nothing is read before it is asked for; a context manager.

    Args:
        stem: `model` or `optimizer`, with which the names of the files begin.

    Raises: FileNotFoundError that names what was looked for.
    """

    def __init__(self, folder: str, stem: str) -> None:
        self._what = f"{folder}/{stem}"
        self._opened = ExitStack()
        self._files: dict[str, Any] = {}
        with ExitStack() as opened:
            for path in _paths(Path(folder), stem):
                file = opened.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
            self._opened = opened.pop_all()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._files)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._files[name].get_tensor(name)

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of a tensor; the rest is not read."""
        return self._files[name].get_slice(name)[part]

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites tensors with those of the same names.

        Raises: RuntimeError that names every tensor that is missing, left over or of another shape; nothing is written.
        """
        shapes = {name: list(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        wrong = [f"{name} is missing" for name in tensors.keys() - shapes.keys()]
        wrong += [f"{name} is not in the model" for name in shapes.keys() - tensors.keys()]
        wrong += [
            f"{name}: {shapes[name]}, in the model {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if name in shapes and shapes[name] != list(tensor.shape)
        ]
        if wrong:
            raise RuntimeError(f"{self._what}: the tensors are not those of the model: {'; '.join(sorted(wrong))}")
        for name, tensor in tensors.items():
            tensor.copy_(self.tensor(name))


def _paths(folder: Path, stem: str) -> list[Path]:
    (single,), index = file_names(stem, 1), index_name(stem)
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        raise FileNotFoundError(f"{folder} has neither {single} nor {index}")
    weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]
