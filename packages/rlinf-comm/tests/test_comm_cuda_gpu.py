"""What only a GPU can show: loads, stores, conversions and warp sums, against torch and the CPU's digest."""

import random

import numpy as np
import pytest
import torch
from comm_digests import digest_by_program

from rlinf_comm import _C, Channel, cuda
from rlinf_comm.copies import DigestTable, StridedBox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WORDS = {torch.uint8: 3, torch.int16: 4, torch.int32: 5, torch.int64: 6, torch.complex128: 7}


class Table:
    """One copy between two tensors, as the fields of a copy table."""

    def __init__(self, source, target, code_of):
        self.src_buffer = self.dst_buffer = self.src_offset = self.dst_offset = [0]
        self.lengths = [list(source.shape)]
        self.src_strides = [[stride * source.itemsize for stride in source.stride()]]
        self.dst_strides = [[stride * target.itemsize for stride in target.stride()]]
        self.src_dtype, self.dst_dtype = [code_of(source.dtype)], [code_of(target.dtype)]


def run(source, target, code_of, stream=None):
    stream = stream or torch.cuda.current_stream()
    program = cuda.CudaCopyProgram(Table(source, target, code_of))
    program.run([source.data_ptr()], [target.data_ptr()], stream=stream, max_ctas=8)
    stream.synchronize()


