"""Digests of tensors that add up over shards. The native part and the mathematics: csrc/include/rlinf/comm/digest.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_comm import _C
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, BufferSpec, TensorSpec
from rlinf_comm.weights.region import Region, check_tensor, region_of

if TYPE_CHECKING:
    import torch

DIGEST_MODULUS = 1 << 128


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
    return region_digest(region_of(tensor), box, spec)


def region_digest(region: Region, box: Box, spec: TensorSpec) -> int:
    """The digest of the elements at `region`, which are the box `box` of the canonical tensor."""
    index_strides = spec.index_strides
    first_index = sum(first * stride for first, stride in zip(box.start, index_strides, strict=True))
    low, high = _C.digest_box(
        region.pointer, spec.element_bytes, first_index, box.shape, region.strides_bytes, index_strides
    )
    return low | high << 64
