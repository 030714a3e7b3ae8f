"""Digests of boxes (digest.h): what changes a digest, what does not, and an independent computation of it."""

import pytest
import torch
from comm_digests import tensor_digest
from hypothesis import given, settings, strategies as st

from rlinf_comm import LayoutError
from rlinf_comm.weights import DIGEST_MODULUS, Box, TensorSpec, specs_of

M64 = 2**64
DTYPES = ["float32", "bfloat16", "float64", "uint8", "complex128", "bool"]


def digest(tensor, box=None, spec=None):
    spec = spec or specs_of({"t": tensor})["t"]
    return tensor_digest(tensor, box=box or spec.whole, spec=spec)


def reference_digest(tensor: torch.Tensor) -> int:
    """The definition in digest.h, in Python integers, element by element."""

    def factor(word_index):
        state = (word_index + 1) * 0x9E3779B97F4A7C15 % M64
        state ^= state >> 32
        state = state * 0xBB67AE8584CAA73B % M64
        state ^= state >> 29
        product = (state >> 12) * (0x9E3779B97F4A7C15 % 2**52)
        low, middle, high = state % 2**51 * 2 + 1, product >> 52, product % 2**24
        return high << 104 | middle << 52 | low

    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    element_bytes = min(tensor.element_size(), 8)
    per_word = 8 // element_bytes
    total = 0
    for index in range(len(raw) // element_bytes):
        element = int.from_bytes(raw[index * element_bytes : (index + 1) * element_bytes], "little")
        shift = 8 * element_bytes * (index % per_word)
        total += factor(index // per_word) * ((element + 1) << shift)
    return total % DIGEST_MODULUS


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, dtype)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_is_what_its_definition_says(dtype):
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 9)):
        tensor = random_tensor(shape, dtype)
        assert digest(tensor) == reference_digest(tensor)


@settings(max_examples=100)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_shards_add_up(dtype, shape, data):
    tensor = random_tensor(tuple(shape), dtype)
    spec = TensorSpec(tuple(shape), dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    boxes = list(spec.whole.split(dim, data.draw(st.integers(1, 4))))
    if data.draw(st.booleans()):
        boxes = [part for box in boxes for part in box.split((dim + 1) % len(shape), 2)]
    parts = [
        tensor[tuple(slice(at, at + length) for at, length in zip(box.start, box.shape, strict=True))] for box in boxes
    ]
    whole = digest(tensor)
    strided = sum(digest(part, box, spec) for part, box in zip(parts, boxes, strict=True)) % DIGEST_MODULUS
    dense = sum(digest(part.clone(), box, spec) for part, box in zip(parts, boxes, strict=True)) % DIGEST_MODULUS
    assert whole == strided == dense


def test_strides_do_not_matter():
    tensor = random_tensor((6, 10), "float32")
    assert digest(tensor.T.contiguous().T) == digest(tensor)
    assert digest(tensor[:, ::2]) == digest(tensor[:, ::2].clone())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "float64"])
def test_every_flipped_bit_and_every_swap_changes_it(dtype):
    tensor = random_tensor((21,), dtype)
    before = digest(tensor)
    raw = tensor.view(torch.uint8)
    for index in range(len(raw)):
        for bit in range(8):
            raw[index] ^= 1 << bit
            assert digest(tensor) != before
            raw[index] ^= 1 << bit
    assert digest(tensor) == before
    for first in range(21):
        for second in range(first):
            swapped = tensor.clone()
            swapped[first], swapped[second] = tensor[second], tensor[first]
            same = swapped.view(torch.uint8).equal(raw)
            assert (digest(swapped) == before) == same


def test_bits_count_not_numbers():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert digest(nans[0]) != digest(nans[1])
    assert digest(nans[0]) == digest(nans[0].clone())


def test_zeros_count():
    spec = TensorSpec((8,), "float32")
    zeros = torch.zeros(8)
    halves = [digest(zeros[:4], Box((start,), (4,)), spec) for start in (0, 4)]
    assert len({0, digest(zeros), *halves}) == 4


def test_random_changes_never_collide():
    tensor = torch.zeros(64, dtype=torch.int32)
    seen = {digest(tensor)}
    generator = torch.Generator().manual_seed(3)
    for _ in range(2000):
        tensor[torch.randint(64, (4,), generator=generator)] += torch.randint(1, 3, (4,), generator=generator).int()
        seen.add(digest(tensor))
    assert len(seen) == 2001


def test_empty_parts_are_zero():
    assert digest(torch.empty(0, 3)) == 0
    assert tensor_digest(torch.empty(2, 0), box=Box((1, 3), (2, 0)), spec=TensorSpec((4, 3), "float32")) == 0


@pytest.mark.parametrize(
    ("tensor", "box", "message"),
    [
        (torch.zeros(3), Box((0,), (2,)), r"has the shape \(3,\), the layout says \(2,\)"),
        (torch.zeros(2).double(), Box((0,), (2,)), "has the dtype float64, the layout says float32"),
        (torch.zeros(2), Box((3,), (2,)), r"\[3:5\] is not inside the shape \(4,\)"),
        (torch.zeros(2, device="meta"), Box((0,), (2,)), "on meta; only strided CPU tensors"),
        (torch.zeros(1).expand(2), Box((0,), (2,)), "expanded"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensor, box, message):
    with pytest.raises(LayoutError, match=message):
        tensor_digest(tensor, box=box, spec=TensorSpec((4,), "float32"))
