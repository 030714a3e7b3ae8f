"""Deltas against numpy: what arrives is bit for bit what was sent, and anything else is refused without a write."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_comm import _C, DecodeError
from rlinf_comm.weights.stream.delta import DeltaEncoder, apply_delta

CHUNK = 4096
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NUM_ELEMENTS = (100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 63, 5 * CHUNK + 64)


def versions(num_elements: int, element_bytes: int, density: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two versions that differ in exactly round(density * num_elements) elements, by one bit each."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, num_elements * element_bytes, np.uint8).view(DTYPES[element_bytes])
    new = old.copy()
    where = rng.choice(num_elements, round(density * num_elements), replace=False)
    bits = rng.integers(0, 8 * element_bytes, len(where)).astype(new.dtype)
    new[where] ^= np.array(1, new.dtype) << bits
    return old, new


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8).copy())


def encoded(old: np.ndarray, new: np.ndarray) -> tuple[DeltaEncoder, np.ndarray | None]:
    encoder = DeltaEncoder(old.nbytes, old.itemsize)
    assert encoder.encode(tensor(old)) is None
    return encoder, encoder.encode(tensor(new))


def reference_bytes(old: np.ndarray, new: np.ndarray) -> int:
    """The size of the delta in bytes, computed from its format alone."""
    total = 24
    for first in range(0, len(old), CHUNK):
        a, b = old[first : first + CHUNK], new[first : first + CHUNK]
        count = int((a != b).sum())
        bitmap = -(-len(a) // 64) * 8 + count * a.itemsize
        total += 2 + (min(count * (2 + a.itemsize), bitmap, a.nbytes) if count else 0)
    return total


@pytest.mark.parametrize("element_bytes", DTYPES)
@pytest.mark.parametrize("density", [0, 0.001, 0.01, 0.1, 0.5, 1])
def test_a_delta_takes_the_old_version_to_the_new_one_in_the_fewest_bytes(element_bytes: int, density: float):
    for num_elements in NUM_ELEMENTS:
        old, new = versions(num_elements, element_bytes, density)
        encoder, delta = encoded(old, new)
        assert encoder.num_changed == (old != new).sum()
        expected = reference_bytes(old, new)
        if expected >= old.nbytes:
            assert delta is None
        else:
            assert delta is not None and len(delta) == expected
            held = tensor(old)
            apply_delta(held, delta)
            assert held.numpy().tobytes() == new.tobytes()
        again = encoder.encode(tensor(new))  # the snapshot is the new version, whatever came of the delta
        assert encoder.num_changed == 0
        assert again is None or len(again) == reference_bytes(new, new)


@pytest.mark.parametrize("element_bytes", DTYPES)
def test_both_instruction_sets_write_the_same_delta(element_bytes: int):
    for density in (0.001, 0.03, 0.3):
        old, new = versions(3 * CHUNK + 77, element_bytes, density)
        outs = []
        for is_scalar in (False, True):
            snapshot, out = old.copy(), np.zeros(old.nbytes, np.uint8)
            counts = _C.encode_delta(
                new.ctypes.data, snapshot.ctypes.data, old.nbytes, element_bytes, out.ctypes.data, is_scalar
            )
            assert snapshot.tobytes() == new.tobytes()
            outs.append((counts, out[: counts[0]].tobytes()))
        assert outs[0] == outs[1]


def test_negative_zero_and_nan_payloads_are_changes():
    old = torch.zeros(CHUNK)
    new = old.clone()
    new[5] = -0.0
    new.view(torch.int32)[7] = 0x7FC00001
    encoder = DeltaEncoder(old.nbytes, 4)
    encoder.encode(old)
    encoder.keep(old)
    delta = encoder.encode(new)
    assert encoder.num_changed == 2 and delta is not None
    apply_delta(old, bytes(delta))
    assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_memory_that_is_not_aligned():
    old, new = versions(CHUNK + 5, 8, 0.01)
    shifted = torch.zeros(old.nbytes + 1, dtype=torch.uint8)[1:]
    shifted.copy_(tensor(new))
    encoder = DeltaEncoder(old.nbytes, 8)
    encoder.encode(tensor(old))
    delta = encoder.encode(shifted)
    assert delta is not None
    moved = np.zeros(len(delta) + 1, np.uint8)[1:]
    moved[:] = delta
    shifted.copy_(tensor(old))
    apply_delta(shifted, moved)
    assert shifted.numpy().tobytes() == new.tobytes()


@settings(max_examples=150)
@given(
    element_bytes=st.sampled_from(sorted(DTYPES)),
    num_elements=st.integers(0, 2 * CHUNK + 3),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=600),
)
def test_any_changes_arrive(element_bytes: int, num_elements: int, changes: list[tuple[int, int]]):
    old = np.random.default_rng(num_elements).integers(0, 256, num_elements * element_bytes, np.uint8)
    new = old.copy()
    for position, flipped in changes:
        if len(new):
            new[position % len(new)] ^= flipped
    old, new = old.view(DTYPES[element_bytes]), new.view(DTYPES[element_bytes])
    _, delta = encoded(old, new)
    held = tensor(old if delta is not None else new)
    if delta is not None:
        apply_delta(held, delta)
    assert held.numpy().tobytes() == new.tobytes()


def guarded(content: np.ndarray, margin: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    """(all of it, the part in its middle that holds `content`)"""
    whole = torch.full((content.nbytes + 2 * margin,), 0xA5, dtype=torch.uint8)
    middle = whole[margin : margin + content.nbytes]
    middle.copy_(tensor(content))
    return whole, middle


@pytest.mark.parametrize("element_bytes", DTYPES)
def test_torn_and_hostile_deltas_write_nothing_outside_and_nothing_at_all_when_refused(element_bytes: int):
    draw = random.Random(element_bytes)
    old, new = versions(3 * CHUNK + 100, element_bytes, 0.02)
    new[:CHUNK] = old[:CHUNK]
    new[CHUNK : CHUNK + 1000] ^= np.array(1, new.dtype)
    new[2 * CHUNK : 3 * CHUNK] ^= np.array(1, new.dtype)
    _, delta = encoded(old, new)
    assert delta is not None
    num_refused = 0
    for _ in range(1500):
        hostile = bytearray(delta.tobytes())
        what = draw.randrange(4)
        if what == 0:
            del hostile[draw.randrange(len(hostile)) :]
        elif what == 1:
            hostile += bytes(draw.randrange(1, 9))
        else:
            for _ in range(draw.randrange(1, 4)):
                end = 32 if what == 2 else len(hostile)
                hostile[draw.randrange(end)] = draw.choice([0, 1, 0x0F, 0x3F, 0x40, 0x7F, 0x80, 0xC0, 0xFF])
        whole, middle = guarded(old)
        try:
            apply_delta(middle, hostile)
        except DecodeError:
            num_refused += 1
            assert middle.numpy().tobytes() == old.tobytes()
        assert (whole[:8192] == 0xA5).all() and (whole[-8192:] == 0xA5).all()
    assert num_refused > 700


def header(num_bytes: int, element_bytes: int, changed: int, *chunks: int, content: bytes = b"") -> bytes:
    return struct.pack(f"<4sIQQ{len(chunks)}H", b"RLD1", element_bytes, num_bytes, changed, *chunks) + content


LIST, BITMAP, DENSE = 1 << 14, 2 << 14, 3 << 14


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (b"", "shorter than its header"),
        (b"XXXX" + header(100, 1, 0, 0)[4:], "does not begin"),
        (header(100, 3, 0, 0), "element size"),
        (header(99, 1, 0, 0), "another size"),
        (header(100, 1, 0), "list of chunks"),
        (header(100, 1, 101, DENSE | 101, content=bytes(101)), "more elements"),
        (header(100, 1, 0, LIST), "or none"),
        (header(100, 1, 1, 1), "or none"),
        (header(100, 1, 1, LIST | 1, content=bytes(2)), "ends before its last chunk"),
        (header(100, 1, 1, LIST | 1, content=struct.pack("<HB", 100, 7)), "positions"),
        (header(100, 1, 2, LIST | 2, content=struct.pack("<HHBB", 5, 5, 7, 8)), "positions"),
        (header(100, 1, 1, BITMAP | 1, content=struct.pack("<QQB", 0, 1 << 36, 7)), "positions"),
        (header(100, 1, 1, BITMAP | 1, content=struct.pack("<QQB", 3, 0, 7)), "positions"),
        (header(100, 1, 1, LIST | 1, content=struct.pack("<HBB", 5, 7, 9)), "behind its last chunk"),
        (header(100, 1, 2, LIST | 1, content=struct.pack("<HB", 5, 7)), "as many changed"),
    ],
)
def test_each_kind_of_fault_is_named(delta: bytes, reason: str):
    held = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(DecodeError, match=reason):
        apply_delta(held, delta)
    assert not held.any()


def test_mistakes_in_a_call():
    with pytest.raises(ValueError, match="element_bytes=3"):
        DeltaEncoder(12, 3)
    with pytest.raises(ValueError, match="whole elements"):
        DeltaEncoder(13, 4)
    encoder = DeltaEncoder(16, 4)
    with pytest.raises(ValueError, match="20 bytes"):
        encoder.encode(torch.zeros(5))
    with pytest.raises(ValueError, match="contiguous"):
        encoder.encode(torch.zeros(2, 4)[:, :2])
    with pytest.raises(ValueError, match="contiguous"):
        apply_delta(torch.zeros(2, 4)[:, :2], b"")


def test_after_a_reset_the_buffer_is_sent_whole():
    old, _ = versions(CHUNK, 2, 0)
    encoder, delta = encoded(old, old)
    assert delta is not None
    encoder.reset()
    assert encoder._snapshot is None
    assert encoder.encode(tensor(old)) is None and encoder.num_changed is None
    assert encoder.encode(tensor(old)) is not None
