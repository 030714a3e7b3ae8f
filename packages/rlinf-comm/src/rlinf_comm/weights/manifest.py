"""What weights are, in 16 bytes a tensor: digests to compare trained weights with served ones, whatever their layouts.

    expected = merge_manifests(manifests of all trainer ranks)         # each made by manifest_of, where the shards are
    served = merge_manifests(manifests of all engine ranks)
    verify(expected, served)                                           # WeightMismatchError names what differs

Each rank digests the boxes that it stores, in the canonical dtype. Disjoint boxes add up to their tensor; boxes that
several ranks store must be equal on all of them, which is found when their manifests meet. A manifest is plain values
that cross a channel. It also says how large each tensor of the layout is, so that a rank whose manifest was not merged
is missed, and what was left out: a rank may hold nothing else beside its layout.

Where the engine stores less than the canonical dtype holds, say bfloat16 of float32, the two are equal only in the
engine's dtypes: then both sides pass manifest_of(..., served_by=engine), and the trainer digests its values as cast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import CODE_BYTES, COPY_DTYPES, DigestProgram, DigestTable, addresses_of
from rlinf_comm.errors import LayoutError, WeightMismatchError
from rlinf_comm.records import record
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.region import check_tensor
from rlinf_comm.weights.table import CASTABLE
from rlinf_comm.weights.unlisted import check_used, checked_patterns, left_out, listed

if TYPE_CHECKING:
    import torch

DIGEST_MODULUS = 1 << 128
"""Digests of disjoint boxes add up modulo this: digest(w[:3]) + digest(w[3:]) is digest(w)."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class BoxDigest:
    """The digest of one box of a canonical tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int
    """128 bits, in the dtype that the manifest says; see csrc/include/rlinf/comm/digest.h."""
    dtype: str
    """Dtype in which the digest was computed; the elements are cast to it."""
    stored_dtype: str
    """Dtype of the buffer that holds the box."""

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def has_lost_bits(self) -> bool:
        """Whether the buffer cannot hold all values of the dtype that is compared."""
        return self.stored_dtype not in (self.dtype, "float32")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """The boxes of some ranks, or of all."""

    policy_version: int
    boxes: Mapping[str, tuple[BoxDigest, ...]]
    """Canonical name -> its boxes, disjoint, sorted by start."""
    num_elements: Mapping[str, int]
    """Canonical name -> elements of the whole tensor, for every tensor of the layout, whichever ranks store it."""
    left_out: Mapping[str, tuple[str, ...]]
    """Pattern of leave_out -> what it kept from being attested."""

    def digest_of(self, name: str) -> int:
        """The digest of all that the boxes cover of a tensor: of the whole tensor, if they cover it."""
        return sum(box.digest for box in self.boxes[name]) % DIGEST_MODULUS

    def num_elements_of(self, name: str) -> int:
        return sum(box.num_elements for box in self.boxes[name])


def manifest_of(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    policy_version: int,
    served_by: Layout | None = None,
    leave_out: Collection[str] = (),
    num_threads: int = 1,
) -> WeightManifest:
    """What a rank of a layout holds.

    Args:
        tensors: The rank's buffers by name; contiguous CPU tensors.
        served_by: Digest each tensor as this layout stores it, instead of in its canonical dtype. For an engine that
            stores less than that; trainer and engine give the same one.
        leave_out: Patterns, as in a shell, of whole names of tensors beside those of the layout, which may pass without
            a digest: ["*.rotary_emb.inv_freq"]. `verify` refuses one that matches nothing on any rank.

    Raises:
        LayoutError: the layout has no such rank, or a tensor is missing, not contiguous, not what the layout says, or
            in no layout and not left out; or served_by does not store it in one dtype; names it.
    """
    if not 0 <= rank < layout.num_ranks:
        raise LayoutError(f"rank {rank} of a layout with {layout.num_ranks} ranks")
    buffers = layout.ranks[rank].buffers
    found_out = left_out(f"rank {rank}", tensors, buffers, checked_patterns(leave_out, buffers, f"rank {rank}"))
    for name, spec in buffers.items():
        if name not in tensors:
            raise LayoutError(f"{name}: rank {rank} has no such tensor")
        check_tensor(f"rank {rank}: {name}", tensors[name], spec)
        if not tensors[name].is_contiguous():
            raise LayoutError(f"rank {rank}: {name}: not contiguous; pass tensor.contiguous()")
    dtypes = {name: spec.dtype for name, spec in layout.specs.items()}
    if served_by is not None:
        dtypes |= _stored_dtypes(served_by)
    table, names, starts, shapes = _digest_table(layout, rank, dtypes)
    digests = DigestProgram(table).run(addresses_of(tensors[name] for name in buffers), num_threads)
    stored = [spec.dtype for spec in buffers.values()]
    boxes: dict[str, list[BoxDigest]] = defaultdict(list)
    for name, start, shape, digest, buffer in zip(names, starts, shapes, digests, table.buffer.tolist(), strict=True):
        box = BoxDigest(start=start, shape=shape, digest=digest, dtype=dtypes[name], stored_dtype=stored[buffer])
        boxes[name].append(box)
    return WeightManifest(
        policy_version=policy_version,
        boxes={name: tuple(of_tensor) for name, of_tensor in sorted(boxes.items())},
        num_elements={name: math.prod(spec.shape) for name, spec in sorted(layout.specs.items())},
        left_out=found_out,
    )


def _stored_dtypes(layout: Layout) -> dict[str, str]:
    """Canonical name -> the dtype of its buffers."""
    by_name: dict[str, set[str]] = defaultdict(set)
    for rank in {id(rank): rank for rank in layout.ranks}.values():  # replicas share one
        for block in rank.blocks:
            by_name[block.name].add(rank.buffers[block.buffer].dtype)
    for name, dtypes in by_name.items():
        if len(dtypes) > 1:
            raise LayoutError(f"{name}: stored as {', '.join(sorted(dtypes))}; in one dtype, its digests can add up")
    return {name: dtype for name, (dtype,) in by_name.items()}


def _digest_table(
    layout: Layout, rank: int, dtypes: Mapping[str, str]
) -> tuple[DigestTable, list[str], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(one digest for each block, canonical names, starts, shapes)"""
    blocks = layout.table
    rows = np.flatnonzero(blocks.rank == rank)
    stored = list(layout.ranks[rank].buffers.values())
    stored_codes = np.array([_code(spec.dtype) for spec in stored], np.uint8)[blocks.buffer[rows]]
    codes = np.array([_code(dtype) for dtype in (dtypes[name] for name in blocks.names)], np.uint8)[blocks.tensor[rows]]
    index_strides = np.ones_like(blocks.shapes)
    index_strides[:, :-1] = np.cumprod(blocks.shapes[:, :0:-1], axis=1)[:, ::-1]
    index_strides = index_strides[blocks.tensor[rows]]
    item_bytes = CODE_BYTES[stored_codes]
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
        * CODE_BYTES[[_code(spec.dtype) for spec in stored]],
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
        LayoutError: boxes overlap without being the same, or the ranks are of layouts of different tensors.
    """
    parts = list(manifests)
    if not parts:
        raise ValueError("no manifests to merge")
    versions = sorted({part.policy_version for part in parts})
    if len(versions) > 1:
        raise WeightMismatchError(
            f"ranks hold different versions: {versions}", expected_version=versions[-1], found_version=versions[0]
        )
    num_elements = _same_tensors(parts)
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], BoxDigest]] = defaultdict(dict)
    unequal = set()
    for part in parts:
        for name, of_tensor in part.boxes.items():
            for box in of_tensor:
                first = boxes[name].setdefault((box.start, box.shape), box)
                if first.digest != box.digest or first.dtype != box.dtype:
                    unequal.add(name)
    if unequal:
        raise WeightMismatchError(
            f"version {versions[0]}: ranks that store the same part hold different values of {listed(sorted(unequal))}",
            tensors=tuple(sorted(unequal)),
        )
    merged = {name: tuple(sorted(of_tensor.values(), key=_place)) for name, of_tensor in sorted(boxes.items())}
    for name, of_tensor in merged.items():
        _check_disjoint(name, of_tensor)
    return WeightManifest(
        policy_version=versions[0], boxes=merged, num_elements=num_elements, left_out=_merged_left_out(parts)
    )


def _same_tensors(parts: list[WeightManifest]) -> Mapping[str, int]:
    num_elements = parts[0].num_elements
    for part in parts[1:]:
        if part.num_elements != num_elements:
            differing = sorted(dict(num_elements.items() ^ part.num_elements.items()))
            raise LayoutError(
                f"manifests of layouts with different tensors: {listed(differing)}; merge those of one layout"
            )
    return num_elements


def _merged_left_out(parts: list[WeightManifest]) -> dict[str, tuple[str, ...]]:
    names_by_pattern: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        for pattern, names in part.left_out.items():
            names_by_pattern[pattern].update(names)
    return {pattern: tuple(sorted(names)) for pattern, names in names_by_pattern.items()}


def _place(box: BoxDigest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.shape


def _check_disjoint(name: str, boxes: tuple[BoxDigest, ...]) -> None:
    """Refuses boxes that overlap. They are sorted by start: only one that begins before another's end can meet it."""
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
    """Whether the served weights are the expected ones, bit for bit (up to a chance of about 2^-63).

    Raises:
        WeightMismatchError: another version, or tensors that differ, are missing, are there in part only, or are not
            expected at all; also what is missing on both sides, since the manifest of a rank was not merged. The text
            says which are which, `tensors` lists all of them.
        LayoutError: a pattern of leave_out that matched nothing on any rank.
    """
    for which, manifest in (("what is expected", expected), ("what is served", served)):
        check_used([manifest.left_out], f"the ranks of {which}")
    if served.policy_version != expected.policy_version:
        raise WeightMismatchError(
            f"version {served.policy_version} is served, version {expected.policy_version} is expected",
            expected_version=expected.policy_version,
            found_version=served.policy_version,
        )
    faults: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted({*expected.num_elements, *served.num_elements, *served.boxes}):
        what = _fault(expected, served, name)
        if what is not None:
            faults[what].append(name)
    if faults:
        raise WeightMismatchError(
            f"version {expected.policy_version} must not be served: "
            + "; ".join(f"{what}: {listed(names)}" for what, names in faults.items()),
            tensors=tuple(sorted(name for names in faults.values() for name in names)),
        )


