"""rlinf_comm.copies: random tables against an element-by-element reference, and what a table may not say."""

import dataclasses
import math
import multiprocessing
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from comm_casts import cast_by_torch
from comm_properties import holds_for
from hypothesis import strategies as st

from rlinf_comm import _C
from rlinf_comm.copies import (
    CODE_OF,
    COPY_DTYPES,
    CopyProgram,
    CopyTable,
    StridedCopy,
    addresses_of,
    code_of_dtype,
)

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "bytes1": 1, "bytes2": 2, "bytes4": 4, "bytes8": 8, "bytes16": 16}
SETS = ["scalar", "avx2", "avx512"]
AVAILABLE_SETS = SETS[: SETS.index(_C.best_instruction_set()) + 1]


def offsets_of(shape, strides):
    """Byte offset of every element, row by row."""
    grid = np.zeros(shape, dtype=np.int64)
    for dim, stride in enumerate(strides):
        index = np.arange(shape[dim], dtype=np.int64).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        grid = grid + index * stride
    return grid.ravel()


def reference_run(copies, sources, destinations):
    """One element at a time, casts by torch on strided tensors (whose NaN is c10's: see float_convert.h)."""
    for copy in copies:
        src, dst = sources[copy.src_buffer], destinations[copy.dst_buffer]
        src_at = offsets_of(copy.shape, copy.src_strides) + copy.src_offset
        dst_at = offsets_of(copy.shape, copy.dst_strides) + copy.dst_offset
        for one_from, one_to in zip(src_at.tolist(), dst_at.tolist(), strict=True):
            element = src[one_from : one_from + SIZES[copy.src_dtype]]
            if copy.src_dtype != copy.dst_dtype:
                value = torch.from_numpy(element.copy()).view(getattr(torch, copy.src_dtype))
                element = cast_by_torch(value, getattr(torch, copy.dst_dtype)).view(torch.uint8).numpy()
            dst[one_to : one_to + SIZES[copy.dst_dtype]] = element


@st.composite
def sides(draw, shape, size):
    """(strides, extent): a permuted, padded array of elements of `size` bytes; sometimes backwards."""
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = size
    for dim in reversed(order):
        step += draw(st.sampled_from([0, 0, 0, size, 3 * size]))
        strides[dim] = step
        step *= shape[dim]
    return strides, sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + size


@st.composite
def tables(draw):
    """Copies whose destinations do not overlap, and the bytes of the buffers they need."""
    num_src, num_dst = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    src_bytes, dst_bytes = [64] * num_src, [0] * num_dst
    copies = []
    for _ in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(COPY_DTYPES))
        to = draw(st.sampled_from(COPY_DTYPES[:3])) if dtype in COPY_DTYPES[:3] else dtype
        shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 17, 40]), max_size=4))
        if math.prod(shape) > 4000 or draw(st.integers(0, 15)) == 0:
            shape = [0, 3]
        src, dst = draw(st.integers(0, num_src - 1)), draw(st.integers(0, num_dst - 1))
        src_strides, src_extent = draw(sides(shape, SIZES[dtype]))
        dst_strides, dst_extent = draw(sides(shape, SIZES[to]))
        if draw(st.booleans()) and shape and shape[0]:  # walk the source backwards
            src_offset = (shape[0] - 1) * src_strides[0]
            src_strides = [-src_strides[0], *src_strides[1:]]
        else:
            src_offset = draw(st.integers(0, 9))
        src_bytes[src] = max(src_bytes[src], src_extent + 9)
        gap = draw(st.sampled_from([0, 0, 1, 64]))
        copies.append(
            StridedCopy(
                src_buffer=src,
                dst_buffer=dst,
                shape=shape,
                src_strides=src_strides,
                dst_strides=dst_strides,
                src_dtype=dtype,
                dst_dtype=to,
                src_offset=src_offset,
                dst_offset=dst_bytes[dst] + gap,
            )
        )
        dst_bytes[dst] += gap + max(dst_extent, 0)
    return copies, src_bytes, [size + 8 for size in dst_bytes]


