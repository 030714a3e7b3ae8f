"""Casts fused into a copy: every 16-bit input, a dense sample of float32, on each instruction set, against torch.

torch rounds numbers one way, but has two results for NaN as bfloat16: 0x7fc0 in its scalar and strided code (c10's
definition, and ours) and 0xffff in its vectorized code. So the reference is torch on a strided tensor.
"""

import numpy as np
import pytest
import torch
from comm_casts import cast_by_torch

from rlinf_comm import _C
from rlinf_comm.copies import CODE_OF, CopyProgram, CopyTable, StridedCopy, addresses_of

SETS = ["scalar", "avx2", "avx512"]
AVAILABLE_SETS = SETS[: SETS.index(_C.best_instruction_set()) + 1]
FLOATS = ["float32", "bfloat16", "float16"]
BITS = {2: torch.int16, 4: torch.int32}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def inputs(name: str) -> torch.Tensor:
    """All values of 16 bits; of float32 every 401st bit pattern of both signs, and all that lies near a border."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    sampled = np.arange(0, 1 << 32, 401, dtype=np.uint64)
    # Next to every value of both 16-bit formats and halfway between two of them, where rounding decides.
    bfloat16s = np.arange(1 << 16, dtype=np.uint64) << 16
    float16s = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)
    near = np.concatenate([bfloat16s, bits_of(float16s).numpy().view(np.uint32).astype(np.uint64)])
    steps = [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001, 0x17FF, 0x1800]
    borders = np.concatenate([near + step for step in steps] + [near - step for step in steps[1:]]) & 0xFFFFFFFF
    return torch.from_numpy(np.concatenate([sampled, borders]).astype(np.uint32).view(np.int32)).view(dtype)


def cast(source: torch.Tensor, to: torch.dtype, instructions: str, *, dst_step: int = 1, src_step: int = 1):
    """Every `src_step`th element to every `dst_step`th place; the bits in between are zeros."""
    count = len(range(0, len(source), src_step))
    target = torch.zeros(count * dst_step, dtype=to)
    copy = StridedCopy(
        src_buffer=0,
        dst_buffer=0,
        shape=(count,),
        src_strides=(src_step * source.element_size(),),
        dst_strides=(dst_step * to.itemsize,),
        src_dtype=str(source.dtype).removeprefix("torch."),
        dst_dtype=str(to).removeprefix("torch."),
    )
    program = CopyProgram(CopyTable.of([copy]))
    program._native.run(addresses_of([source]), addresses_of([target]), 1, False, instructions)
    return target


@pytest.mark.parametrize("instructions", AVAILABLE_SETS)
@pytest.mark.parametrize(("from_name", "to_name"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_casts_are_torchs_for_every_input(from_name, to_name, instructions):
    source = inputs(from_name)
    to = getattr(torch, to_name)
    twice = torch.stack([source, source], dim=1)
    expected = bits_of(cast_by_torch(source, to))
    actual = bits_of(cast(source, to, instructions))
    assert torch.equal(actual, expected)
    assert torch.equal(bits_of(cast(twice.flatten(), to, instructions, src_step=2)), expected)
    spread = bits_of(cast(source, to, instructions, dst_step=3))
    assert torch.equal(spread[::3], expected) and not spread[1::3].any() and not spread[2::3].any()
    # torch's fast path agrees wherever the value is a number.
    numbers = ~source.float().isnan()
    assert torch.equal(bits_of(source.to(to))[numbers], actual[numbers])


@pytest.mark.parametrize("instructions", AVAILABLE_SETS)
@pytest.mark.parametrize(("from_name", "to_name"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_short_and_unaligned_runs_touch_only_their_own(from_name, to_name, instructions):
    """Lengths around the vectors' and lines', at odd addresses too; what lies around the run stays."""
    to = getattr(torch, to_name)
    source = torch.randn(200).to(getattr(torch, from_name))
    twice = torch.stack([source, source], dim=1)
    whole = twice[:, 0].to(to).contiguous().view(torch.uint8)
    for length in [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]:
        for shift in (0, 1, 2, 3, 34, 61):
            memory = torch.full((length * to.itemsize + 128,), 0xA5, dtype=torch.uint8)
            unaligned = torch.zeros(source.nbytes + 1, dtype=torch.uint8)
            unaligned[1:] = source.view(torch.uint8)
            copy = StridedCopy(
                src_buffer=0,
                dst_buffer=0,
                shape=(length,),
                src_strides=(source.element_size(),),
                dst_strides=(to.itemsize,),
                src_dtype=from_name,
                dst_dtype=to_name,
                src_offset=1,
                dst_offset=shift,
            )
            program = CopyProgram(CopyTable.of([copy]))
            program._native.run(addresses_of([unaligned]), addresses_of([memory]), 1, False, instructions)
            end = shift + length * to.itemsize
            assert memory[shift:end].equal(whole[: length * to.itemsize])
            assert memory[:shift].eq(0xA5).all() and memory[end:].eq(0xA5).all()


def test_special_values_become_what_the_formats_say():
    bits = [0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000001, 0x00008000, 0x00018000, 0x3F808000, 0x3F818000]
    source = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)
    for instructions in AVAILABLE_SETS:
        actual = bits_of(cast(source, torch.bfloat16, instructions)).tolist()
        # NaN, NaN, infinities, -0 from a denormal, ties to even among the denormals and among the numbers
        expected = [0x7FC0, 0x7FC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0002, 0x3F80, 0x3F82]
        assert [value & 0xFFFF for value in actual] == expected


def test_only_the_float_types_are_cast():
    for src in CODE_OF:
        for dst in CODE_OF:
            copy = StridedCopy(
                src_buffer=0,
                dst_buffer=0,
                shape=(1,),
                src_strides=(0,),
                dst_strides=(0,),
                src_dtype=src,
                dst_dtype=dst,
            )
            if src == dst or {src, dst} <= set(FLOATS):
                CopyProgram(CopyTable.of([copy]))
            else:
                with pytest.raises(ValueError, match="no cast from"):
                    CopyProgram(CopyTable.of([copy]))