def _fault(expected: WeightManifest, served: WeightManifest, name: str) -> str | None:
    num_elements = expected.num_elements.get(name)
    if num_elements is None:
        return "not expected"
    if _num_held(expected, name) != num_elements:
        return "not all there in what is expected (merge the manifests of all ranks)"
    if _num_held(served, name) != num_elements:
        return "incomplete" if name in served.boxes else "missing"
    if not num_elements:
        return None
    if _dtypes_of(served, name) != _dtypes_of(expected, name):
        return "compared in different dtypes (give both manifests the same served_by)"
    return _difference(expected, served, name) if served.digest_of(name) != expected.digest_of(name) else None


def _num_held(manifest: WeightManifest, name: str) -> int:
    return manifest.num_elements_of(name) if name in manifest.boxes else 0


def _dtypes_of(manifest: WeightManifest, name: str) -> set[str]:
    return {box.dtype for box in manifest.boxes[name]}


def _difference(expected: WeightManifest, served: WeightManifest, name: str) -> str:
    """What to call it: a dtype that one side cannot hold says nothing about the weights."""
    boxes = served.boxes[name]
    if any(box.has_lost_bits for box in boxes) and not all(box.has_lost_bits for box in expected.boxes[name]):
        stored, dtype = boxes[0].stored_dtype, boxes[0].dtype
        return f"different, but served as {stored} and compared as {dtype} (see served_by of manifest_of)"
    return "different"
