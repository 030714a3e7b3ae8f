"""What weights are, in 16 bytes a tensor: digests to compare trained weights with served ones, whatever their layouts.

    expected = merge_manifests(manifests of all trainer ranks)         # each made by manifest_of, where the shards are
    served = merge_manifests(manifests of all engine ranks)
    verify(expected, served)                                           # WeightMismatchError names what differs

Each rank digests the boxes that it stores, in the canonical dtype. Disjoint boxes add up to their tensor; boxes that
several ranks store must be equal on all of them, which is found when their manifests meet. A manifest is plain values
that cross a channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import COPY_DTYPES, DigestProgram, DigestTable, addresses_of
from rlinf_comm.errors import LayoutError, WeightMismatchError
from rlinf_comm.weights.digest import DIGEST_MODULUS
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.region import check_tensor
from rlinf_comm.weights.table import CASTABLE

if TYPE_CHECKING:
    import torch

_NUM_LISTED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxDigest:
    """Of one box of a canonical tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int
    """128 bits, in the canonical dtype; see weights/digest.py."""

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """The boxes of some ranks, or of all."""

    policy_version: int
    boxes: Mapping[str, tuple[BoxDigest, ...]]
    """Canonical name -> its boxes, disjoint, sorted by start."""

    def digest_of(self, name: str) -> int:
        """Of the tensor, as far as the boxes reach."""
        return sum(box.digest for box in self.boxes[name]) % DIGEST_MODULUS

    def num_elements_of(self, name: str) -> int:
        return sum(box.num_elements for box in self.boxes[name])


def manifest_of(
    layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor], *, policy_version: int, num_threads: int = 1
) -> WeightManifest:
    """What a rank of a layout holds.

    Args:
        tensors: The rank's buffers by name; contiguous CPU tensors.

    Raises:
        LayoutError: the layout has no such rank, or a tensor is missing, not contiguous or not what the layout says;
            names it.
    """
    if not 0 <= rank < layout.num_ranks:
        raise LayoutError(f"rank {rank} of a layout with {layout.num_ranks} ranks")
    buffers = layout.ranks[rank].buffers
    for name, spec in buffers.items():
        if name not in tensors:
            raise LayoutError(f"{name}: rank {rank} has no such tensor")
        check_tensor(f"rank {rank}: {name}", tensors[name], spec)
        if not tensors[name].is_contiguous():
            raise LayoutError(f"rank {rank}: {name}: not contiguous; pass tensor.contiguous()")
    table, names, starts, shapes = _digest_table(layout, rank)
    digests = DigestProgram(table).run(addresses_of(tensors[name] for name in buffers), num_threads)
    boxes: dict[str, list[BoxDigest]] = defaultdict(list)
    for name, start, shape, digest in zip(names, starts, shapes, digests, strict=True):
        boxes[name].append(BoxDigest(start=start, shape=shape, digest=digest))
    return WeightManifest(
        policy_version=policy_version, boxes={name: tuple(found) for name, found in sorted(boxes.items())}
    )