def random_bytes(num_bytes, seed):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def pointers(arrays):
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)


@holds_for(tables(), st.sampled_from(AVAILABLE_SETS), st.integers(1, 3), num=100, num_slow=1000)
def test_any_table_does_what_it_says(table, instructions, num_threads):
    copies, src_bytes, dst_bytes = table
    sources = [random_bytes(size, seed) for seed, size in enumerate(src_bytes)]
    destinations = [random_bytes(size, 50 + seed) for seed, size in enumerate(dst_bytes)]
    expected = [array.copy() for array in destinations]
    reference_run(copies, sources, expected)
    program = CopyProgram(CopyTable.of(copies, src_bytes=src_bytes, dst_bytes=dst_bytes))
    actual = [array.copy() for array in destinations]
    program._native.run(pointers(sources), pointers(actual), num_threads, False, instructions)
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))


def one_copy(**changes):
    """64 rows of 8 float32, dense."""
    row = {
        "src_buffer": 0,
        "dst_buffer": 0,
        "shape": (64, 8),
        "src_strides": (32, 4),
        "dst_strides": (32, 4),
        "src_dtype": "float32",
        "dst_dtype": "float32",
    }
    return StridedCopy(**(row | changes))


@pytest.mark.parametrize("instructions", AVAILABLE_SETS)
@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"), [("bytes1", "bytes1"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_large_programs_are_exact_at_any_alignment(instructions, from_dtype, to_dtype):
    """Long enough to be written past the caches, in rows of many lengths and alignments; also where it is not."""
    size, to_size = SIZES[from_dtype], SIZES[to_dtype]
    copies, src_at, dst_at = [], 0, 0
    for length in [*range(250, 600, 7), 4096, 100_001, 5_000_000]:
        num_rows = 33 if length < 5000 else 1
        pitch = length + length % 3
        copies.append(
            one_copy(
                shape=(num_rows, length),
                src_strides=(pitch * size, size),
                dst_strides=(pitch * to_size, to_size),
                src_dtype=from_dtype,
                dst_dtype=to_dtype,
                src_offset=src_at + length % 5,
                dst_offset=dst_at + length % 7,
            )
        )
        src_at += num_rows * pitch * size + 5
        dst_at += num_rows * pitch * to_size + 7
    source = random_bytes(src_at + 64, 0)
    if from_dtype != to_dtype:  # no infinities and no NaN: test_comm_casts has them, value by value
        source[1 :: 2 if size == 2 else 4] &= 0x3F
        source[3::4] &= 0x3F
    before = random_bytes(dst_at + 64, 1)
    expected = before.copy()
    for copy in copies:
        src_index = (offsets_of(copy.shape, copy.src_strides) + copy.src_offset)[:, None] + np.arange(size)
        dst_index = (offsets_of(copy.shape, copy.dst_strides) + copy.dst_offset)[:, None] + np.arange(to_size)
        values = source[src_index]
        if from_dtype != to_dtype:
            typed = torch.from_numpy(values).view(getattr(torch, from_dtype)).flatten()
            two = torch.stack([typed, typed], 1)[:, 0]  # strided: torch's scalar path
            values = two.to(getattr(torch, to_dtype)).view(torch.uint8).numpy().reshape(-1, to_size)
        expected[dst_index] = values
    program = CopyProgram(CopyTable.of(copies))
    assert program.num_bytes >= 4 << 20 and program.num_tasks > 4
    for stores in ("streaming", "cached"):
        actual = before.copy()
        program._native.run(pointers([source]), pointers([actual]), 2, False, instructions, stores)
        assert np.array_equal(actual, expected), stores


def test_joined_copies_and_fused_dimensions_become_one_row():
    whole = one_copy(shape=(4, 16, 8), src_strides=(512, 32, 4), dst_strides=(512, 32, 4))
    assert CopyProgram(CopyTable.of([whole]))._native.num_rows == 1
    parts = [one_copy(shape=(16, 8), src_offset=i * 512, dst_offset=i * 512) for i in (2, 0, 3, 1)]
    program = CopyProgram(CopyTable.of(parts))
    assert (program._native.num_steps, program._native.num_rows, program.num_tasks) == (1, 1, 1)


