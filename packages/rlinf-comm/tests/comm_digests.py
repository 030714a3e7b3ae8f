"""Digests of single boxes by the CPU's program: what those of devices, tables and manifests are held against."""

import numpy as np
import torch

from rlinf_comm.copies import COPY_DTYPES, DigestProgram, DigestTable, StridedBox, addresses_of, code_of_dtype
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, BufferSpec, TensorSpec
from rlinf_comm.weights.region import check_tensor, region_of


def digest_by_program(address, element_bytes, first_index, shape, memory_strides, index_strides):
    box = StridedBox(
        buffer=0,
        shape=shape,
        strides=memory_strides,
        dtype=f"bytes{element_bytes}",
        digest=0,
        first_index=first_index,
        index_strides=index_strides,
    )
    return DigestProgram(DigestTable.of([box])).run(np.array([address], np.int64))[0]


def tensor_digest(tensor: torch.Tensor, *, box: Box, spec: TensorSpec) -> int:
    """The 128-bit digest of a shard: `tensor` holds the box `box` of a canonical tensor.

    Position-sensitive, bit-exact (+0.0 and -0.0 differ, NaN payloads count), independent of strides and of the order of
    computation. Digests of disjoint boxes add up modulo DIGEST_MODULUS:

        digest(w[:3]) + digest(w[3:]) == digest(w)   (mod 2**128)

    Raises:
        LayoutError: the tensor is not of the box's shape or the spec's dtype, or not on the CPU.
    """
    if box.intersect(spec.whole) != box and box.num_elements:
        raise LayoutError(f"the box {box} is not inside the shape {spec.shape}")
    check_tensor("tensor", tensor, BufferSpec(box.shape, spec.dtype))
    index_strides = spec.index_strides
    whole = StridedBox(
        buffer=0,
        shape=box.shape,
        strides=region_of(tensor).strides_bytes,
        dtype=COPY_DTYPES[code_of_dtype(tensor.dtype)],
        digest=0,
        first_index=sum(first * stride for first, stride in zip(box.start, index_strides, strict=True)),
        index_strides=index_strides,
    )
    return DigestProgram(DigestTable.of([whole])).run(addresses_of([tensor]))[0]
