"""Weights over a link: queues between threads here, rlinf_comm.peers between processes at the end."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from comm_host_device import HostDevice
from comm_links import HANG_S, Net, together
from comm_references import megatron_rank, merged_rank

from rlinf_comm import DecodeError, PeerLost, WeightMismatchError, WeightTimeout, kept_pages, pack
from rlinf_comm.peers import Peer
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import (
    Block,
    Box,
    BufferSpec,
    Layout,
    RankLayout,
    ReferencedTensors,
    TensorSpec,
    WeightStreamReceiver,
    WeightStreamSender,
    reshard_plan,
)
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout
from rlinf_comm.weights.stream.choice import DeltaChoice
from rlinf_comm.weights.stream.wire import Ack, Content

SHAPE = TransformerShape(
    num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=4, vocab=13, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(0,), qkv_bias=True, qk_norm=True, dtype="float32",
)  # fmt: skip
TP2: dict[str, Any] = {"tp": 2, "pp": 1, "dp": 1, "ep": 2}


def fast_deltas() -> DeltaChoice:
    """Never measures any time, so that a delta is always tried."""
    choice = DeltaChoice(clock=lambda: 0.0)
    choice.applied = choice.sent = lambda *_: None  # type: ignore[method-assign]
    return choice


class Pairs:
    """Megatron TP2 to a merged TP1 in bfloat16 by default: two senders, receivers as the plan says."""

    def __init__(self, net: Net, reshard: Any, **options: Any) -> None:
        self.net, self.plan = net, reshard
        self.sources = [f"trainer{rank}" for rank in range(reshard.num_src_ranks)]
        self.engines = [f"engine{rank}" for rank in range(reshard.num_dst_ranks)]
        options = {"new_choice": fast_deltas, **options}
        self.senders = [
            WeightStreamSender(reshard, rank, net.link(name), self.engines, **options)
            for rank, name in enumerate(self.sources)
        ]
        self.receivers = [self.receiver(rank) for rank in range(len(self.engines))]

    def receiver(self, rank: int, device: Any = None) -> WeightStreamReceiver:
        return WeightStreamReceiver(self.plan, rank, self.net.link(self.engines[rank]), self.sources, device=device)

    def sync(self, shards: Any, served: Any, version: int, *, target: int | None = None, timeout_s: float = HANG_S):
        """(what the senders gave, what the receivers gave)"""
        expected = version if target is None else target
        calls = [
            lambda sender=sender, shard=shard: sender.publish(shard, version, timeout_s)
            for sender, shard in zip(self.senders, shards, strict=True)
        ]
        calls += [
            lambda receiver=receiver, tensors=tensors: receiver.receive(tensors, expected, timeout_s)
            for receiver, tensors in zip(self.receivers, served, strict=True)
        ]
        results = together(*calls)
        return results[: len(shards)], results[len(shards) :]


def raise_any(results: tuple[list[Any], list[Any]]) -> list[Any]:
    for result in (*results[0], *results[1]):
        if isinstance(result, BaseException):
            raise result
    return [report for reports in results[0] for report in reports]


def small(num_dst: int = 1, num_rows: int = 5000):
    """One sharded over two ranks, whole at the others; (plan, shards, served)."""
    specs = {"a": TensorSpec((num_rows, 4), "bfloat16"), "b": TensorSpec((64,), "float32")}
    reshard = reshard_plan(Layout.sharded(specs, 2), Layout.replicated(specs, num_dst))
    generator = torch.Generator().manual_seed(0)
    shards = [
        {
            name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
            for name, spec in buffers.items()
        }
        for buffers in reshard.src_buffers
    ]
    served = [
        {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        for _ in range(num_dst)
    ]
    return reshard, shards, served


def whole_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in SHAPE.specs().items()}


def megatron_shards(full: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What the ranks of a trainer with TP2 have of a model."""
    options: dict[str, Any] = dict(TP2, etp=1, te=True, experts="te_grouped", pad=-1.0, vocab_multiple=128)
    return [megatron_rank(full, SHAPE, rank=rank, **options) for rank in range(2)]


