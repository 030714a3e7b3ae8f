"""What only a GPU can show of peers in device memory: two processes on one device, or on two by NCCL."""

import multiprocessing

import pytest
import torch

from rlinf_comm import _C

pytest.importorskip("msgspec", reason="peers need msgspec")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPAWN = multiprocessing.get_context("spawn")
HANG_S = 120.0


def echo(pipe, device, transports):
    """Sends back what comes, each tensor where it arrived, until the parent leaves."""
    from rlinf_comm.errors import PeerLost
    from rlinf_comm.peers import Peer

    torch.cuda.set_device(device)
    torch.cuda.init()
    with Peer.listen("echo", transports=transports) as me:
        pipe.send(me.address)
        try:
            while True:
                value = me.receive("parent", timeout_s=HANG_S)
                me.send("parent", {"value": value, "device": str(value["w"].device)}, timeout_s=HANG_S)
                del value
        except PeerLost:
            pass
        pipe.recv()


@pytest.fixture
def start():
    """start(device, transports) -> (a peer on device 0, the transport to the other process)"""
    from rlinf_comm.peers import Peer

    torch.cuda.set_device(0)
    torch.cuda.init()
    ended = []

    def run(device, transports):
        here, there = SPAWN.Pipe()
        child = SPAWN.Process(target=echo, args=(there, device, transports), daemon=True)
        child.start()
        assert here.poll(HANG_S), "the other process does not start"
        me = Peer.listen("parent", transports=transports)
        ended.append((me, here, child))
        return me, me.connect(here.recv(), timeout_s=HANG_S)

    yield run
    for me, pipe, child in ended:
        me.close()
        pipe.send("done")
        child.join(HANG_S)
        child.kill()


def assert_comes_back(me, tensor, device):
    bits = tensor.contiguous().view(torch.uint8).clone()
    me.send("echo", {"w": tensor, "n": 3}, timeout_s=HANG_S)
    reply = me.receive("echo", timeout_s=HANG_S)
    received = reply["value"]["w"]
    assert reply["device"] == f"cuda:{device}" and received.is_cuda and reply["value"]["n"] == 3
    assert received.dtype == tensor.dtype and received.shape == tensor.shape
    assert torch.equal(received.contiguous().view(torch.uint8), bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool])
def test_tensors_cross_by_ipc_between_two_processes_on_one_device(start, dtype):
    me, chosen = start(0, None)
    assert chosen.name == "ipc" and "both on GPU-" in chosen.reason, str(chosen)
    highest = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, highest, (96 << 20,), dtype=torch.uint8, device="cuda")  # more than the capacity
    for tensor in (raw.view(dtype), raw[: 64 * 480].view(dtype).view(64, -1)[3:40, 5:].t(), raw[:0].view(dtype)):
        assert_comes_back(me, tensor, 0)


def test_a_value_is_what_was_on_the_stream_when_it_was_sent_and_what_is_written_later_is_not(start):
    me, chosen = start(0, None)
    assert chosen.name == "ipc", str(chosen)
    tensor = torch.zeros(4 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for value in range(20):
            torch.cuda._sleep(2_000_000)
            tensor.fill_(value)
            me.send("echo", {"w": tensor}, timeout_s=HANG_S)
            tensor.fill_(-1)
            received = me.receive("echo", timeout_s=HANG_S)["value"]["w"]
            assert (received == value).all().item()


def test_a_tensor_in_an_arena_crosses_without_a_copy(start):
    from rlinf_comm.ipc import IpcArena

    me, _ = start(0, ("ipc",))
    arena = IpcArena.create(0, 8 << 20)
    tensor = arena.empty((1000, 1000), torch.float32).normal_()
    assert_comes_back(me, tensor[10:, ::3], 0)
    assert me._links.get("echo").outgoing._arenas == []
    del tensor


def test_cupy_arrays_are_taken_and_given(start):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    me, _ = start(0, ("ipc",))
    array = cupy.arange(1000, dtype=cupy.float32).reshape(20, 50)
    me.send("echo", {"w": array.T}, timeout_s=HANG_S)
    received = cupy.from_dlpack(me.receive("echo", timeout_s=HANG_S)["value"]["w"])
    assert bool((received == array.T).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants two CUDA devices")
def test_tensors_cross_by_nccl_between_two_devices(start):
    me, chosen = start(1, ("nccl",))
    assert chosen.name == "nccl" and "by NCCL" in chosen.reason, str(chosen)
    raw = torch.randint(0, 256, (96 << 20,), dtype=torch.uint8, device="cuda")
    for tensor in (raw.view(torch.bfloat16), raw[: 64 * 480].view(64, -1)[3:40, 5:].t(), raw[:0]):
        assert_comes_back(me, tensor, 1)
