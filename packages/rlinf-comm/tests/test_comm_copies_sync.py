"""How a weight hand-over uses copies and digests: n pieces, one native call for the copies and one for the digests."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlinf_comm.copies import (
    COPY_DTYPES,
    CopyProgram,
    CopyTable,
    DigestProgram,
    DigestTable,
    StridedBox,
    StridedCopy,
    addresses_of,
    code_of_dtype,
)
from rlinf_comm.weights import DIGEST_MODULUS, Box, TensorSpec, tensor_digest
from rlinf_comm.weights.region import dense_strides, region_of


@dataclass(frozen=True)
class Piece:
    """A box of canonical tensor `name`, cut out of the parameter that stores all of it, at `offset` in a dense slot."""

    name: str
    box: Box
    offset: int


def make_model(dtype):
    torch.manual_seed(0)
    model = {f"w{i}": torch.randn(40 + i, 24).to(dtype) for i in range(30)} | {"scale": torch.randn(()).to(dtype)}
    model["w3"] = model["w3"].T.contiguous().T  # stored column by column
    return model


def specs(model, dtype):
    return {name: TensorSpec(tuple(tensor.shape), str(dtype).removeprefix("torch.")) for name, tensor in model.items()}


def make_pieces(of_specs):
    """Three uneven cuts of each tensor, one after another in the slot, on cache lines."""
    pieces, offset = [], 0
    for name, spec in of_specs.items():
        for box in spec.whole.split(0, 3) if spec.shape else [spec.whole]:
            pieces.append(Piece(name, box, offset))
            offset += -(-math.prod(box.shape) * spec.element_bytes // 64) * 64
    return pieces, offset


def copies_of(pieces, model, slot_dtype, *, to_slot):
    """One StridedCopy for each piece: from the parameters into the slot, or back."""
    numbers = {name: number for number, name in enumerate(model)}
    code = COPY_DTYPES[code_of_dtype(slot_dtype)]
    copies = []
    for piece in pieces:
        tensor = model[piece.name]
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        region = region_of(piece.name, tensor, spec.whole, spec).inside(spec.whole, piece.box)
        parameter = (numbers[piece.name], region.pointer - tensor.data_ptr(), region.strides_bytes)
        slot = (0, piece.offset, dense_strides(piece.box.shape, slot_dtype.itemsize))
        src, dst = (parameter, slot) if to_slot else (slot, parameter)
        own = COPY_DTYPES[code_of_dtype(tensor.dtype)]
        copies.append(
            StridedCopy(
                src_buffer=src[0],
                src_offset=src[1],
                src_strides=src[2],
                dst_buffer=dst[0],
                dst_offset=dst[1],
                dst_strides=dst[2],
                shape=piece.box.shape,
                src_dtype=own if to_slot else code,
                dst_dtype=code if to_slot else own,
            )
        )
    return copies


def boxes_of(pieces, copies, side):
    """The digest of each canonical tensor, from the source ("src") or destination side of the copies."""
    names = {name: number for number, name in enumerate(dict.fromkeys(piece.name for piece in pieces))}
    shapes = {}
    for piece in pieces:
        stop = tuple(a + b for a, b in zip(piece.box.start, piece.box.shape, strict=True))
        shapes[piece.name] = tuple(map(max, stop, shapes.get(piece.name, stop)))
    boxes = []
    for piece, copy in zip(pieces, copies, strict=True):
        index_strides = dense_strides(shapes[piece.name], 1)
        boxes.append(
            StridedBox(
                buffer=getattr(copy, f"{side}_buffer"),
                offset=getattr(copy, f"{side}_offset"),
                strides=getattr(copy, f"{side}_strides"),
                dtype=getattr(copy, f"{side}_dtype"),
                as_dtype=copy.dst_dtype,
                shape=piece.box.shape,
                digest=names[piece.name],
                first_index=sum(a * b for a, b in zip(piece.box.start, index_strides, strict=True)),
                index_strides=index_strides,
            )
        )
    return boxes


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
def test_a_sync_is_one_call_for_the_copies_and_one_for_the_digests(trained):
    """A trainer (float32 or bfloat16) publishes into a slot as bfloat16; an engine copies it out and attests it."""
    model, served = make_model(trained), {name: torch.zeros_like(t) for name, t in make_model(torch.bfloat16).items()}
    pieces, num_bytes = make_pieces(specs(model, torch.bfloat16))
    slot = torch.zeros(num_bytes, dtype=torch.uint8)
    parameters, slots, targets = addresses_of(model.values()), addresses_of([slot]), addresses_of(served.values())

    outgoing = copies_of(pieces, model, torch.bfloat16, to_slot=True)
    publish = CopyProgram(
        CopyTable.of(outgoing, dst_bytes=[num_bytes]), DigestTable.of(boxes_of(pieces, outgoing, "src"))
    )
    incoming = copies_of(pieces, served, torch.bfloat16, to_slot=False)
    fetch = CopyProgram(CopyTable.of(incoming, src_bytes=[num_bytes]))
    attest = DigestProgram(DigestTable.of(boxes_of(pieces, incoming, "dst")))

    for version in range(3):  # the programs are made once; only values change
        for tensor in model.values():
            tensor.mul_(1.5 + version)
        published = publish.run_with_digests(parameters, slots)
        fetch.run(slots, targets)
        assert attest.run(targets) == published
        for (name, tensor), digest in zip(served.items(), published, strict=True):
            expected = model[name].bfloat16()
            assert tensor.equal(expected)
            spec = TensorSpec(tuple(tensor.shape), "bfloat16")
            assert digest == tensor_digest(expected, box=spec.whole, spec=spec)

    served["w7"].view(torch.int16)[2, 3] ^= 1
    wrong = [name for name, a, b in zip(served, attest.run(targets), published, strict=True) if a != b]
    assert wrong == ["w7"]


def test_pieces_of_several_senders_add_up():
    """Each sender's digests count its own pieces; their sum is that of the whole tensors."""
    model = make_model(torch.float32)
    pieces, num_bytes = make_pieces(specs(model, torch.float32))
    slot = torch.zeros(num_bytes, dtype=torch.uint8)
    copies = copies_of(pieces, model, torch.float32, to_slot=True)
    boxes = boxes_of(pieces, copies, "src")
    total = [0] * len(model)
    for rank in range(2):
        table = DigestTable.of(boxes[rank::2], num_digests=len(model))
        program = CopyProgram(CopyTable.of(copies[rank::2], src_bytes=[t.nbytes for t in model.values()]), table)
        found = program.run_with_digests(addresses_of(model.values()), addresses_of([slot]))
        total = [(a + b) % DIGEST_MODULUS for a, b in zip(total, found, strict=True)]
    whole = DigestProgram(DigestTable.of(boxes)).run(addresses_of(model.values()))
    assert total == whole
    assert isinstance(whole[0], int) and np.count_nonzero(slot) > num_bytes // 2
