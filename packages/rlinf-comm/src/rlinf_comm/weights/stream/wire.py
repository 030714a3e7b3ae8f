"""What streamed weights are on their way: buckets of boxes, and the messages that carry them.

For each receiver, in this order (the sender's messages on the left):

    Offer ->        which version, of which plan
    <- Reply        what the receiver holds, or why it does not want this version
    Content -> ...  one for each bucket
    <- Ack          what it holds now, after it has looked at its own tensors

Both sides cut the same plan into the same buckets, so that only contents travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from rlinf_comm.records import record
from rlinf_comm.weights.layout import Box, BufferSpec, TensorSpec
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.region import BoxRegion, checked_tensors, device_type_of
from rlinf_comm.weights.stream.packing import DevicePacking, HostPacking, Packing, are_on
from rlinf_comm.weights.transfer import Part, TransferPrograms

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from rlinf_comm.weights.device.device import TransferDevice

_ALIGNMENT_BYTES = 64
DIGEST_BYTES = 16


class MessageLink(Protocol):
    """Sends values to named peers, in order for each. rlinf_comm.peers.Peer is one.

    Several threads use it, each with another peer. Values are records of this file, numpy arrays and, from ends with a
    device, torch tensors.
    """

    def send(self, to: str, value: Any, *, timeout_s: float) -> None:
        """Raises TimeoutError, or PeerLost. The value does not change after the call."""
        ...

    def receive(self, from_: str, *, timeout_s: float) -> Any:
        """The next value of that peer. Raises TimeoutError, after which it may be called again, or PeerLost."""
        ...


@record
@dataclass(frozen=True, slots=True)
class HeldVersion:
    """What a receiver holds of a sender."""

    session: str
    """The sender's session: a new one may give the same version other contents."""
    policy_version: int


@record
@dataclass(frozen=True, slots=True)
class StreamOffer:
    session: str
    attempt: int
    """Counts the offers of a session. Every other message belongs to one."""
    plan_digest: str
    policy_version: int
    bucket_bytes: int
    tied_digests: bytes
    """Digests, 16 bytes each, of the boxes that the receiver stores in the memory of other boxes; those are not sent
    twice."""


@record
@dataclass(frozen=True, slots=True)
class Reply:
    session: str
    attempt: int
    held: HeldVersion | None
    refusal: str | None
    wanted_version: int


@record
@dataclass(frozen=True, slots=True)
class Content:
    session: str
    attempt: int
    bucket: int
    is_delta: bool
    """Whether `data` is a delta to what the receiver said that it holds."""
    is_kept: bool
    """Whether the receiver must keep the bucket, because deltas may follow."""
    digests: bytes
    """The digest of each box of the bucket, 16 bytes each: what the receiver's tensors must hold."""
    data: npt.NDArray[np.uint8] | torch.Tensor


@record
@dataclass(frozen=True, slots=True)
class Ack:
    session: str
    attempt: int
    held: HeldVersion | None
    """What the receiver holds now; None: it failed, and the next version must be sent whole."""
    tensors: tuple[str, ...]
    """Names of the tensors that differ from what was sent."""
    fault: str | None
    window_s: float
    """Seconds from the reply until the last bucket was unpacked."""
    busy_s: float
    """Seconds of `window_s` that were spent on unpacking."""
    apply_s: float
    """Seconds of `busy_s` that were spent on applying deltas."""


@record
@dataclass(frozen=True, slots=True)
class Bucket:
    """Boxes of one element size, packed."""

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    """The name of each part's canonical tensor."""
    num_bytes: int
    element_bytes: int


