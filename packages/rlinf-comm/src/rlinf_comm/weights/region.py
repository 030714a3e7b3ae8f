"""A box of a tensor as an address and strides, for the native copies and digests."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_comm._arrays import dtype_name
from rlinf_comm.errors import LayoutError, WeightMismatchError
from rlinf_comm.records import record
from rlinf_comm.weights.layout import BufferSpec
from rlinf_comm.weights.unlisted import left_out, listed

if TYPE_CHECKING:
    import torch


@record
@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a tensor, which the holder of this record must keep alive."""

    pointer: int
    """Address of the first element."""
    strides_bytes: tuple[int, ...]


@record
@dataclass(frozen=True, slots=True)
class BoxRegion:
    """Position of a box in a buffer, as in a Block: in row-major elements, whatever the strides of the tensor."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def check_tensor(name: str, tensor: torch.Tensor, spec: BufferSpec, device_type: str = "cpu") -> None:
    """Raises LayoutError with the name of a tensor that has a wrong shape or dtype, is not on that type of device, or
    is not strided memory of its own."""
    import torch

    if tuple(tensor.shape) != spec.shape:
        raise LayoutError(f"{name}: has the shape {tuple(tensor.shape)}, the layout says {spec.shape}")
    if dtype_name(tensor.dtype) != spec.dtype:
        raise LayoutError(f"{name}: has the dtype {dtype_name(tensor.dtype)}, the layout says {spec.dtype}")
    if tensor.device.type != device_type or tensor.layout is not torch.strided:
        description, kind = f"a {tensor.layout} tensor on {tensor.device}", device_type.upper()
        raise LayoutError(f"{name}: {description}; only strided {kind} tensors can be moved")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(f"{name}: a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()")
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise LayoutError(f"{name}: an expanded tensor, whose elements share memory; pass tensor.contiguous()")


def checked_tensors(
    where: str,
    who: str,
    buffers: Mapping[str, BufferSpec],
    tensors: Mapping[str, torch.Tensor],
    *,
    device_type: str = "cpu",
) -> dict[str, torch.Tensor]:
    """The tensors of a rank in the order of its layout, after a check against it.

    Raises:
        WeightMismatchError: a tensor is missing. LayoutError: a tensor is wrong, or not in this layout.
    """
    missing = tuple(sorted(buffers.keys() - tensors.keys()))
    if missing:
        raise WeightMismatchError(f"{where}: {who} lacks {listed(missing)}", tensors=missing)
    left_out(f"{where}: {who}", tensors, buffers, (), remedy="do not pass them")
    for name, spec in buffers.items():
        check_tensor(name, tensors[name], spec, device_type)
    return {name: tensors[name] for name in buffers}


def device_type_of(tensors: Mapping[str, torch.Tensor], own: str | None) -> str:
    """The device type that a rank's tensors must have: `own`, unless it is None or all tensors are on the host, as for
    a model that has not been moved to its device yet."""
    return "cpu" if own is None or all(tensor.is_cpu for tensor in tensors.values()) else own


def view_of(tensor: torch.Tensor, place: BoxRegion) -> torch.Tensor:
    """The box at `place` of a checked tensor, as a view.

    Raises:
        LayoutError: the tensor is not contiguous, and no strides describe the box in its memory; names the buffer.
    """
    offset, strides = place.offset, place.strides
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        offset, strides = _in_memory(tensor, place)
    return tensor.as_strided(place.shape, strides, tensor.storage_offset() + offset)


def region_in(tensor: torch.Tensor, place: BoxRegion) -> Region:
    """Like `view_of`, but returns address and strides."""
    if math.prod(place.shape) == 0:
        return Region(tensor.data_ptr(), (0,) * len(place.shape))
    return region_of(view_of(tensor, place))


def region_of(tensor: torch.Tensor) -> Region:
    """All of a tensor."""
    size = tensor.element_size()
    return Region(tensor.data_ptr(), tuple(stride * size for stride in tensor.stride()))


def _in_memory(tensor: torch.Tensor, place: BoxRegion) -> tuple[int, tuple[int, ...]]:
    """(offset, strides) in a tensor that is not contiguous."""
    shape, memory = tuple(tensor.shape), tensor.stride()
    index = _unravel(place.offset, shape)
    furthest = list(index)
    strides = []
    for length, stride in zip(place.shape, place.strides, strict=True):
        step = _unravel(abs(stride), shape) if length > 1 else (0,) * len(shape)
        sign = -1 if stride < 0 else 1
        furthest = [at + sign * (length - 1) * by for at, by in zip(furthest, step, strict=True)]
        strides.append(sign * sum(by * of for by, of in zip(step, memory, strict=True)))
    if not all(0 <= at < size for at, size in zip(furthest, shape, strict=True)):
        raise LayoutError(f"{place.buffer}: not contiguous, and its blocks span dimensions; pass tensor.contiguous()")
    return sum(at * of for at, of in zip(index, memory, strict=True)), tuple(strides)


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Turns a row-major offset into an index, as numpy.unravel_index does."""
    index = []
    for length in reversed(shape):
        offset, at = divmod(offset, max(length, 1))
        index.append(at)
    return tuple(reversed(index))


@functools.lru_cache(maxsize=4096)
def dense_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Row-major strides in bytes; with element_bytes=1 in elements."""
    return tuple(math.prod(shape[dim + 1 :]) * element_bytes for dim in range(len(shape)))


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if not tensor.numel():
        return 0
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()
