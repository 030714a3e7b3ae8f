"""What only a GPU can show of rlinf_comm.ipc: two processes on one device, against torch's own results."""

import multiprocessing
import os
import signal

import pytest
import torch

from rlinf_comm import _C, cuda
from rlinf_comm.copies import CopyTable, StridedCopy
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc import BucketReader, BucketWriter, IpcArena, answer_probe, open_record, probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60


def peer(target, *arguments):
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=target, args=(there, *arguments), daemon=True)
    child.start()
    there.close()
    return child, here


def answer(pipe):
    assert pipe.poll(WAIT_S), "the other process does not answer"
    return pipe.recv()


def add_one(pipe, record):
    tensor = open_record(record)
    seen = tensor.cpu()
    tensor.add_(1)
    torch.cuda.synchronize()
    pipe.send(seen.float().numpy())
    pipe.recv()


@pytest.mark.parametrize("kind", ["legacy", "descriptor", "fabric"])
def test_a_tensor_is_read_and_written_in_the_other_process(kind):
    try:
        arena = IpcArena.create(0, 8 << 20, kind=kind)
    except IpcError as error:
        pytest.skip(f"{kind} handles do not work here: {error}")
    arena.empty((1000,), torch.uint8)
    tensor = arena.empty((64, 48), torch.bfloat16)
    tensor.copy_(torch.arange(64 * 48, device="cuda").view(64, 48) % 200)
    view = tensor[3:40, 5:].t()
    torch.cuda.synchronize()
    child, pipe = peer(add_one, arena.export(view))
    assert torch.equal(torch.from_numpy(answer(pipe)), view.float().cpu() - 1)
    untouched = torch.arange(64 * 48).view(64, 48) % 200
    assert torch.equal(tensor[:3].float().cpu(), untouched[:3].float())
    pipe.send("done")
    child.join(WAIT_S)


def answer_one_probe(pipe):
    pipe.send(answer_probe(pipe, device=0))


def test_the_probe_finds_the_same_device():
    child, pipe = peer(answer_one_probe)
    choice = probe(pipe, device=0)
    assert answer(pipe) == choice
    assert choice.transport == "same device" and "4 KB came back" in choice.reason
    child.join(WAIT_S)


def read_buckets(pipe, address, record, rounds):
    bucket, stream = open_record(record), torch.cuda.Stream()
    reader = BucketReader(address, device=0)
    pipe.send("attached")
    with torch.cuda.stream(stream):
        taken = []
        for _ in range(rounds):
            reader.receive(0, stream=stream, timeout_s=WAIT_S)
            torch.cuda._sleep(2_000_000)
            taken.append(bucket.clone())
            reader.acknowledge(0, stream=stream)
    stream.synchronize()
    pipe.send([(each.min().item(), each.max().item()) for each in taken])
    pipe.recv()


def test_leases_order_the_work_of_two_processes_without_a_host_that_waits():
    arena = IpcArena.create(0, 32 << 20)
    bucket = arena.empty((4 << 20,), torch.float32)
    writer, stream = BucketWriter(1, device=0), torch.cuda.Stream()
    child, pipe = peer(read_buckets, writer.address, arena.export(bucket), 20)
    assert answer(pipe) == "attached"
    with torch.cuda.stream(stream):
        for value in range(20):
            assert writer.acquire(0, stream=stream, timeout_s=WAIT_S)
            torch.cuda._sleep(2_000_000)
            bucket.fill_(value)
            writer.publish(0, stream=stream)
    assert answer(pipe) == [(value, value) for value in range(20)]
    pipe.send("done")
    child.join(WAIT_S)


def pull(pipe, records):
    shards = [open_record(record) for record in records]
    rows, columns = shards[0].shape
    whole = torch.zeros(rows, columns * len(shards), dtype=torch.bfloat16, device="cuda")
    copies = [
        StridedCopy(
            src_buffer=rank,
            dst_buffer=0,
            shape=(rows, columns),
            src_strides=(columns * 2, 2),
            dst_strides=(whole.stride(0) * 2, 2),
            src_dtype="bfloat16",
            dst_dtype="bfloat16",
            dst_offset=rank * columns * 2,
        )
        for rank in range(len(shards))
    ]
    stream = torch.cuda.current_stream()
    program = cuda.CudaCopyProgram(CopyTable.of(copies))
    program.run(cuda.pointers_of(shards), cuda.pointers_of([whole]), stream=stream)
    stream.synchronize()
    pipe.send(whole.view(torch.int16).cpu().numpy())
    pipe.recv()


def test_a_copy_program_pulls_shards_straight_from_the_sender_s_arena():
    arena = IpcArena.create(0, 16 << 20)
    shards = [arena.empty((96, 40), torch.bfloat16).normal_() for _ in range(4)]
    torch.cuda.synchronize()
    child, pipe = peer(pull, [arena.export(shard) for shard in shards])
    expected = torch.cat(shards, 1).view(torch.int16).cpu()
    assert torch.equal(torch.from_numpy(answer(pipe)), expected)
    pipe.send("done")
    child.join(WAIT_S)


def offer_and_die(pipe):
    arena = IpcArena.create(0, 1 << 20)
    pipe.send(arena.export(arena.empty((4,), torch.float32)))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_memory_of_a_dead_process_is_refused():
    child, pipe = peer(offer_and_die)
    record = answer(pipe)
    pipe.send("die")
    child.join(WAIT_S)
    with pytest.raises(IpcError, match="is gone"):
        open_record(record)
