"""Maps names of a transformers model's tensors between disk and memory, both ways.

Most names are equal. transformers 5 stacks the experts of a layer in one tensor in memory, but writes each separately,
following its own tables (`transformers.conversion_mapping`). For reading, these tables become a layout of one rank with
the whole model: stacked tensors, and concatenated stacks, are boxes in it. For writing, transformers' own functions
convert the tensors that a rank writes. Earlier versions use the same names in memory and on disk.
"""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_comm.weights import Block, BufferSpec, Layout, RankLayout, specs_of
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.models.weight_files import WeightFiles

_PACKAGE = importlib.util.find_spec("transformers")
CONVERTS = _PACKAGE is not None and (Path(_PACKAGE.origin or "").parent / "core_model_loading.py").is_file()
"""Whether this release of transformers uses other names in memory than on disk; those before 5 do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """Weights on disk, and their places in the model."""

    files: WeightFiles
    layout: Layout
    """One rank, whose buffers are tensors of the model."""


def plain_weights(model: Any, folder: str | Path) -> StoredWeights:
    """Files with the model's own names. Raises: WeightFilesError."""
    return _stored(model, WeightFiles(folder), {})


def pretrained_weights(model: Any, folder: str | Path, without: Collection[str] = ()) -> StoredWeights:
    """A Hugging Face folder of a transformers model of the same architecture.

    Args:
        model: its parameters may be on the meta device.
        without: names of tensors to ignore.

    Raises: WeightFilesError naming tensors that are missing or have another shape.
    """
    files = WeightFiles(folder)
    return _stored(model, files, _conversions(model, files), without)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """Tensors on disk that form one in memory: each row is stacked, then the rows are concatenated.

    Example: two experts' gates and ups of shape [3, 5], in memory [2, 6, 5]:
        rows = [["0.gate", "1.gate"], ["0.up", "1.up"]], stacked = 0, joined = 1
    """

    rows: Sequence[Sequence[str]]
    stacked: int | None = None
    """The new dimension; None: a row has one tensor."""
    joined: int = 0
    """The dimension of the concatenation."""

    @property
    def is_plain(self) -> bool:
        """One tensor on disk is one in memory."""
        return self.stacked is None and len(self.rows) == 1

    def blocks(self, buffer: str, shape: tuple[int, ...], files: WeightFiles) -> list[Block]:
        """The box of each in the tensor in memory.

        Raises: WeightFilesError if they do not form a tensor of this shape.
        """
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        block_strides = tuple(stride for dim, stride in enumerate(strides) if dim != self.stacked)
        blocks, length = [], 0
        for row in self.rows:
            spec = files.specs[row[0]]
            own = list(spec.shape)
            if self.stacked is not None:
                own.insert(self.stacked, len(row))
            for number, name in enumerate(row):
                offset = length * strides[self.joined] if length else 0
                offset += number * strides[self.stacked] if self.stacked is not None else 0
                blocks.append(Block(name, spec.whole, buffer, offset, block_strides))
            if len(self.rows) > 1:
                length += own[self.joined]
                own[self.joined] = length if row is self.rows[-1] else shape[self.joined]
            if tuple(own) != shape or any(files.specs[name].shape != spec.shape for name in row):
                raise WeightFilesError(
                    f"{files.folder}: {row[0]} and what belongs to it make up {own}; the model's {buffer} is "
                    f"{list(shape)}"
                )
        return blocks


def _stored(
    model: Any, files: WeightFiles, conversions: Mapping[str, _Conversion], without: Collection[str] = ()
) -> StoredWeights:
    aliases: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases.setdefault(tensor, []).append(name)
    tensors = {names[0]: tensor for tensor, names in aliases.items() if not set(names) & set(without)}
    specs, blocks = specs_of(tensors), []
    made_of: dict[str, _Conversion] = {}
    for name, tensor in tensors.items():
        on_disk = next((other for other in aliases[tensor] if other in conversions or other in files.specs), name)
        made_of[name] = conversions.get(on_disk, _Conversion(rows=[[on_disk]]))
    plain = {one.rows[0][0]: specs[name].shape for name, one in made_of.items() if one.is_plain}
    files.check(plain)
    for name, conversion in made_of.items():
        blocks += conversion.blocks(name, specs[name].shape, files)
    file_specs = {block.name: files.specs[block.name] for block in blocks}
    buffers = {name: BufferSpec(spec.shape, spec.dtype) for name, spec in specs.items()}
    return StoredWeights(files=files, layout=Layout(file_specs, (RankLayout(buffers, tuple(blocks)),)))


def _conversions(model: Any, files: WeightFiles) -> dict[str, _Conversion]:
    """Name in memory -> its tensors on disk, for names that differ.

    Raises: WeightFilesError for a tensor that is not formed by stacking and concatenating.
    """
    if not CONVERTS:
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    rows_by_name: dict[str, dict[str, list[str]]] = {}
    for name in sorted(files.specs, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target != name and target in state:
            rows_by_name.setdefault(target, {}).setdefault(pattern or "", []).append(name)
    return {target: _conversion(target, rows, by_pattern) for target, rows in rows_by_name.items()}


def _conversion(target: str, rows: Mapping[str, list[str]], by_pattern: Mapping[str, Any]) -> _Conversion:
    if (renamed := rows.get("")) is not None:
        return _Conversion(rows=[renamed])
    converter = by_pattern[next(iter(rows))]
    ways = [type(operation).__name__ for operation in converter.operations]
    dims = {way: operation.dim for way, operation in zip(ways, converter.operations, strict=True) if way in _BOXES}
    if ways not in (["MergeModulelist"], ["Concatenate"], ["MergeModulelist", "Concatenate"]):
        raise WeightFilesError(
            f"{target}: transformers makes it of {next(iter(rows.values()))[0]} and others by {', '.join(ways)}, which "
            "cannot be read in pieces; use the backend replicated"
        )
    ordered = [rows[pattern] for pattern in converter.source_patterns if pattern in rows]
    return _Conversion(rows=ordered, stacked=dims.get("MergeModulelist"), joined=dims.get("Concatenate", 0))


_BOXES = ("MergeModulelist", "Concatenate")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that orders numbers in names by value: experts.2 before experts.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def converted_together(model: Any, names: Iterable[str]) -> list[Sequence[str]]:
    """Names of tensors in memory, grouped by the file tensor they form."""
    if not CONVERTS:
        return [[name] for name in names]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    loaded_with = getattr(model, "_weight_conversions", None)
    table = get_model_conversion_mapping(model, add_legacy=False) if loaded_with is None else loaded_with
    reverts = [one.reverse_transform() for one in reversed(table)]
    converters = [one for one in reverts if isinstance(one, WeightConverter)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        renamed = (key for key, pattern in (one.rename_source_key(name) for one in converters) if pattern is not None)
        groups[next(renamed, name)].append(name)  # at most one converter changes a name
    return list(groups.values())


def under_file_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors with names in memory to file tensors."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if not CONVERTS:
        return saved
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, saved)
