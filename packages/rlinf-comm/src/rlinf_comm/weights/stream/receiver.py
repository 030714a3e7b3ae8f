"""The fetching and checking end of a weight stream; see sender.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import addresses_of
from rlinf_comm.errors import CommError, DecodeError, LayoutError, WeightMismatchError
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.stream.delta import apply_delta
from rlinf_comm.weights.stream.talk import Talk, for_each
from rlinf_comm.weights.stream.wire import (
    Ack,
    Bucket,
    Content,
    HeldVersion,
    MessageLink,
    Pair,
    Reply,
    StreamOffer,
    checked_on,
    digests_to_bytes,
)
from rlinf_comm.weights.unlisted import listed

if TYPE_CHECKING:
    import torch

    from rlinf_comm.weights.device.device import TransferDevice

_FAREWELL_S = 1.0
"""Seconds for telling all senders that their version failed here."""


@dataclass(slots=True)
class _Source:
    """What a receiver knows of one sender."""

    name: str
    pair: Pair | None = None
    held: HeldVersion | None = None
    buckets: list[np.ndarray] = field(default_factory=list)
    """The buckets of `held`; empty when no deltas follow."""

    def forget(self) -> None:
        self.held = None
        self.buckets = []


@dataclass(slots=True)
class _Taken:
    """What one call of receive() has taken from one sender."""

    offer: StreamOffer
    digests: list[bytes] = field(default_factory=list)
    """The digests that came with each bucket, as in `Content.digests`."""
    window_s: float = 0.0
    busy_s: float = 0.0
    apply_s: float = 0.0
    are_kept: bool = False


class WeightStreamReceiver:
    """Fetches what one destination rank serves, from all source ranks that store any of it.

    Args:
        src_names: The name that the link has for every source rank of the plan, in their order.
        device: This rank's, where its tensors may be.

    Raises:
        LayoutError: the plan has no such rank, or not so many source ranks.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        dst_rank: int,
        link: MessageLink,
        src_names: Sequence[str],
        *,
        device: TransferDevice | None = None,
    ) -> None:
        if not 0 <= dst_rank < plan.num_dst_ranks or len(src_names) != plan.num_src_ranks:
            raise LayoutError(
                f"weight stream: destination rank {dst_rank} and {len(src_names)} sources; the plan has "
                f"{plan.num_dst_ranks} destination and {plan.num_src_ranks} source ranks"
            )
        self._plan = plan
        self._dst_rank = dst_rank
        self._link = link
        self._device = device
        ranks: set[int] = set(plan.table.src_rank[plan.table.dst_rank == dst_rank].tolist())
        self._sources = {rank: _Source(src_names[rank]) for rank in sorted(ranks)}

    def receive(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """Copies a version into `tensors` in place, and checks that they now hold what the senders packed.

        Until this returns, and after it raised, the tensors must not be served. It may be called again.

        Args:
            tensors: This rank's buffers by name, exactly those of its layout; any strides.
            policy_version: Exactly this version. Offers of older ones are refused and passed over.
            timeout_s: Seconds for all of it.

        Raises:
            WeightMismatchError: tensors are missing or differ from what was sent (named in the text and in `tensors`),
                or a sender is past the version.
            WeightTimeout: a sender did not offer the version, or did not finish.
            PeerLost: a sender is gone.
            DecodeError: a sender sent something else than a weight stream.
            LayoutError: a tensor is of another shape or dtype, is not of this layout, or neither on the CPU nor, with
                all others, on the device, or a sender has another plan.
        """
        who = f"receiver {self._dst_rank}"
        own = checked_on(self._device, who, self._plan.dst_buffers[self._dst_rank], tensors)
        talks = {
            rank: Talk(self._link, source.name, f"weight stream: {who}: sender {rank}", policy_version, timeout_s)
            for rank, source in self._sources.items()
        }
        taken: dict[int, _Taken] = {}
        start_s = time.perf_counter()
        try:
            for_each(lambda rank, talk: self._take(rank, own, policy_version, talk, taken), talks, stop_at_failure=True)
            copied_s = time.perf_counter()
            wrong = for_each(lambda rank, _: self._wrong(rank, own, taken[rank]), talks, stop_at_failure=False)
            self._refuse(set().union(*wrong), policy_version)
            for rank, intake in taken.items():
                source = self._sources[rank]
                source.held = HeldVersion(intake.offer.session, policy_version)
                talks[rank].send(self._ack(intake, source.held))
        except BaseException as error:
            for source in self._sources.values():
                source.forget()
            self._tell(taken, policy_version, error)
            raise
        window_s = max((intake.window_s for intake in taken.values()), default=0.0)
        return SyncReport(
            policy_version=policy_version,
            num_bytes=sum(source.pair.num_bytes for source in self._sources.values() if source.pair),
            num_tensors=len({name for source in self._sources.values() for name in _names_of(source)}),
            wait_s=max(0.0, copied_s - start_s - window_s),
            copy_s=window_s,
            digest_s=time.perf_counter() - copied_s,
        )

    # --- one sender ---

    def _take(
        self,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        talk: Talk,
        taken: dict[int, _Taken],
    ) -> None:
        message: object = talk.receive(StreamOffer)
        while True:
            while not isinstance(message, StreamOffer) or not self._is_wanted(message, policy_version, talk):
                message = talk.receive(StreamOffer)
            # A sender whose call failed on the way offers again: then all begins anew.
            message = self._take_offered(self._sources[rank], message, tensors, talk, taken, rank)
            if message is None:
                return

    def _is_wanted(self, offer: StreamOffer, policy_version: int, talk: Talk) -> bool:
        """Refuses it otherwise. Raises when the version can no longer come."""
        refusal = None
        if offer.plan_digest != self._plan.digest:
            refusal = "it is of another plan"
        elif offer.policy_version != policy_version:
            refusal = f"version {policy_version} is wanted"
        if refusal is None:
            return True
        talk.send(Reply(offer.session, offer.attempt, None, refusal, policy_version))
        if offer.plan_digest != self._plan.digest:
            raise LayoutError(f"{talk.who} has another plan")
        if offer.policy_version > policy_version:
            raise WeightMismatchError(
                f"{talk.who} offers version {offer.policy_version}; version {policy_version} does not come back",
                expected_version=policy_version,
                found_version=offer.policy_version,
            )
        return False

    def _take_offered(
        self,
        source: _Source,
        offer: StreamOffer,
        tensors: Mapping[str, torch.Tensor],
        talk: Talk,
        taken: dict[int, _Taken],
        rank: int,
    ) -> StreamOffer | None:
        """All buckets, unpacked. Returns another offer if that comes instead."""
        if source.pair is None or source.pair.bucket_bytes != offer.bucket_bytes:
            if offer.bucket_bytes < 16:
                raise DecodeError(f"{talk.who} offers buckets of {offer.bucket_bytes} bytes")
            source.forget()
            source.pair = Pair(self._plan, rank, self._dst_rank, "dst", offer.bucket_bytes, self._device)
        held, bases = source.held, source.buckets
        if len(bases) != len(source.pair.buckets):
            held, bases = None, [np.empty(0, np.uint8) for _ in source.pair.buckets]
        source.forget()
        intake = taken[rank] = _Taken(offer)
        packings, _ = source.pair.prepare(tensors)
        addresses = addresses_of(tensors.values())
        talk.send(Reply(offer.session, offer.attempt, held, None, offer.policy_version))
        start_s = time.perf_counter()
        for number, (bucket, packing) in enumerate(zip(source.pair.buckets, packings, strict=True)):
            message = talk.receive((StreamOffer, Content))
            while not isinstance(message, StreamOffer) and (message.session, message.attempt) != (
                offer.session,
                offer.attempt,
            ):
                message = talk.receive((StreamOffer, Content))
            if isinstance(message, StreamOffer):
                return message
            came_s = time.perf_counter()
            data = self._data_of(message, number, bucket, bases, held is not None, talk, intake)
            packing.unpack(data, addresses)
            intake.digests.append(message.digests)
            intake.busy_s += time.perf_counter() - came_s
        intake.window_s = time.perf_counter() - start_s
        source.buckets = bases if intake.are_kept else []
        return None

    def _data_of(
        self,
        message: Content,
        number: int,
        bucket: Bucket,
        bases: list[np.ndarray],
        has_base: bool,
        talk: Talk,
        intake: _Taken,
    ) -> np.ndarray | torch.Tensor:
        """The bucket's bytes."""
        import torch

        data = message.data
        if not _is_row(data):
            raise DecodeError(f"{talk.who} sent a bucket that is no row of bytes")
        if message.bucket != number or (message.is_delta and not has_base):
            raise DecodeError(f"{talk.who} sent bucket {message.bucket} instead of {number}, or a delta to nothing")
        if not message.is_delta and data.nbytes != bucket.num_bytes:
            raise DecodeError(f"{talk.who} sent {data.nbytes} bytes for a bucket of {bucket.num_bytes} bytes")
        if isinstance(data, torch.Tensor):
            if message.is_delta or message.is_kept:
                raise DecodeError(f"{talk.who} sent a bucket in device memory as part of deltas")
            intake.are_kept = False
            return data
        intake.are_kept = message.is_kept
        if message.is_delta:
            start_s = time.perf_counter()
            try:
                apply_delta(torch.from_numpy(bases[number]), data)
            except DecodeError as error:
                names = tuple(sorted(set(bucket.names)))
                raise WeightMismatchError(f"{talk.who}: {listed(names)}: {error}", tensors=names) from error
            intake.apply_s += time.perf_counter() - start_s
            return bases[number]
        if not message.is_kept:
            return data
        if bases[number].nbytes != bucket.num_bytes:
            bases[number] = np.empty(bucket.num_bytes, np.uint8)
        np.copyto(bases[number], data)
        return bases[number]

    # --- all of them ---

    def _wrong(self, rank: int, tensors: Mapping[str, torch.Tensor], intake: _Taken) -> set[str]:
        """Names of what holds something else than this sender packed."""
        pair = self._sources[rank].pair
        assert pair is not None, "it was made for the offer"
        addresses = addresses_of(tensors.values())
        packings, tied = pair.prepare(tensors)
        checks = [*zip(pair.buckets, packings, intake.digests, strict=True)]
        checks.append((pair.tied, tied, intake.offer.tied_digests))
        wrong: set[str] = set()
        for bucket, packing, expected in checks:
            served = packing.digests(addresses)
            for index, (name, digest) in enumerate(zip(bucket.names, served, strict=True)):
                if expected[16 * index : 16 * index + 16] != digests_to_bytes([digest]):
                    wrong.add(name)
        return wrong

    def _refuse(self, wrong: set[str], policy_version: int) -> None:
        if wrong:
            raise WeightMismatchError(
                f"weight stream: receiver {self._dst_rank} must not serve version {policy_version}: "
                f"{listed(sorted(wrong))} differs from what its sender packed",
                tensors=tuple(sorted(wrong)),
                expected_version=policy_version,
            )

    def _ack(self, intake: _Taken, held: HeldVersion | None, error: BaseException | None = None) -> Ack:
        return Ack(
            session=intake.offer.session,
            attempt=intake.offer.attempt,
            held=held,
            tensors=error.tensors if isinstance(error, WeightMismatchError) else (),
            fault=None if error is None else _fault(error),
            window_s=intake.window_s,
            busy_s=intake.busy_s,
            apply_s=intake.apply_s,
        )

    def _tell(self, taken: Mapping[int, _Taken], policy_version: int, error: BaseException) -> None:
        """The senders need not wait until their time is up, nor those whose offer is about to come."""
        talks = {
            rank: Talk(self._link, source.name, f"sender {rank}", policy_version, _FAREWELL_S)
            for rank, source in self._sources.items()
        }
        for rank, talk in sorted(talks.items(), key=lambda item: item[0] not in taken):
            try:
                if rank in taken:
                    talk.send(self._ack(taken[rank], None, error))
                else:
                    offer = talk.receive(StreamOffer)
                    talk.send(Reply(offer.session, offer.attempt, None, _fault(error), policy_version))
            except (CommError, TimeoutError, OSError):
                pass  # it is gone, or has its own trouble


def _fault(error: BaseException) -> str:
    return str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}"


def _is_row(data: object) -> bool:
    """Whether it is bytes in a row, in numpy's hands or torch's."""
    import torch

    if isinstance(data, torch.Tensor):
        return data.dtype == torch.uint8 and data.dim() == 1 and data.is_contiguous()
    return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.flags.c_contiguous


def _names_of(source: _Source) -> set[str]:
    if source.pair is None:
        return set()
    return {name for bucket in (*source.pair.buckets, source.pair.tied) for name in bucket.names}