def _digest_table(
    layout: Layout, rank: int
) -> tuple[DigestTable, list[str], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(one digest for each block, canonical names, starts, shapes)"""
    blocks = layout.table
    rows = np.flatnonzero(blocks.rank == rank)
    stored = list(layout.ranks[rank].buffers.values())
    stored_codes = np.array([_code(spec.dtype) for spec in stored], np.uint8)[blocks.buffer[rows]]
    codes = np.array([_code(dtype) for dtype in blocks.dtypes], np.uint8)[blocks.tensor[rows]]
    index_strides = np.ones_like(blocks.shapes)
    index_strides[:, :-1] = np.cumprod(blocks.shapes[:, :0:-1], axis=1)[:, ::-1]
    index_strides = index_strides[blocks.tensor[rows]]
    item_bytes = np.array([4, 2, 2, 1, 2, 4, 8, 16], np.int64)[stored_codes]
    table = DigestTable(
        buffer=blocks.buffer[rows],
        offset=blocks.offset[rows] * item_bytes,
        lengths=blocks.length[rows],
        strides=blocks.strides[rows] * item_bytes[:, None],
        dtype=stored_codes,
        as_dtype=codes,
        digest=np.arange(len(rows), dtype=np.int32),
        first_index=(blocks.start[rows] * index_strides).sum(axis=1),
        index_strides=index_strides,
        num_digests=len(rows),
        buffer_bytes=np.array([spec.num_elements for spec in stored], np.int64)
        * np.array([4, 2, 2, 1, 2, 4, 8, 16], np.int64)[[_code(spec.dtype) for spec in stored]],
    )
    skipped = blocks.start.shape[1] - blocks.num_dims[blocks.tensor[rows]]
    return (
        table,
        [blocks.names[tensor] for tensor in blocks.tensor[rows].tolist()],
        [tuple(start[skip:]) for start, skip in zip(blocks.start[rows].tolist(), skipped.tolist(), strict=True)],
        [tuple(length[skip:]) for length, skip in zip(blocks.length[rows].tolist(), skipped.tolist(), strict=True)],
    )


def _code(dtype: str) -> int:
    from rlinf_comm.weights.layout import TensorSpec

    return COPY_DTYPES.index(dtype if dtype in CASTABLE else f"bytes{TensorSpec((), dtype).element_bytes}")


def merge_manifests(manifests: Iterable[WeightManifest]) -> WeightManifest:
    """What several ranks hold together.

    Raises:
        WeightMismatchError: ranks are of different versions, or hold the same box with different contents; names it.
        LayoutError: boxes overlap without being the same.
    """
    parts = list(manifests)
    if not parts:
        raise ValueError("no manifests to merge")
    versions = sorted({part.policy_version for part in parts})
    if len(versions) > 1:
        raise WeightMismatchError(
            f"ranks hold different versions: {versions}", expected_version=versions[-1], found_version=versions[0]
        )
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], BoxDigest]] = defaultdict(dict)
    unequal = set()
    for part in parts:
        for name, found in part.boxes.items():
            for box in found:
                known = boxes[name].setdefault((box.start, box.shape), box)
                if known.digest != box.digest:
                    unequal.add(name)
    if unequal:
        raise WeightMismatchError(
            f"version {versions[0]}: ranks that store the same part hold different values of {_listed(unequal)}",
            tensors=tuple(sorted(unequal)),
        )
    merged = {name: tuple(sorted(found.values(), key=_place)) for name, found in sorted(boxes.items())}
    for name, found in merged.items():
        _check_disjoint(name, found)
    return WeightManifest(policy_version=versions[0], boxes=merged)


def _place(box: BoxDigest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.shape


def _check_disjoint(name: str, boxes: tuple[BoxDigest, ...]) -> None:
    """Sorted by start, so that only boxes which begin before another's end along dimension 0 can meet it."""
    for index, box in enumerate(boxes):
        if not box.shape or not box.num_elements:
            continue
        for other in boxes[index + 1 :]:
            if other.start[0] >= box.start[0] + box.shape[0]:
                break
            meets = all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(box.start, box.shape, other.start, other.shape, strict=True)
            )
            if meets and other.num_elements:
                raise LayoutError(
                    f"{name}: ranks store the boxes {box.start} {box.shape} and {other.start} {other.shape}, which "
                    "overlap without being the same; their digests do not add up"
                )


def verify(expected: WeightManifest, served: WeightManifest) -> None:
    """Whether the served weights are the expected ones, bit for bit (up to a chance of 2^-64).

    Raises:
        WeightMismatchError: another version, or tensors that differ, are missing, are there in part only, or are not
            expected at all. The text says which are which, `tensors` lists all of them.
    """
    if served.policy_version != expected.policy_version:
        raise WeightMismatchError(
            f"version {served.policy_version} is served, version {expected.policy_version} is expected",
            expected_version=expected.policy_version,
            found_version=served.policy_version,
        )
    found: dict[str, list[str]] = {"missing": [], "incomplete": [], "different": [], "not expected": []}
    for name in sorted(expected.boxes.keys() | served.boxes.keys()):
        if name not in served.boxes:
            found["missing"].append(name)
        elif name not in expected.boxes:
            found["not expected"].append(name)
        elif served.num_elements_of(name) != expected.num_elements_of(name):
            found["incomplete"].append(name)
        elif served.digest_of(name) != expected.digest_of(name):
            found["different"].append(name)
    wrong = {what: names for what, names in found.items() if names}
    if wrong:
        raise WeightMismatchError(
            f"version {expected.policy_version} must not be served: "
            + "; ".join(f"{what}: {_listed(names)}" for what, names in wrong.items()),
            tensors=tuple(sorted(name for names in wrong.values() for name in names)),
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NUM_LISTED
    return ", ".join(ordered[:_NUM_LISTED]) + (f" and {more} more" if more > 0 else "")