def merged_in_bfloat16(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a merged engine with TP1 has of it."""
    engine: dict[str, Any] = {"tp": 1, "ep": 1, "etp": 1, "vocab_tp": 1, "rank": 0, "pad": 0.0, "vocab_multiple": 64}
    return {name: one.bfloat16() for name, one in merged_rank(full, SHAPE, **engine).items()}


def whole(shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def contents(net: Net) -> list[Content]:
    messages = [value for value in net.sent if isinstance(value, Content)]
    net.sent.clear()
    return messages


@pytest.mark.parametrize("bucket_bytes", [64, 1000, 64 << 20])
@pytest.mark.parametrize("deltas", [True, False])
def test_megatron_tp2_to_a_merged_engine_in_bfloat16(bucket_bytes: int, deltas: bool):
    reshard = reshard_plan(megatron_layout(SHAPE, **TP2), merged_layout(SHAPE, tp=1, dtype="bfloat16"))
    net = Net()
    pairs = Pairs(net, reshard, bucket_bytes=bucket_bytes, deltas=deltas)
    full = whole_model()
    served = None
    for version in range(3):
        expected = merged_in_bfloat16(full)
        served = served or {name: torch.zeros_like(one) for name, one in expected.items()}
        shards = megatron_shards(full)
        reports = raise_any(pairs.sync(shards, [served], version))
        assert_bitwise_equal(served, expected)
        assert sum(report.num_bytes for report in reports) >= reshard.num_bytes
        assert all(content.data.nbytes <= bucket_bytes for content in contents(net))
        full = {name: -one if version else one for name, one in full.items()}


@pytest.mark.parametrize(("packs", "unpacks"), [(True, True), (True, False), (False, True)])
def test_ends_on_a_device_pack_and_check_there(packs: bool, unpacks: bool):
    reshard = reshard_plan(megatron_layout(SHAPE, **TP2), merged_layout(SHAPE, tp=1, dtype="bfloat16"))
    net = Net()
    pairs = Pairs(net, reshard, bucket_bytes=1000, device=HostDevice() if packs else None)
    pairs.receivers = [pairs.receiver(0, HostDevice() if unpacks else None)]
    full = whole_model()
    served = None
    for version in range(3):
        expected = merged_in_bfloat16(full)
        served = served or {name: torch.zeros_like(one) for name, one in expected.items()}
        shards = megatron_shards(full)
        raise_any(pairs.sync(shards, [served], version))
        assert_bitwise_equal(served, expected)
        assert {isinstance(content.data, torch.Tensor) for content in contents(net)} == {packs}
        full = {name: -one for name, one in full.items()}

    def flip(value: Any) -> Any:
        if isinstance(value, Content) and value.bucket == 0:
            data = value.data.copy() if isinstance(value.data, np.ndarray) else value.data.clone()
            data[5] ^= 4
            return dataclasses.replace(value, data=data)
        return value

    net.change = flip
    _, received = pairs.sync(shards, [served], 3)
    assert isinstance(received[0], WeightMismatchError) and received[0].tensors


def test_a_sender_that_comes_after_a_version_failed_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlinf_comm.weights.stream.receiver._FAREWELL_S", HANG_S)
    reshard, shards, served = small()
    has_failed = threading.Event()

    def spoil(value: Any) -> Any:
        if isinstance(value, Content):
            has_failed.set()
            return dataclasses.replace(value, bucket=value.bucket + 1)
        return value

    pairs = Pairs(Net(spoil), reshard)
    publish = pairs.senders[1].publish

    def publish_late(*args: Any) -> Any:
        assert has_failed.wait(HANG_S)
        time.sleep(0.3)  # the receiver no longer waits for this offer
        return publish(*args)

    monkeypatch.setattr(pairs.senders[1], "publish", publish_late)
    sent, received = pairs.sync(shards, served, 0)
    assert isinstance(received[0], DecodeError)
    assert isinstance(sent[1], WeightMismatchError) and "instead of 0" in str(sent[1])


def test_a_delta_when_little_changes_dense_when_all_does():
    reshard, shards, served = small(num_dst=2)
    net = Net()
    pairs = Pairs(net, reshard)
    first = raise_any(pairs.sync(shards, served, 0))
    assert {report.choice.is_delta for report in first} == {False} and not any(one.is_delta for one in contents(net))
    for shard in shards:
        shard["a"][7, 2] += 1
    little = raise_any(pairs.sync(shards, served, 1))
    assert all(report.num_delta_buckets and report.sent_bytes < report.num_bytes / 10 for report in little)
    contents(net)
    for shard in shards:
        for tensor in shard.values():
            tensor.neg_()
    everything = raise_any(pairs.sync(shards, served, 2))
    assert not any(one.is_delta for one in contents(net))
    assert all(report.sent_bytes == report.num_bytes for report in everything)
    for tensors in served:
        assert_bitwise_equal(tensors, whole(shards))


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_flipped_bit_is_caught_its_tensor_named_and_the_next_version_arrives(is_delta: bool):
    reshard, shards, served = small()
    net = Net()
    pairs = Pairs(net, reshard)
    if is_delta:
        raise_any(pairs.sync(shards, served, 0))
        shards[1]["a"][9, 1] += 1

    def flip(value: Any) -> Any:
        if isinstance(value, Content) and value.is_delta is is_delta and value.data.nbytes > (30 if is_delta else 1000):
            data = np.array(value.data)
            data[-1] ^= 4
            return dataclasses.replace(value, data=data)
        return value

    net.change = flip
    sent, received = pairs.sync(shards, served, 1)
    assert isinstance(received[0], WeightMismatchError) and received[0].tensors == ("a",)
    assert "a differs" in str(received[0])
    assert all(isinstance(one, WeightMismatchError) and one.tensors == ("a",) for one in sent)
    net.change = lambda value: value
    contents(net)
    raise_any(pairs.sync(shards, served, 1))
    assert not any(one.is_delta for one in contents(net))
    assert_bitwise_equal(served[0], whole(shards))


def test_what_changes_in_the_tensors_behind_the_copy_is_caught():
    reshard, shards, served = small()
    pairs = Pairs(Net(), reshard)
    look = pairs.receivers[0]._wrong

    def spoil(*arguments: Any) -> set[str]:
        served[0]["b"][3] = 77.0
        return look(*arguments)

    pairs.receivers[0]._wrong = spoil  # type: ignore[method-assign]
    _, received = pairs.sync(shards, served, 0)
    assert isinstance(received[0], WeightMismatchError) and received[0].tensors == ("b",)


def test_a_lent_version_comes_as_it_was_lent_though_its_tensors_have_changed():
    reshard, shards, served = small()
    expected = {name: tensor.clone() for name, tensor in whole(shards).items()}
    pairs = Pairs(Net(), reshard, bucket_bytes=1000)
    lent = [ReferencedTensors(shard) for shard in shards]
    with ThreadPoolExecutor(len(lent)) as pool:
        for sender, tensors in zip(pairs.senders, lent, strict=True):
            pool.submit(sender.publish, tensors, 0, HANG_S)
        for tensors, shard in zip(lent, shards, strict=True):
            tensors.finish_reads()
            for tensor in shard.values():
                tensor.zero_()
        pairs.receivers[0].receive(served[0], 0, HANG_S)
    assert_bitwise_equal(served[0], expected)


def test_lent_tensors_are_settled_when_nobody_reads_them_and_copied_only_for_who_still_does():
    lent, is_settled = ReferencedTensors({"w": torch.ones(2)}, num_readers=2), threading.Event()
    settling = threading.Thread(target=lambda: (lent.finish_reads(), is_settled.set()))
    lent.release()
    with lent.reading() as tensors:
        settling.start()
        assert not is_settled.wait(0.2)
    assert is_settled.wait(HANG_S)
    with lent.reading() as copies:
        assert copies["w"].equal(tensors["w"]) and copies["w"].data_ptr() != tensors["w"].data_ptr()
    lent.release()
    with lent.reading() as copies:
        assert not copies


def test_nothing_that_was_in_memory_before_travels_between_the_boxes():
    specs = {"a": TensorSpec(((1 << 20) + 3,), "bfloat16"), "b": TensorSpec((64,), "bfloat16")}
    reshard = reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1))
    shard = {name: torch.zeros(spec.shape, dtype=torch.bfloat16) for name, spec in specs.items()}
    net = Net()
    np.frombuffer(kept_pages.take((1 << 21) + 200), np.uint8)[:] = 7  # comes back for the bucket
    raise_any(Pairs(net, reshard).sync([shard], [{name: torch.ones_like(one) for name, one in shard.items()}], 0))
    (content,) = contents(net)
    assert not content.data.any()


def test_a_replacement_receiver_gets_everything_whole_and_the_others_deltas():
    reshard, shards, served = small(num_dst=2)
    pairs = Pairs(Net(), reshard)
    raise_any(pairs.sync(shards, served, 0))
    pairs.receivers[1] = pairs.receiver(1)
    served[1] = {name: torch.zeros_like(tensor) for name, tensor in served[1].items()}
    for version in (1, 2):
        for shard in shards:
            shard["a"][version] += 1
        reports = raise_any(pairs.sync(shards, served, version))
        for report in reports:
            assert report.choice.is_delta is (version == 2 or report.dst_rank == 0), report.choice.reason
        for tensors in served:
            assert_bitwise_equal(tensors, whole(shards))


def test_a_link_faster_than_the_search_is_sent_dense_and_deltas_are_tried_again():
    specs = {"a": TensorSpec((600_000,), "float32")}
    reshard = reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1))
    shards, served = [{"a": torch.zeros(600_000)}], [{"a": torch.zeros(600_000)}]
    ticks = iter(range(10**9))  # each look at the clock costs a second: searching takes as long as sending

    def new_choice() -> DeltaChoice:
        return DeltaChoice(retry_every=3, clock=lambda: float(next(ticks)))

    pairs = Pairs(Net(), reshard, new_choice=new_choice)
    choices = []
    for version in range(10):
        shards[0]["a"][version] = 1
        choices += [report.choice for report in raise_any(pairs.sync(shards, served, version))]
        assert_bitwise_equal(served, shards)
    assert [choice.is_delta for choice in choices] == [False, True, *[False] * 3, True, *[False] * 3, True]
    assert choices[2].reason == "predicted to be slower" and choices[5].reason == "tried again"


def test_an_acknowledgement_of_an_earlier_attempt_is_passed_over():
    reshard, shards, served = small()
    net = Net()
    pairs = Pairs(net, reshard)
    session = pairs.senders[0]._session

    def add_stale(value: Any) -> Any:
        if isinstance(value, Content) and value.session == session:
            net.queue("engine0", "trainer0").put(
                Ack(session, value.attempt - 1, None, ("a",), "stale", window_s=0.0, busy_s=0.0, apply_s=0.0)
            )
        return value

    net.change = add_stale
    raise_any(pairs.sync(shards, served, 0))
    assert_bitwise_equal(served[0], whole(shards))


def test_tied_tensors_travel_once_and_are_checked_under_both_names():
    specs = {name: TensorSpec((3, 2), "float32") for name in ("embed", "head")}
    blocks = tuple(Block(name, Box((0, 0), (3, 2)), "embed", 0, (2, 1)) for name in specs)
    tied = Layout(specs, (RankLayout({"embed": BufferSpec((3, 2), "float32")}, blocks),))
    pairs = Pairs(Net(), reshard_plan(Layout.replicated(specs, 1), tied))
    value = torch.arange(6.0).reshape(3, 2)
    served = {"embed": torch.zeros(3, 2)}
    (report,) = raise_any(pairs.sync([{"embed": value, "head": value.clone()}], [served], 0))
    assert report.num_bytes == 24
    assert_bitwise_equal(served, {"embed": value})
    _, received = pairs.sync([{"embed": value, "head": value + 1}], [served], 1)
    assert isinstance(received[0], WeightMismatchError) and len(received[0].tensors) == 1


def test_a_lost_receiver_is_told_and_the_other_one_gets_its_version():
    reshard, shards, served = small(num_dst=2)
    net = Net()
    pairs = Pairs(net, reshard)
    net.lost.add("engine0")
    pairs.receivers[0].receive = lambda *_: None  # type: ignore[method-assign]
    sent, received = pairs.sync(shards, served, 0)
    assert all(isinstance(one, PeerLost) for one in sent)
    assert not isinstance(received[1], Exception)
    assert_bitwise_equal(served[1], whole(shards))


def test_nobody_comes_in_time():
    reshard, shards, served = small()
    net = Net()
    pairs = Pairs(net, reshard)
    with pytest.raises(WeightTimeout, match=r"receiver 0 \('engine0'\) sent no Reply within timeout_s=0.2"):
        pairs.senders[0].publish(shards[0], 0, timeout_s=0.2)
    other = Pairs(Net(), reshard)
    with pytest.raises(WeightTimeout, match="sent no StreamOffer"):
        other.receivers[0].receive(served[0], 0, timeout_s=0.2)
    raise_any(pairs.sync(shards, served, 0))  # the offer of the call that gave up is passed over
    assert_bitwise_equal(served[0], whole(shards))


def test_one_lost_sender_ends_the_wait_for_the_others():
    reshard, _, served = small()
    net = Net()
    pairs = Pairs(net, reshard)
    net.lost.add("trainer1")
    with pytest.raises(PeerLost):  # and no WeightTimeout
        pairs.receivers[0].receive(served[0], 0, timeout_s=HANG_S)


def test_versions_that_are_not_wanted_are_refused():
    reshard, shards, served = small()
    pairs = Pairs(Net(), reshard)
    raise_any(pairs.sync(shards, served, 5))
    with pytest.raises(ValueError, match="policy_version=5 is not newer than 5"):
        pairs.senders[0].publish(shards[0], 5)
    before = {name: tensor.clone() for name, tensor in served[0].items()}
    sent, received = pairs.sync(shards, served, 6, target=8, timeout_s=1.0)
    assert all(isinstance(one, WeightMismatchError) and "version 8 is wanted" in str(one) for one in sent)
    assert isinstance(received[0], WeightTimeout)
    sent, received = pairs.sync(shards, served, 7, target=6, timeout_s=1.0)
    assert type(received[0]) is WeightMismatchError and received[0].found_version == 7
    assert all(isinstance(one, WeightMismatchError) for one in sent)
    assert_bitwise_equal(served[0], before)


def test_between_two_processes_over_peers():
    specs = {"a": TensorSpec((5000, 4), "bfloat16"), "b": TensorSpec((64,), "float32")}
    reshard = reshard_plan(Layout.replicated(specs, 1), Layout.replicated(specs, 1))
    shards = [{"a": torch.randn(5000, 4).bfloat16(), "b": torch.randn(64)}]
    with Peer.listen("trainer") as me:
        script = pathlib.Path(__file__).with_name("comm_stream_peer.py")
        process = subprocess.Popen([sys.executable, str(script), pack((me.address, reshard)).hex()])
        try:
            assert me.receive("engine", timeout_s=60.0) == "ready"
            senders = [WeightStreamSender(reshard, 0, me, ["engine"], new_choice=fast_deltas)]
            for version in range(3):
                shards[0]["a"][version] += 1
                (report,) = senders[0].publish(shards[0], version, timeout_s=HANG_S)
                assert report.choice.is_delta is (version > 0)
                tensors = me.receive("engine", timeout_s=HANG_S)
                assert_bitwise_equal(tensors, shards[0])
            process.kill()
            with pytest.raises(PeerLost):
                senders[0].publish(shards[0], 3, timeout_s=HANG_S)
        finally:
            process.kill()
            process.wait()


def test_the_array_of_a_link_may_be_read_only():
    reshard, shards, served = small()

    def freeze(value: Any) -> Any:
        if isinstance(value, Content):
            assert isinstance(value.data, np.ndarray)
            value.data.flags.writeable = False
        return value

    for deltas in (True, False):
        pairs = Pairs(Net(freeze), reshard, deltas=deltas)
        for version in range(2):
            raise_any(pairs.sync(shards, served, version))
        assert_bitwise_equal(served[0], whole(shards))
    assert np.isfinite(served[0]["b"].numpy()).all()
