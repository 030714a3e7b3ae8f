"""The tiles of the batched copy and digest kernels, run on the CPU with the kernels' own index arithmetic.

This proves the lowering and the shared code; what only the GPU runs (loads, stores, two conversion instructions, the
sum over a warp) is left to the tests marked gpu.
"""

import numpy as np
import pytest
import torch
from comm_digests import digest_by_program
from comm_properties import holds_for
from hypothesis import given, settings, strategies as st

from rlinf_comm import _C

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {1: 3, 2: 4, 4: 5, 8: 6, 16: 7}
TILE = np.dtype(
    [
        ("address", "<u8", 2),
        ("strides", "<i8", 4),
        ("num_columns", "<u4"),
        ("num_rows", "<u4"),
        ("reciprocal", "<u4"),
        ("unit_log2", "u1"),
        ("types", "u1", 2),
        ("reserved", "u1"),
    ]
)


def lower(source, destination, shape, source_strides, destination_strides, codes, offsets=(0, 0)):
    """Tiles of one copy; strides in bytes."""
    return _C.lower_copies(
        [0], [0], [offsets[0]], [offsets[1]], [shape], [source_strides], [destination_strides], [codes[0]], [codes[1]],
        [source], [destination],
    )  # fmt: skip


def draw_view(data, shape, element_bytes, skew):
    """Random bytes, and (offset, byte strides) of a view of `shape` in them with permuted dims and steps."""
    order = data.draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    extent = element_bytes
    for axis in order:
        step = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        pad = data.draw(st.sampled_from([0, 0, 1, 8])) * element_bytes
        strides[axis] = extent * step
        extent = extent * step * shape[axis] + pad
    return np.zeros(extent + skew + 64, dtype=np.uint8), skew, strides


def aligned_base(memory):
    return -memory.ctypes.data % 16


@holds_for(st.data(), num=100, num_slow=1000)
def test_plain_copies_agree_with_numpy(data):
    element = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 33, 70]), min_size=1, max_size=4))
    while np.prod(shape) > 40_000:
        shape.pop()
    views = []
    for _ in range(2):
        memory, skew, strides = draw_view(data, shape, element, data.draw(st.integers(0, 17)))
        views.append((memory, aligned_base(memory) + skew, strides))
    (source, source_at, source_strides), (target, target_at, target_strides) = views
    source[:] = np.random.default_rng(0).integers(0, 256, len(source))
    expected = target.copy()

    def as_view(memory, at, strides):
        return np.ndarray(shape, dtype=f"V{element}", buffer=memory, offset=at, strides=strides)

    as_view(expected, target_at, target_strides)[...] = as_view(source, source_at, source_strides)
    code = SIZES[element]
    tiles = lower(
        source.ctypes.data, target.ctypes.data, shape, source_strides, target_strides, (code, code),
        (source_at, target_at),
    )  # fmt: skip
    _C.run_copy_tiles_on_cpu(tiles)
    np.testing.assert_array_equal(target, expected)
    records = np.frombuffer(tiles, dtype=TILE)
    assert (records["num_columns"].astype(np.int64) * records["num_rows"] <= 4096).all()
    unit = 1 << records["unit_log2"].astype(np.int64)
    assert (records["address"] % unit[:, None].astype(np.uint64) == 0).all()
    assert (records["strides"][records["num_rows"] > 1][:, :2] % unit[records["num_rows"] > 1][:, None] == 0).all()


