"""A box of a tensor as an address and strides: what the native copies and digests work on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm._arrays import dtype_name
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import Box, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of some tensor, which the holder of this record must keep alive."""

    pointer: int
    """Address of the first element."""
    strides_bytes: tuple[int, ...]

    def inside(self, outer: Box, inner: Box) -> Region:
        """The part for `inner`, where this is the region for `outer`."""
        offset = sum(
            (first - outer_first) * stride
            for first, outer_first, stride in zip(inner.start, outer.start, self.strides_bytes, strict=True)
        )
        return Region(self.pointer + offset, self.strides_bytes)


def region_of(name: str, tensor: torch.Tensor, box: Box, spec: TensorSpec) -> Region:
    """The memory of a tensor that stores `box` of a canonical tensor.

    Raises:
        LayoutError: wrong shape or dtype, not on the CPU, not strided memory of its own; names the tensor.
    """
    import torch

    if tuple(tensor.shape) != box.shape:
        raise LayoutError(f"{name}: has the shape {tuple(tensor.shape)}, the layout says {box.shape}, the box {box}")
    if dtype_name(tensor.dtype) != spec.dtype:
        raise LayoutError(f"{name}: has the dtype {dtype_name(tensor.dtype)}, the layout says {spec.dtype}")
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise LayoutError(f"{name}: a {tensor.layout} tensor on {tensor.device}; only strided CPU tensors can be moved")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(f"{name}: a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()")
    strides = tensor.stride()
    if any(stride == 0 and length > 1 for stride, length in zip(strides, tensor.shape, strict=True)):
        raise LayoutError(f"{name}: an expanded tensor, whose elements share memory; pass tensor.contiguous()")
    return Region(tensor.data_ptr(), tuple(stride * spec.element_bytes for stride in strides))


def dense_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    return tuple(math.prod(shape[dim + 1 :]) * element_bytes for dim in range(len(shape)))