def test_long_rows_and_many_rows_are_cut_into_tasks():
    long = CopyProgram(CopyTable.of([one_copy(shape=(16 << 20,), src_strides=(4,), dst_strides=(4,))]))
    assert 60 <= long.num_tasks <= 70
    rows = one_copy(shape=(60_000, 192), src_strides=(1024, 4), dst_strides=(768, 4))
    assert 40 <= CopyProgram(CopyTable.of([rows])).num_tasks <= 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_buffer": 2}, "copy 0: src buffer 2, but there are 1"),
        ({"dst_buffer": -1}, "copy 0: dst buffer -1 must not be negative"),
        ({"src_offset": 4}, "copy 0: ends at byte 2052 of src buffer 0, which has 2048"),
        ({"dst_offset": 1}, "copy 0: ends at byte 2049 of dst buffer 0, which has 2048"),
        ({"src_offset": -4}, "copy 0: starts 4 bytes before src buffer 0"),
        ({"src_strides": (-32, 4)}, "copy 0: starts 2016 bytes before src buffer 0"),
        ({"dst_strides": (0, 4)}, "copy 0: writes the same bytes 64 times, since the dst stride of dimension 0 is 0"),
        ({"shape": (-1, 8)}, "copy 0: length -1 of dimension 0 must not be negative"),
        ({"src_strides": (1 << 59, 4)}, r"copy 0: its extent in src buffer 0 is beyond 2\^60 bytes"),
        ({"shape": (1 << 40, 1 << 40)}, "copy 0: its number of elements overflows"),
        ({"dst_dtype": "bytes4"}, "copy 0: no cast from dtype code 0 to 5"),
        ({"shape": (1,) * 17, "src_strides": (0,) * 17, "dst_strides": (0,) * 17}, "17 dimensions; allowed: 0 to 16"),
    ],
)
def test_copies_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CopyProgram(CopyTable.of([one_copy(**changes)], src_bytes=[2048], dst_bytes=[2048]))


def test_columns_that_do_not_fit_are_refused():
    table = CopyTable.of([one_copy(), one_copy(dst_offset=4096)])
    with pytest.raises(ValueError, match=r"src_offset: has the shape \(1,\); \(2,\) is needed"):
        dataclasses.replace(table, src_offset=np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match=r"lengths: has the shape \(2,\); \[copies, dimensions\]"):
        dataclasses.replace(table, lengths=np.ones(2, dtype=np.int64))
    with pytest.raises(ValueError, match="src_buffer: a value is outside the range of int32"):
        dataclasses.replace(table, src_buffer=np.array([0, 1 << 40]))
    with pytest.raises(ValueError, match="src_offset: has the dtype float64"):
        dataclasses.replace(table, src_offset=np.zeros(2))
    with pytest.raises(ValueError, match="dtype codes 9 and 0; allowed: 0 to 7"):
        CopyProgram(dataclasses.replace(table, src_dtype=np.array([0, 9])))


def test_a_table_is_not_changed_by_its_arrays():
    lengths = np.array([[64, 8]])
    table = dataclasses.replace(CopyTable.of([one_copy()]), lengths=lengths)
    lengths[0, 0] = 1000
    assert table.lengths[0, 0] == 64
    with pytest.raises(ValueError, match="read-only"):
        table.lengths[0, 0] = 1