@pytest.mark.parametrize("source_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("target_dtype", FLOATS, ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_casts_agree_with_torch(source_dtype, target_dtype, data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 17, 64, 130]), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    heads = [data.draw(st.integers(0, 9)) for _ in range(2)]
    count = int(np.prod(shape))
    bits = torch.randint(0, 1 << 16, (count + heads[0], source_dtype.itemsize // 2), dtype=torch.int32)
    memory = bits.to(torch.uint16).view(source_dtype).reshape(-1)
    memory = torch.where(memory.isnan(), torch.ones((), dtype=source_dtype), memory)
    source = memory[heads[0] :].reshape([shape[axis] for axis in order]).permute(np.argsort(order).tolist())
    target = torch.zeros(count + heads[1], dtype=target_dtype)[heads[1] :].reshape(shape)
    tiles = lower(
        source.data_ptr(), target.data_ptr(), shape,
        [stride * source_dtype.itemsize for stride in source.stride()],
        [stride * target_dtype.itemsize for stride in target.stride()],
        (FLOATS.index(source_dtype), FLOATS.index(target_dtype)),
    )  # fmt: skip
    _C.run_copy_tiles_on_cpu(tiles)
    expected = torch.empty(shape, dtype=target_dtype).copy_(source)
    assert torch.equal(target.contiguous().view(torch.uint8), expected.view(torch.uint8))


def test_every_half_value_and_its_neighbours_round_as_in_torch():
    """All float16 values, their float32 neighbours and the midpoints between them."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    halves = halves[~halves.isnan()]
    exact = halves.float().view(torch.int32)
    for shift in [0, -1, 1, 0xFFF, 0x1000, 0x1001]:
        source = (exact + shift).view(torch.float32)
        source = source[~source.isnan()].contiguous()
        for code, dtype in [(1, torch.bfloat16), (2, torch.float16)]:
            target = torch.zeros(len(source), dtype=dtype)
            _C.run_copy_tiles_on_cpu(lower(source.data_ptr(), target.data_ptr(), [len(source)], [4], [2], (0, code)))
            assert torch.equal(target.view(torch.int16), source.to(dtype).view(torch.int16))


def test_nan_becomes_the_quiet_nan():
    source = torch.tensor([0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    for code, bits in [(1, 0x7FC0), (2, 0x7E00)]:
        target = torch.zeros(3, dtype=torch.int16)
        _C.run_copy_tiles_on_cpu(lower(source.data_ptr(), target.data_ptr(), [3], [4], [2], (0, code)))
        assert target.tolist() == [bits] * 3


def test_long_aligned_runs_use_16_byte_units_and_transposes_two_dims():
    tiles = np.frombuffer(lower(4096, 8192, [1 << 20], [1], [1], (3, 3)), dtype=TILE)
    assert set(tiles["unit_log2"]) == {4} and len(tiles) == 16
    unaligned = np.frombuffer(lower(4096 + 3, 8192 + 3, [1 << 20], [1], [1], (3, 3)), dtype=TILE)
    assert (unaligned["unit_log2"] == 4).sum() == 16 and len(unaligned) == 18
    transposed = np.frombuffer(lower(4096, 1 << 20, [64, 64], [2, 128], [128, 2], (1, 1)), dtype=TILE)
    assert len(transposed) == 4 and set(transposed["num_rows"]) == {32} == set(transposed["num_columns"])
    wide_cast = np.frombuffer(lower(4096, 1 << 20, [64, 512], [2048, 4], [1024, 2], (0, 1)), dtype=TILE)
    assert set(wide_cast["unit_log2"]) == {3}


def test_the_same_table_gives_the_same_tiles():
    arguments = (4096, 1 << 20, [7, 64, 3], [2, 128, 20000], [9000, 2, 1280], (1, 1))
    assert lower(*arguments) == lower(*arguments)


@pytest.mark.parametrize(
    ("codes", "strides", "text"),
    [
        ((0, 4), ([4], [2]), "no cast"),
        ((9, 9), ([4], [2]), "unknown"),
        ((3, 3), ([1], [0]), "one place many times"),
        ((0, 1), ([2], [2]), "multiples of the element"),
    ],
)
def test_what_cannot_be_copied_is_refused(codes, strides, text):
    with pytest.raises(ValueError, match=text):
        lower(4096, 8192, [4], strides[0], strides[1], codes)


@settings(max_examples=200)
@given(st.data())
def test_digest_tiles_agree_with_the_cpus_program(data):
    element = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    whole = data.draw(st.lists(st.sampled_from([1, 3, 4, 8, 9, 40]), min_size=1, max_size=4))
    start = [data.draw(st.integers(0, length - 1)) for length in whole]
    shape = [data.draw(st.integers(1, length - at)) for length, at in zip(whole, start, strict=True)]
    memory, skew, strides = draw_view(data, shape, element, data.draw(st.integers(0, 9)))
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory))
    index_strides = [int(np.prod(whole[axis + 1 :])) for axis in range(len(whole))]
    first = sum(at * stride for at, stride in zip(start, index_strides, strict=True))
    address = memory.ctypes.data + skew
    expected = digest_by_program(address, element, first, shape, strides, index_strides)
    box = (address, element, first, shape, strides, index_strides)
    tiles = _C.lower_digests([(*box, 1), (*box, 0), (*box, 1)])
    once, twice = _C.digest_tiles_on_cpu(tiles, 2)[0], _C.digest_tiles_on_cpu(tiles, 2)[1]
    assert once[0] | once[1] << 64 == expected
    double = 2 * expected % (1 << 128)
    assert twice[0] | twice[1] << 64 == double


@pytest.mark.parametrize("skew", [0, 2, 8], ids=["two words a load", "words by halves", "a word a load"])
@pytest.mark.parametrize(("rows", "words"), [(1, 64), (3, 65), (5, 63), (2, 1301), (1, 70_000)])
def test_long_rows_of_words_agree_with_the_cpus_program(rows, words, skew):
    columns = 4 * words + 3  # a row does not begin with a word, nor end with one
    memory = np.random.default_rng(2).integers(0, 256, 2 * rows * (columns + 5) + 32, dtype=np.uint8)
    address = memory.ctypes.data + aligned_base(memory) + skew
    memory_strides, index_strides = [2 * (columns + 5), 2], [columns + 1, 1]
    first = 4  # with an even stride of rows, most of them are rows of words
    expected = digest_by_program(address, 2, first, [rows, columns], memory_strides, index_strides)
    tiles = _C.lower_digests([(address, 2, first, [rows, columns], memory_strides, index_strides, 0)])
    ((low, high),) = _C.digest_tiles_on_cpu(tiles, 1)
    assert low | high << 64 == expected
    if rows == 1 and skew != 2 and words >= 64:
        assert len(tiles) == 72 * (1 + -(-words // 1024)), "the words and, on their own, the last elements"