def checked_on(
    device: TransferDevice | None, who: str, buffers: Mapping[str, BufferSpec], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`checked_tensors` of a rank whose tensors are all on its device, or all on the host."""
    kind = device_type_of(tensors, None if device is None else device.type)
    return checked_tensors("weight stream", who, buffers, tensors, device_type=kind)


def digests_to_bytes(digests: list[int]) -> bytes:
    return b"".join(digest.to_bytes(DIGEST_BYTES, "little") for digest in digests)


def buckets_of(
    plan: ReshardPlan, src_rank: int, dst_rank: int, side: Literal["src", "dst"], bucket_bytes: int
) -> tuple[list[Bucket], Bucket]:
    """(what one rank sends another, the boxes in memory that is sent under another name: those are only digested)."""
    sent: list[tuple[str, Part]] = []
    tied: list[tuple[str, Part]] = []
    for name, part, is_tied in _parts(plan, src_rank, dst_rank, side):
        if is_tied:
            tied.append((name, part))
        else:
            sent += [(name, piece) for piece in _split(part, bucket_bytes // part.spec.element_bytes)]
    buckets: list[Bucket] = []
    for element_bytes in sorted({part.spec.element_bytes for _, part in sent}):
        group: list[tuple[str, Part]] = []
        offset = 0
        for name, part in sent:
            if part.spec.element_bytes != element_bytes:
                continue
            num_bytes = part.box.num_elements * element_bytes
            if group and offset + num_bytes > bucket_bytes:
                buckets.append(_bucket(group, element_bytes))
                group, offset = [], 0
            group.append((name, _at(part, offset)))
            offset = -(-(offset + num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buckets.append(_bucket(group, element_bytes))
    return buckets, Bucket(tuple(part for _, part in tied), tuple(name for name, _ in tied), 0, 1)


class Pair:
    """The buckets between two ranks, and the programs for the tensors of one of them."""

    def __init__(
        self,
        plan: ReshardPlan,
        src_rank: int,
        dst_rank: int,
        side: Literal["src", "dst"],
        bucket_bytes: int,
        device: TransferDevice | None = None,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.buckets, self.tied = buckets_of(plan, src_rank, dst_rank, side, bucket_bytes)
        self.num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self._device = device
        self._prepared: tuple[list[object], list[Packing], Packing] | None = None

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> tuple[list[Packing], Packing]:
        """(one for each bucket, that of the tied boxes); made again when the tensors move, or their strides change."""
        on_device = are_on(self._device, tensors)
        kind: list[object] = [on_device, *(tensor.stride() for tensor in tensors.values())]
        if self._prepared is None or self._prepared[0] != kind:
            packings = [self._packing(bucket, tensors, on_device) for bucket in (*self.buckets, self.tied)]
            self._prepared = (kind, packings[:-1], packings[-1])
        return self._prepared[1], self._prepared[2]

    def _packing(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor], on_device: bool) -> Packing:
        transfer = TransferPrograms(bucket.parts, tensors, [bucket.num_bytes])
        if on_device and self._device is not None:
            return DevicePacking(transfer, bucket.num_bytes, self._device)
        return HostPacking(transfer, bucket.num_bytes)


def _bucket(group: list[tuple[str, Part]], element_bytes: int) -> Bucket:
    last = group[-1][1]
    num_bytes = last.store_offset + last.box.num_elements * element_bytes
    return Bucket(tuple(part for _, part in group), tuple(name for name, _ in group), num_bytes, element_bytes)


def _parts(
    plan: ReshardPlan, src_rank: int, dst_rank: int, side: Literal["src", "dst"]
) -> Iterator[tuple[str, Part, bool]]:
    table = plan.table
    rows = np.flatnonzero((table.src_rank == src_rank) & (table.dst_rank == dst_rank))
    if side == "src":
        names, columns = list(plan.src_buffers[src_rank]), (table.src_buffer, table.src_offset, table.src_strides)
    else:
        names, columns = list(plan.dst_buffers[dst_rank]), (table.dst_buffer, table.dst_offset, table.dst_strides)
    for row, number, start, strides in zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True):
        piece = plan.piece_of_moves[row]
        shape = piece.box.shape
        place = BoxRegion(names[number], start, shape, tuple(strides[len(strides) - len(shape) :]))
        spec = TensorSpec(plan.specs[piece.name].shape, piece.dtype)
        yield piece.name, Part(piece.box, spec, place, store=0, store_offset=0), bool(table.tied[row])


def _split(part: Part, max_elements: int) -> Iterator[Part]:
    """Splits a part along its outermost dimensions until each piece fits."""
    box, place = part.box, part.place
    if box.num_elements <= max_elements:
        yield part
        return
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    for smaller in box.split(dim, min(-(-box.num_elements // max_elements), box.shape[dim])):
        steps = smaller.start[dim] - box.start[dim]
        offset = place.offset + steps * place.strides[dim]
        moved = BoxRegion(place.buffer, offset, smaller.shape, place.strides)
        yield from _split(_part(smaller, part.spec, moved, 0), max_elements)


def _at(part: Part, store_offset: int) -> Part:
    return _part(part.box, part.spec, part.place, store_offset)


def _part(box: Box, spec: TensorSpec, place: BoxRegion, store_offset: int) -> Part:
    return Part(box=box, spec=spec, place=place, store=0, store_offset=store_offset)