def test_run_refuses_wrong_pointers():
    program = CopyProgram(CopyTable.of([one_copy(src_buffer=1)]))
    memory = np.zeros(2048, dtype=np.uint8)
    good = pointers([memory])
    with pytest.raises(ValueError, match="1 src pointers for a program with 2 src buffers; pass one for each"):
        program.run(good, good)
    with pytest.raises(ValueError, match="src pointer 1 is null"):
        program.run(np.zeros(2, dtype=np.int64), good)
    with pytest.raises(ValueError, match=r"int64\[number of buffers\], not float64\[2\]"):
        program.run(np.zeros(2), good)  # pyright: ignore[reportArgumentType]
    for num_threads in (0, 257):
        with pytest.raises(ValueError, match=f"num_threads={num_threads}; allowed: 1 to 256"):
            program.run(np.array([0, memory.ctypes.data]), pointers([memory.copy()]), num_threads)
    with pytest.raises(ValueError, match="instruction set 'neon'; allowed"):
        program._native.run(good, good, 1, False, "neon")


def test_buffers_that_nothing_touches_may_be_null():
    empty = CopyProgram(CopyTable.of([one_copy(shape=(0, 8))]))
    empty.run(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    none = CopyProgram(CopyTable.of([], src_bytes=[5, 5]))
    none.run(np.zeros(2, dtype=np.int64), np.empty(0, dtype=np.int64), 2)
    assert none.num_bytes == 0


def test_codes_of_torch_dtypes():
    assert [
        COPY_DTYPES[code_of_dtype(getattr(torch, name))] for name in ("bfloat16", "int32", "bool", "complex128")
    ] == [
        "bfloat16",
        "bytes4",
        "bytes1",
        "bytes16",
    ]
    assert CODE_OF["float16"] == 2
    assert addresses_of([torch.zeros(0)]).dtype == np.int64


def big_copy():
    source = random_bytes(24 << 20, 5)
    return CopyProgram(CopyTable.of([one_copy(shape=(source.size // 4,), src_strides=(4,), dst_strides=(4,))])), source


def test_threads_start_when_needed_and_stay_within_the_bound():
    code = (
        "import numpy as np; from rlinf_comm import _C; from rlinf_comm.copies import *\n"
        "t = CopyTable.of([StridedCopy(src_buffer=0, dst_buffer=0, shape=(1 << 23,), src_strides=(4,),"
        " dst_strides=(4,), src_dtype='float32', dst_dtype='float32')])\n"
        "a = np.arange(1 << 23, dtype=np.int32); b = np.zeros_like(a); p = CopyProgram(t)\n"
        "run = lambda n: p.run(np.array([a.ctypes.data]), np.array([b.ctypes.data]), n)\n"
        "seen = [_C.num_pool_threads()]\n"
        "for n in (1, 2, 2, 4, 1): run(n); seen.append(_C.num_pool_threads())\n"
        "assert seen == [0, 0, 1, 1, 3, 3], seen\n"
        "assert (a == b).all(); print('joined at exit')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and done.stdout == "joined at exit\n", done.stderr


def run_in_child(connection):
    before = _C.num_pool_threads()
    program, source = big_copy()
    target = np.zeros_like(source)
    program.run(pointers([source]), pointers([target]), 3)
    connection.send((before, _C.num_pool_threads(), np.array_equal(source, target)))


def test_a_forked_child_makes_its_own_threads():
    """Forked while another thread is in the middle of runs, so that the pool's lock may be held."""
    program, source = big_copy()
    target = np.zeros_like(source)
    program.run(pointers([source]), pointers([target]), 2)
    assert _C.num_pool_threads() >= 1
    stop = threading.Event()

    def keep_running():
        while not stop.is_set():
            program.run(pointers([source]), pointers([target]), 2)

    busy = threading.Thread(target=keep_running)
    busy.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            near, far = context.Pipe()
            child = context.Process(target=run_in_child, args=(far,))
            child.start()
            assert near.poll(60), "the child hangs"
            assert near.recv() == (0, 2, True)
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        busy.join(60)
    assert np.array_equal(source, target)


def test_several_python_threads_run_at_once():
    program, source = big_copy()
    targets = [np.zeros_like(source) for _ in range(4)]
    threads = [
        threading.Thread(target=program.run, args=(pointers([source]), pointers([target]), 3)) for target in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(source, target) for target in targets)
