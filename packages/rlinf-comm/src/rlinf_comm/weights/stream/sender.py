"""Weights over any link between two processes: for other hosts, without shared memory.

    sender = WeightStreamSender(reshard, src_rank=0, link=peer, dst_names=["engine0", "engine1"])
    report = sender.publish(shard, policy_version=7)                                  # in the trainer
    ...
    WeightStreamReceiver(reshard, dst_rank=1, link=peer, src_names=["trainer0"]).receive(parameters, policy_version=7)

Both calls meet: each waits for the other. Boxes travel in buckets, in the dtype that is served: whole, or as what
changed since the version that the receiver acknowledged last (delta.py), whichever should be faster (choice.py).
A receiver digests the tensors that it is about to serve and compares with what the senders digested while they packed.

Memory: each side keeps a copy of what it sent or got, against which deltas are made; with deltas=False neither does.

An end that is given its device takes tensors that are there as they are: it packs, unpacks and digests on the device,
and what it sends is in device memory, always whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import Int64s, addresses_of
from rlinf_comm.errors import LayoutError, WeightMismatchError
from rlinf_comm.records import record
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.stream.choice import DeltaChoice, EncodingChoice
from rlinf_comm.weights.stream.delta import DeltaEncoder
from rlinf_comm.weights.stream.packing import Packing, are_on
from rlinf_comm.weights.stream.referenced import ReferencedTensors
from rlinf_comm.weights.stream.talk import Talk, for_each
from rlinf_comm.weights.stream.wire import (
    Ack,
    Content,
    HeldVersion,
    MessageLink,
    Pair,
    Reply,
    StreamOffer,
    checked_on,
    digests_to_bytes,
)

if TYPE_CHECKING:
    import torch

    from rlinf_comm.weights.device.device import TransferDevice

BUCKET_BYTES = 16 << 20
"""Packed, sent and unpacked at the same time, while the caches have it."""
DEVICE_BUCKET_BYTES = 64 << 20


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """One publication, to one receiver."""

    policy_version: int
    dst_rank: int
    choice: EncodingChoice
    """Delta or dense, and why. A bucket whose delta would be as large as itself is dense in any case."""
    num_bytes: int
    """Bytes of the weights that this sender has for the receiver."""
    sent_bytes: int
    """Bytes that went over the link."""
    num_delta_buckets: int
    num_buckets: int
    seconds: float


class _Destination:
    """What a sender knows of one receiver."""

    def __init__(self, name: str, pair: Pair, choice: DeltaChoice) -> None:
        self.name = name
        self.pair = pair
        self.choice = choice
        self.encoders = [DeltaEncoder(bucket.num_bytes, bucket.element_bytes) for bucket in pair.buckets]
        self.acknowledged: HeldVersion | None = None

    def forget(self) -> None:
        self.acknowledged = None
        for encoder in self.encoders:
            encoder.reset()


class WeightStreamSender:
    """Publishes what one source rank stores, to all destination ranks that need any of it.

    Args:
        dst_names: The name that the link has for every destination rank of the plan, in their order.
        dst_ranks: Publishes to these alone; by default to all that need any of what this rank stores.
        bucket_bytes: The most that is packed at a time, for each receiver; None: 16 MiB, and 64 MiB with a device.
        deltas: False: always dense, and no copy is kept on either side.
        new_choice: Makes what decides between delta and dense, one for each receiver.
        device: This rank's, where its tensors may be.

    Raises:
        LayoutError: the plan has no such rank, or not so many destination ranks.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        src_rank: int,
        link: MessageLink,
        dst_names: Sequence[str],
        *,
        dst_ranks: Collection[int] | None = None,
        bucket_bytes: int | None = None,
        deltas: bool = True,
        new_choice: Callable[[], DeltaChoice] = DeltaChoice,
        device: TransferDevice | None = None,
    ) -> None:
        if not 0 <= src_rank < plan.num_src_ranks or len(dst_names) != plan.num_dst_ranks:
            raise LayoutError(
                f"weight stream: source rank {src_rank} and {len(dst_names)} destinations; the plan has "
                f"{plan.num_src_ranks} source and {plan.num_dst_ranks} destination ranks"
            )
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if device is None else DEVICE_BUCKET_BYTES
        if bucket_bytes < 16:
            raise ValueError(f"bucket_bytes={bucket_bytes}; at least one element of 16 bytes must fit")
        self._plan = plan
        self._src_rank = src_rank
        self._link = link
        self._bucket_bytes = bucket_bytes
        self._deltas = deltas
        self._device = device
        self._session = uuid.uuid4().hex
        self._attempt = 0
        self._published = -1
        self._destinations: dict[int, _Destination] = {}
        ranks: set[int] = set(plan.table.dst_rank[plan.table.src_rank == src_rank].tolist())
        for rank in sorted(ranks if dst_ranks is None else ranks.intersection(dst_ranks)):
            pair = Pair(plan, src_rank, rank, "src", bucket_bytes, device)
            self._destinations[rank] = _Destination(dst_names[rank], pair, new_choice())

    def publish(
        self, tensors: Mapping[str, torch.Tensor] | ReferencedTensors, policy_version: int, timeout_s: float = 60.0
    ) -> list[StreamReport]:
        """Brings a version to all receivers, at the same time; returns when they have it and found it right.

        Args:
            tensors: This rank's buffers by name, exactly those of its layout; any strides. They must not change until
                this returns, but for lent ones, which may after `finish_reads`.
            policy_version: Larger than any that was published before. One that failed may be published again.
            timeout_s: Seconds for all of it, the wait for the receivers included.

        Raises:
            WeightTimeout: a receiver did not come, or did not finish.
            PeerLost: a receiver is gone. The others got the version.
            WeightMismatchError: a receiver wants another version, or found other contents than were sent; `tensors`
                names them. Or one of `tensors` is missing.
            LayoutError: a tensor is of another shape or dtype, is not of this layout, or neither on the CPU nor, with
                all others, on the device; names it.
        """
        who = f"sender {self._src_rank}"
        referenced = tensors if isinstance(tensors, ReferencedTensors) else ReferencedTensors(tensors)
        with referenced.reading() as own:
            checked_on(self._device, who, self._plan.src_buffers[self._src_rank], own)
        if policy_version < 0 or policy_version <= self._published:
            raise ValueError(
                f"weight stream: policy_version={policy_version} is not newer than {self._published}, which is "
                "published already; versions count up from 0"
            )
        self._attempt += 1

        def publish_to(rank: int, talk: Talk) -> StreamReport:
            try:
                return self._publish_to(rank, referenced, policy_version, talk)
            except BaseException:
                self._destinations[rank].forget()
                raise

        talks = {
            rank: Talk(self._link, to.name, f"weight stream: {who}: receiver {rank}", policy_version, timeout_s)
            for rank, to in self._destinations.items()
        }
        reports = for_each(publish_to, talks, stop_at_failure=False)
        self._published = policy_version
        return reports

    def _publish_to(self, rank: int, referenced: ReferencedTensors, policy_version: int, talk: Talk) -> StreamReport:
        to = self._destinations[rank]
        now = to.choice.now
        start_s = now()
        with self._prepared(to.pair, referenced) as (_, tied, addresses, on_device):
            tied_digests = digests_to_bytes(tied.digests(addresses))
        key = (self._session, self._attempt)
        talk.send(StreamOffer(*key, self._plan.digest, policy_version, self._bucket_bytes, tied_digests))
        reply = talk.receive(Reply, key)
        if reply.refusal is not None:
            raise WeightMismatchError(
                f"{talk.who} refused version {policy_version}: {reply.refusal}",
                expected_version=reply.wanted_version,
                found_version=policy_version,
            )
        choice = self._choice(to, reply.held, on_device)
        busy_s = send_s = encode_s = 0.0
        delta_bytes = sent_bytes = num_deltas = 0
        for number, (bucket, encoder) in enumerate(zip(to.pair.buckets, to.encoders, strict=True)):
            packing_s = now()
            with self._prepared(to.pair, referenced) as (packings, _, addresses, _):
                data, digests = packings[number].pack(addresses)
            is_kept = self._deltas and isinstance(data, np.ndarray)
            encoding_s = now()
            delta = self._delta(encoder, data, choice) if isinstance(data, np.ndarray) else None
            sending_s = now()
            sent = data if delta is None else delta
            talk.send(Content(*key, number, delta is not None, is_kept, digests_to_bytes(digests), sent))
            send_s += now() - sending_s
            busy_s += sending_s - packing_s
            encode_s += sending_s - encoding_s
            sent_bytes += sent.nbytes
            if delta is not None:
                num_deltas += 1
                delta_bytes += bucket.num_bytes
        ack = talk.receive(Ack, key)
        if ack.held != HeldVersion(self._session, policy_version):
            raise WeightMismatchError(
                f"{talk.who} could not take version {policy_version}: {ack.fault}",
                tensors=ack.tensors,
                expected_version=policy_version,
            )
        to.acknowledged = ack.held if self._deltas else None
        if choice.is_delta:
            to.choice.encoded(to.pair.num_bytes, sent_bytes, encode_s)
        to.choice.applied(delta_bytes, ack.apply_s)
        to.choice.sent(sent_bytes, max(send_s, ack.window_s - ack.busy_s - busy_s))
        return StreamReport(
            policy_version=policy_version,
            dst_rank=rank,
            choice=choice,
            num_bytes=to.pair.num_bytes,
            sent_bytes=sent_bytes,
            num_delta_buckets=num_deltas,
            num_buckets=len(to.pair.buckets),
            seconds=now() - start_s,
        )

    @contextmanager
    def _prepared(
        self, pair: Pair, referenced: ReferencedTensors
    ) -> Iterator[tuple[list[Packing], Packing, Int64s, bool]]:
        """(for each bucket, for the tied boxes, the addresses of the tensors, whether they are on the device)"""
        with referenced.reading() as tensors:
            in_order = {name: tensors[name] for name in self._plan.src_buffers[self._src_rank]}
            yield *pair.prepare(in_order), addresses_of(in_order.values()), are_on(self._device, in_order)

    def _choice(self, to: _Destination, held: HeldVersion | None, on_device: bool) -> EncodingChoice:
        if on_device:
            return EncodingChoice(is_delta=False, reason="the weights are on a device")
        if not self._deltas:
            return EncodingChoice(is_delta=False, reason="deltas=False")
        if to.acknowledged is None:
            return EncodingChoice(
                is_delta=False, reason="the receiver has acknowledged no version yet, or the last one failed"
            )
        if held != to.acknowledged:
            return EncodingChoice(is_delta=False, reason="the receiver does not hold the version that was acknowledged")
        return to.choice.choose(to.pair.num_bytes)

    def _delta(self, encoder: DeltaEncoder, data: np.ndarray, choice: EncodingChoice) -> np.ndarray | None:
        import torch

        if not self._deltas:
            return None
        if choice.is_delta:
            return encoder.encode(torch.from_numpy(data))
        encoder.keep(torch.from_numpy(data))
        return None
