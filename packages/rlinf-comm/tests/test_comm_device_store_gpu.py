"""What only a GPU can show of weights in device memory: two processes on one device, against torch's own casts."""

import multiprocessing
import os
import signal

import pytest
import torch

from rlinf_comm import _C, PeerLost, WeightMismatchError
from rlinf_comm.weights import Layout, TensorSpec, WeightStore, reshard_plan
from rlinf_comm.weights.device import (
    CudaDevice,
    DeviceWeightReceiver,
    DeviceWeightSender,
    create_device_store,
    mailbox_bytes,
)
from rlinf_comm.weights.device.memory import read_export
from rlinf_comm.weights.store.memory import Where

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60
SPECS = {
    "embed": TensorSpec((1000, 256), "bfloat16"),
    "w": TensorSpec((511, 130, 3), "bfloat16"),
    "norm": TensorSpec((77,), "bfloat16"),
    "steps": TensorSpec((9,), "int64"),
}
SOURCES = {
    "bfloat16": Layout.sharded(SPECS, 2, dim=1),
    "float32 masters": Layout.sharded(SPECS, 2, dtype="float32"),
}


def whole(version):
    """The values of a version on the device; float32."""
    generator = torch.Generator(device="cuda").manual_seed(version)
    tensors = {name: torch.randn(spec.shape, generator=generator, device="cuda") for name, spec in SPECS.items()}
    return tensors | {"steps": torch.arange(9, device="cuda") + version}


def shard(layout, rank, version):
    full, tensors = whole(version), {}
    for block in layout.ranks[rank].blocks:
        box = tuple(slice(at, at + n) for at, n in zip(block.box.start, block.box.shape, strict=True))
        dtype = getattr(torch, layout.ranks[rank].buffers[block.buffer].dtype)
        tensors[block.buffer] = full[block.name][box].to(dtype).contiguous()
    return tensors


def serve(pipe, source, address):
    """Takes the versions that it is told; answers with what is wrong."""
    reshard = reshard_plan(SOURCES[source], Layout.replicated(SPECS, 1))
    receiver = DeviceWeightReceiver(WeightStore.open(address), reshard, 0, CudaDevice())
    own = {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda") for name, spec in SPECS.items()
    }
    pipe.send("open")
    while (version := pipe.recv()) is not None:
        try:
            receiver.take(own, version, WAIT_S)()
        except (WeightMismatchError, PeerLost) as error:
            pipe.send((type(error).__name__, str(error)))
            continue
        expected = {name: tensor.to(own[name].dtype) for name, tensor in whole(version).items()}
        pipe.send([name for name in own if not torch.equal(own[name], expected[name])])


class Server:
    def __init__(self, source, address):
        self._pipe, there = SPAWN.Pipe()
        self._child = SPAWN.Process(target=serve, args=(there, source, address), daemon=True)
        self._child.start()
        there.close()
        assert self._answer() == "open"

    def _answer(self):
        assert self._pipe.poll(WAIT_S), "the other process does not answer"
        return self._pipe.recv()

    def take(self, version):
        self._pipe.send(version)
        return self._answer()


@pytest.mark.parametrize("source", SOURCES)
def test_versions_arrive_bit_for_bit_in_memory_that_is_used_again(source):
    layout = SOURCES[source]
    reshard = reshard_plan(layout, Layout.replicated(SPECS, 1))
    store = create_device_store(reshard, name="weights")
    senders = [DeviceWeightSender(store, reshard, rank, CudaDevice()) for rank in range(2)]
    server = Server(source, store.address)
    for version in range(4):
        for rank, sender in enumerate(senders):
            report = sender.publish(shard(layout, rank, version), version)
            assert report.num_allocations == (version == 0)
            assert sender.num_held_bytes() >= mailbox_bytes(reshard, rank)
        assert server.take(version) == []


@pytest.mark.parametrize("source", SOURCES)
def test_tensors_of_torch_are_lent_and_come_back_when_they_are_withdrawn(source):
    layout = SOURCES[source]
    reshard = reshard_plan(layout, Layout.replicated(SPECS, 1))
    store = create_device_store(reshard, name="weights")
    senders = [DeviceWeightSender(store, reshard, rank, CudaDevice()) for rank in range(2)]
    server = Server(source, store.address)
    lasting = [shard(layout, rank, 0) for rank in range(2)]
    for version in range(5):
        for rank, sender in enumerate(senders):
            sender.finish_reads()
            for name, tensor in shard(layout, rank, version).items():
                lasting[rank][name].copy_(tensor)
            sender.publish_by_reference(lasting[rank], version)
        assert server.take(version) == []
    slot = 4 % 2
    assert store.words.load(senders[0]._control.slot_where(0, slot)) == Where.REFERENCED
    assert (senders[0].num_held_bytes() == 0) == (source == "bfloat16")  # casts are digested by way of some memory
    for sender in senders:
        sender.withdraw(WAIT_S)


def test_a_flipped_byte_in_device_memory_is_named():
    layout = SOURCES["bfloat16"]
    reshard = reshard_plan(layout, Layout.replicated(SPECS, 1))
    store = create_device_store(reshard, name="weights")
    senders = [DeviceWeightSender(store, reshard, rank, CudaDevice()) for rank in range(2)]
    server = Server("bfloat16", store.address)
    for rank, sender in enumerate(senders):
        sender.publish(shard(layout, rank, 1), 1)
    export = read_export(store, reshard, 0, 0)
    assert export is not None
    (handle,) = export.handles
    memory = CudaDevice().bytes_at(handle.pointer, handle.num_bytes)
    memory[1000] ^= 4  # in the first piece of the first rank: half of embed
    torch.cuda.synchronize()
    kind, text = server.take(1)
    assert kind == "WeightMismatchError" and "embed differs from what its sender published" in text


def publish_and_die(pipe, address):
    reshard = reshard_plan(SOURCES["bfloat16"], Layout.replicated(SPECS, 1))
    sender = DeviceWeightSender(WeightStore.open(address), reshard, 1, CudaDevice())
    pipe.send("open")
    pipe.recv()
    sender.publish(shard(SOURCES["bfloat16"], 1, 3), 3)
    pipe.send("published")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_died_after_it_published_is_named():
    reshard = reshard_plan(SOURCES["bfloat16"], Layout.replicated(SPECS, 1))
    store = create_device_store(reshard, name="weights")
    living = DeviceWeightSender(store, reshard, 0, CudaDevice())
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=publish_and_die, args=(there, store.address), daemon=True)
    child.start()
    assert here.poll(WAIT_S) and here.recv() == "open"
    server = Server("bfloat16", store.address)
    living.publish(shard(SOURCES["bfloat16"], 0, 3), 3)
    here.send("publish")
    assert here.poll(WAIT_S) and here.recv() == "published"
    here.send("die")
    child.join(WAIT_S)
    kind, text = server.take(3)
    assert kind == "PeerLost" and "sender 1 died after it published version 3" in text