def random_view(rng, shape, dtype):
    """A permuted, padded view of random bytes, at a random element of its memory."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    full = [shape[axis] + rng.choice([0, 0, 1, 8]) for axis in order]
    head = rng.randrange(10)
    count = int(np.prod(full)) + head
    memory = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda").view(dtype)
    view = memory[head:].view(full).permute([order.index(axis) for axis in range(len(shape))])
    return memory, view[tuple(slice(0, length) for length in shape)]


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_are_copied_bit_by_bit_and_nothing_else_is_written(seed):
    rng = random.Random(seed)
    dtype = rng.choice(list(WORDS))
    shape = [rng.choice([1, 2, 3, 8, 33, 64, 129]) for _ in range(rng.randint(1, 4))]
    _, source = random_view(rng, shape, dtype)
    memory, target = random_view(rng, shape, dtype)
    expected = memory.clone()
    torch.as_strided(expected, target.shape, target.stride(), target.storage_offset()).copy_(source)
    run(source, target, WORDS.__getitem__)
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("source_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("target_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_casts_equal_torch_s_on_the_cpu(source_dtype, target_dtype, seed):
    rng = random.Random(seed)
    shape = [rng.choice([1, 3, 17, 64, 256]) for _ in range(rng.randint(1, 3))]
    memory, source = random_view(rng, shape, source_dtype)
    memory[memory.isnan()] = 1
    _, target = random_view(rng, shape, target_dtype)
    run(source, target, FLOATS.index)
    expected = torch.empty(shape, dtype=target_dtype).copy_(source.cpu())
    assert torch.equal(target.cpu().contiguous().view(torch.uint8), expected.view(torch.uint8))


def test_every_half_value_is_widened_and_narrowed_as_on_the_cpu():
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).cuda()
    halves = halves[~halves.isnan()].contiguous()
    for shift in [0, 1, 0xFFF, 0x1000, 0x1001]:
        singles = (halves.float().view(torch.int32) + shift).view(torch.float32)
        singles = singles[~singles.isnan()].contiguous()
        for dtype in [torch.bfloat16, torch.float16]:
            target = torch.zeros(len(singles), dtype=dtype, device="cuda")
            run(singles, target, FLOATS.index)
            assert torch.equal(target.cpu().view(torch.int16), singles.cpu().to(dtype).view(torch.int16))


def test_nan_becomes_the_quiet_nan():
    source = torch.tensor([0x7F800001, -1, 0x7FC00000], dtype=torch.int32, device="cuda").view(torch.float32)
    for dtype, bits in [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)]:
        target = torch.zeros(3, dtype=dtype, device="cuda")
        run(source, target, FLOATS.index)
        assert target.view(torch.int16).tolist() == [bits] * 3


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_negative_strides_reverse(dtypes):
    source = torch.randn(37, 70, device="cuda").to(dtypes[0])
    target = torch.zeros(37, 70, dtype=dtypes[1], device="cuda")
    table = Table(source, target, FLOATS.index)
    table.src_offset = [source.nbytes - source.itemsize]  # from the last element backwards
    table.src_strides = [[-stride * source.itemsize for stride in source.stride()]]
    program = cuda.CudaCopyProgram(table)
    program.run([source.data_ptr()], [target.data_ptr()], stream=torch.cuda.current_stream())
    assert torch.equal(target.cpu(), source.cpu().flip(0, 1).to(dtypes[1]))


def test_the_copy_is_ordered_on_the_stream_it_is_given():
    stream = torch.cuda.Stream()
    source = torch.zeros(1 << 22, device="cuda")
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        source.fill_(7)
    run(source, target, FLOATS.index, stream)
    assert target.eq(7).all()


@pytest.mark.parametrize("seed", range(20))
def test_digests_equal_the_cpu_s(seed):
    rng = random.Random(seed)
    dtype = rng.choice(list(WORDS))
    shape = [rng.choice([1, 3, 8, 40, 129]) for _ in range(rng.randint(1, 3))]
    _, source = random_view(rng, shape, dtype)
    index_strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]

    def strides_of(tensor):
        return [stride * tensor.itemsize for stride in tensor.stride()]

    on_host = source.cpu()
    expected = digest_by_program(on_host.data_ptr(), dtype.itemsize, 0, shape, strides_of(on_host), index_strides)
    boxes = [
        StridedBox(
            buffer=0, shape=shape, strides=strides_of(source), dtype=f"bytes{dtype.itemsize}", digest=digest,
            first_index=0, index_strides=index_strides,
        )
        for digest in (0, 1, 1)
    ]  # fmt: skip
    program = cuda.CudaDigestProgram(DigestTable.of(boxes))
    once, twice = program.run([source.data_ptr()], stream=torch.cuda.current_stream())
    assert once == expected
    assert twice == 2 * once % (1 << 128)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_copies_in_one_pass_with_their_digests_equal_the_cpu_s(dtypes, seed):
    rng = random.Random(seed)
    shape = [rng.choice([1, 3, 64]), rng.choice([40, 2048, 4099])]
    _, source = random_view(rng, shape, dtypes[0])
    source[source.isnan()] = 1
    target = torch.zeros(shape, dtype=dtypes[1], device="cuda")
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    box = StridedBox(
        buffer=0, shape=shape, strides=[stride * source.itemsize for stride in source.stride()], dtype=names[0],
        as_dtype=names[1], digest=0, first_index=0, index_strides=[shape[1], 1],
    )  # fmt: skip
    table = Table(source, target, FLOATS.index)
    program = cuda.CudaCopyProgram(table, DigestTable.of([box]))
    stream = torch.cuda.current_stream()
    for _ in range(2):
        (digest,) = program.run_with_digests([source.data_ptr()], [target.data_ptr()], stream=stream)
    on_host = source.cpu().to(dtypes[1]).contiguous()
    assert torch.equal(target.cpu().view(torch.int16), on_host.view(torch.int16))
    strides = [stride * on_host.itemsize for stride in on_host.stride()]
    assert digest == digest_by_program(on_host.data_ptr(), on_host.itemsize, 0, shape, strides, [shape[1], 1])


def test_a_channel_takes_tensors_on_the_device():
    tensor = torch.arange(10_000, device="cuda").view(100, 100).t()
    channel = Channel.create("device")
    channel.put({"t": tensor})
    (item,) = channel.take()
    assert item.value["t"].device.type == "cpu"
    assert torch.equal(item.value["t"], tensor.cpu())
