"""Digests of many boxes in one call: equal to the definition, box by box, whatever the strides, casts and threads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from comm_casts import cast_by_torch
from comm_digests import tensor_digest
from hypothesis import given, settings, strategies as st

from rlinf_comm import _C
from rlinf_comm.copies import (
    CopyProgram,
    CopyTable,
    DigestProgram,
    DigestTable,
    StridedBox,
    StridedCopy,
    addresses_of,
)
from rlinf_comm.weights import DIGEST_MODULUS, Box, TensorSpec

SETS = ["scalar", "avx2", "avx512"]
AVAILABLE_SETS = SETS[: SETS.index(_C.best_instruction_set()) + 1]
M64 = 2**64


def factor(word_index):
    state = (word_index + 1) * 0x9E3779B97F4A7C15 % M64
    state ^= state >> 32
    state = state * 0xBB67AE8584CAA73B % M64
    state ^= state >> 29
    product = (state >> 12) * (0x9E3779B97F4A7C15 % 2**52)
    low, middle, high = state % 2**51 * 2 + 1, product >> 52, product % 2**24
    return high << 104 | middle << 52 | low


def reference(elements: list[int], indices: list[int], element_bytes: int) -> int:
    """The definition in digest.h. `elements`: as unsigned integers; of 16 bytes they are two of 8."""
    if element_bytes == 16:
        halves = [half for element in elements for half in (element % M64, element // M64)]
        return reference(halves, [2 * index + half for index in indices for half in (0, 1)], 8)
    per_word = 8 // element_bytes
    total = sum(
        factor(index // per_word) * ((element + 1) << (8 * element_bytes * (index % per_word)))
        for element, index in zip(elements, indices, strict=True)
    )
    return total % DIGEST_MODULUS


def as_integers(tensor: torch.Tensor) -> list[int]:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    raw = dense.view(torch.uint8).numpy().tobytes()
    size = tensor.element_size()
    return [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]


def row_major(shape):
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def run(program, tensors, instructions, num_threads=1):
    pairs = program._native.run(addresses_of(tensors), np.empty(0, np.int64), num_threads, True, instructions)
    return [low | high << 64 for low, high in pairs.tolist()]


@settings(max_examples=150)
@given(st.data(), st.sampled_from(AVAILABLE_SETS))
def test_boxes_of_several_tensors_add_up_to_their_digests(data, instructions):
    """Each tensor is cut in two along a dimension, stored transposed or sliced, and sometimes cast."""
    boxes, tensors, expected = [], [], []
    for number in range(data.draw(st.integers(1, 3))):
        names = ["float32", "bfloat16", "float16", "uint8", "int64", "complex128"]
        dtype = getattr(torch, data.draw(st.sampled_from(names)))
        code = str(dtype).removeprefix("torch.") if dtype.is_floating_point else f"bytes{dtype.itemsize}"
        to = data.draw(st.sampled_from(names[:3])) if dtype.is_floating_point else code
        shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 9, 40]), min_size=1, max_size=3))
        whole = random_tensor(shape, dtype, number)
        values = whole
        if to != code:  # torch's strided code, whose NaN is ours
            values = cast_by_torch(whole, getattr(torch, to))
        count = math.prod(shape)
        expected.append(reference(as_integers(values), list(range(count)), values.element_size()))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, shape[dim]))
        for start, length in ((0, cut), (cut, shape[dim] - cut)):
            part = whole.narrow(dim, start, length)
            if data.draw(st.booleans()):
                part = part.transpose(0, -1).contiguous().transpose(0, -1)
            boxes.append(
                StridedBox(
                    buffer=len(tensors),
                    shape=part.shape,
                    strides=[stride * dtype.itemsize for stride in part.stride()],
                    dtype=code,
                    as_dtype=to,
                    digest=number,
                    first_index=start * row_major(shape)[dim],
                    index_strides=row_major(shape),
                )
            )
            tensors.append(part)
    program = DigestProgram(DigestTable.of(boxes))
    assert run(program, tensors, instructions, data.draw(st.integers(1, 2))) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_long_runs_are_the_same_on_every_path(dtype):
    """Longer than a task and than the lanes go without a flush; starts that are no whole word; extreme words."""
    size = dtype.itemsize
    memory = torch.full((5 << 20,), 0xFF, dtype=torch.uint8)
    memory[1 << 20 : 4 << 20] = random_tensor((3 << 20,), torch.uint8, 3)
    for first_index, num_bytes in ((0, 4096), (3, 4096 + 8 * size), (12345, 5 << 20), (8, 65536 * 8 + 40)):
        length = num_bytes // size
        box = StridedBox(
            buffer=0,
            shape=(length,),
            strides=(size,),
            dtype=f"bytes{size}",
            digest=0,
            first_index=first_index,
            index_strides=(1,),
        )
        program = DigestProgram(DigestTable.of([box], buffer_bytes=[5 << 20]))
        digests = {run(program, [memory], name, threads)[0] for name in AVAILABLE_SETS for threads in (1, 2)}
        assert len(digests) == 1
        if length < 5000:
            view = memory[: length * size].view(dtype)
            assert digests == {reference(as_integers(view), list(range(first_index, first_index + length)), size)}


@settings(max_examples=100)
@given(st.data())
def test_the_digest_of_a_copy_is_that_of_what_arrives(data):
    """In the same pass: any strides on both sides and in the tensor, with and without a cast."""
    copies, boxes, served = [], [], []
    source = random_tensor((1 << 16,), torch.uint8, 1)
    dst_at = 0
    for number in range(data.draw(st.integers(1, 3))):
        src = data.draw(st.sampled_from(["float32", "bfloat16", "bytes1", "bytes4", "bytes16"]))
        dst = data.draw(st.sampled_from(["float32", "bfloat16", "float16"])) if not src.startswith("b") else src
        dst = data.draw(st.sampled_from(["float32", "bfloat16"])) if src == "bfloat16" else dst
        size, to_size = ({"float32": 4, "bfloat16": 2, "float16": 2}.get(name) or int(name[5:]) for name in (src, dst))
        shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 10, 33]), min_size=1, max_size=2))
        order = data.draw(st.permutations(range(len(shape))))
        dense = row_major([shape[dim] for dim in order])
        transposed = [dense[order.index(dim)] for dim in range(len(shape))]
        whole = [length + data.draw(st.integers(0, 2)) for length in shape]  # the tensor that this is the first box of
        pad = data.draw(st.sampled_from([1, 1, 2]))
        copies.append(
            StridedCopy(
                src_buffer=0,
                dst_buffer=0,
                shape=shape,
                src_strides=[stride * size * pad for stride in transposed],
                dst_strides=[stride * to_size for stride in row_major(shape)],
                src_dtype=src,
                dst_dtype=dst,
                dst_offset=dst_at,
            )
        )
        counts = data.draw(st.booleans())
        common = {"shape": shape, "first_index": number, "index_strides": row_major(whole)}
        boxes.append(StridedBox(buffer=0, strides=shape, dtype=dst, digest=number if counts else -1, **common))
        dense_strides = [stride * to_size for stride in row_major(shape)]
        where = {"strides": dense_strides, "offset": dst_at}
        served.append(StridedBox(buffer=0, dtype=dst, digest=number if counts else -1, **common, **where))
        dst_at += math.prod(shape) * to_size
    program = CopyProgram(CopyTable.of(copies), DigestTable.of(boxes, num_digests=3))
    target = torch.zeros(dst_at, dtype=torch.uint8)
    plain = torch.zeros(dst_at, dtype=torch.uint8)
    digests = program.run_with_digests(addresses_of([source]), addresses_of([target]), 2)
    program.run(addresses_of([source]), addresses_of([plain]))
    assert target.equal(plain)
    assert digests == DigestProgram(DigestTable.of(served, num_digests=3)).run(addresses_of([target]))
    assert all(
        (digest == 0) == (number >= len(boxes) or boxes[number].digest < 0) for number, digest in enumerate(digests)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 1, 4, 40])
def test_large_copies_with_digests_are_exact(place, dtype):
    """Past the caches, in rows, at destinations that begin a line, a word, or neither."""
    source = torch.randn(1500, 2048).to(dtype)
    memory = torch.zeros(1500 * 1024 + 96, dtype=torch.bfloat16)
    to_line = -memory.data_ptr() % 64 // 2
    target = memory[to_line + place :][: 1500 * 1024].view(1500, 1024)
    copy = StridedCopy(
        src_buffer=0,
        dst_buffer=0,
        shape=(1500, 1024),
        src_strides=(2048 * dtype.itemsize, dtype.itemsize),
        dst_strides=(2048, 2),
        src_dtype=str(dtype).removeprefix("torch."),
        dst_dtype="bfloat16",
    )
    box = StridedBox(
        buffer=0,
        shape=(1500, 1024),
        strides=(0, 0),
        dtype="float32",
        digest=0,
        first_index=0,
        index_strides=(1024, 1),
    )
    program = CopyProgram(
        CopyTable.of([copy, replace(copy, dst_buffer=1)]), DigestTable.of([box, replace(box, digest=-1)])
    )
    other = torch.zeros(1500, 1024, dtype=torch.bfloat16)
    (digest,) = program.run_with_digests(addresses_of([source]), addresses_of([target, other]))
    assert target.equal(source[:, :1024].bfloat16()) and other.equal(target)
    assert digest == tensor_digest(target, box=Box((0, 0), (1500, 1024)), spec=TensorSpec((1500, 1024), "bfloat16"))


def test_tables_that_make_no_sense_are_refused():
    box = StridedBox(buffer=0, shape=(4,), strides=(4,), dtype="float32", digest=0, first_index=0, index_strides=(1,))
    for changes, message in (
        ({"offset": 4}, "copy 0: ends at byte 20 of src buffer 0, which has 16"),
        ({"digest": 2}, "copy 0: digest 2; there are 1"),
        ({"first_index": -1}, "copy 0: its flat indices must lie between"),
        ({"index_strides": (-1,)}, "copy 0: its flat indices must lie between"),
        ({"as_dtype": "bytes2"}, "copy 0: no cast"),
    ):
        with pytest.raises(ValueError, match=message):
            DigestProgram(DigestTable.of([replace(box, **changes)], num_digests=1, buffer_bytes=[16]))
    copy = StridedCopy(
        src_buffer=0,
        dst_buffer=0,
        shape=(5,),
        src_strides=(4,),
        dst_strides=(4,),
        src_dtype="float32",
        dst_dtype="float32",
    )
    with pytest.raises(ValueError, match="row i of both must be the same box"):
        CopyProgram(CopyTable.of([copy]), DigestTable.of([box]))
    with pytest.raises(ValueError, match="0 src pointers for a program with 1"):
        DigestProgram(DigestTable.of([box])).run(np.empty(0, np.int64))


def test_no_boxes_give_zeros():
    assert DigestProgram(DigestTable.of([], num_digests=2)).run(np.empty(0, np.int64)) == [0, 0]
