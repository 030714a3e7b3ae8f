"""What only GPUs can show of rlinf_comm.nccl: two ranks on two devices, or on one where NCCL allows it."""

import multiprocessing
import os
import signal

import pytest
import torch

from rlinf_comm import _C, nccl
from rlinf_comm.errors import NcclError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60
TWO_RANKS_ON_ONE_DEVICE = 23000


def communicator(unique_id, rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    return nccl.Communicator.create(unique_id, num_ranks=2, rank=rank, timeout_s=WAIT_S, max_ctas=4)


def finish(comm, stream):
    event = torch.cuda.Event()
    event.record(stream)
    comm.wait_until(event, timeout_s=WAIT_S)


def second_rank(pipe, unique_id, dies):
    comm = communicator(unique_id, 1)
    stream = torch.cuda.Stream()
    sent = torch.full((1000,), 2.5, dtype=torch.bfloat16, device="cuda")
    taken = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    if dies:
        pipe.send("ready")
        pipe.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    comm.exchange([nccl.receive(taken, from_=0), nccl.send(sent, to=0)], stream=stream, timeout_s=WAIT_S)
    finish(comm, stream)
    pipe.send(taken.cpu().numpy())
    comm.close()


@pytest.fixture
def two_ranks(monkeypatch):
    """start(dies) -> (communicator of rank 0, the other process, its pipe)"""
    try:
        library = nccl.find_library()
    except NcclError as error:
        pytest.skip(str(error))
    if torch.cuda.device_count() < 2:
        if library.version < TWO_RANKS_ON_ONE_DEVICE:
            pytest.skip(f"one device, and NCCL {library.version} refuses two ranks on it (2.30 is needed)")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    children = []

    def start(dies):
        id_ = nccl.unique_id()
        here, there = SPAWN.Pipe()
        children.append(SPAWN.Process(target=second_rank, args=(there, id_, dies), daemon=True))
        children[0].start()
        there.close()
        return communicator(id_, 0), children[0], here

    yield start
    for child in children:
        child.kill()
        child.join(WAIT_S)


def test_an_exchange_between_two_processes(two_ranks):
    comm, child, pipe = two_ranks(dies=False)
    stream = torch.cuda.Stream()
    sent, taken = torch.arange(1000.0, device="cuda"), torch.zeros(1000, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    comm.exchange([nccl.send(sent, to=1), nccl.receive(taken, from_=1)], stream=stream, timeout_s=WAIT_S)
    finish(comm, stream)
    assert pipe.poll(WAIT_S)
    assert torch.equal(torch.from_numpy(pipe.recv()), sent.cpu())
    assert taken.eq(2.5).all()
    comm.close()
    child.join(WAIT_S)


def test_a_dead_peer_ends_the_wait_and_the_communicator_can_be_aborted(two_ranks):
    comm, child, pipe = two_ranks(dies=True)
    assert pipe.poll(WAIT_S)
    pipe.recv()
    pipe.send("die")
    child.join(WAIT_S)
    stream = torch.cuda.Stream()
    taken = torch.zeros(1000, device="cuda")

    def receive():
        comm.exchange([nccl.receive(taken, from_=1)], stream=stream, timeout_s=10)
        event = torch.cuda.Event()
        event.record(stream)
        comm.wait_until(event, timeout_s=10)

    with pytest.raises(NcclError, match="rank 0 of 2"):
        receive()
    assert comm.abort()
