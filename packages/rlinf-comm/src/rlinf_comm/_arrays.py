"""Tensors and arrays as (description, bytes): the part of the codec that knows torch and numpy.

torch is not imported before a tensor is met, so that a process which only passes control messages starts quickly.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_comm import _C

if TYPE_CHECKING:
    import torch

_NUMPY_KINDS = frozenset("biufcMmSU")  # bool, integers, floats, complex, dates, fixed-width bytes and text


class Refused(Exception):
    """Why a value cannot be encoded."""


def describe_type(cls: type) -> str:
    """What to call a value of a type that cannot cross."""
    if issubclass(cls, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return "a function"
    if issubclass(cls, type):
        return "a class"
    if issubclass(cls, types.ModuleType):
        return "a module"
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def borrowed_bytes(owner: object, pointer: int, num_bytes: int) -> memoryview:
    """The `num_bytes` at `pointer`, which belong to `owner` and keep it alive."""
    return memoryview(_C.BorrowedBytes(owner, pointer, num_bytes))


_DTYPE_NAMES: dict[Any, str] = {}
_DTYPES: dict[str, Any] = {}


def _learn_dtypes() -> None:
    import torch

    for attribute in vars(torch).values():
        if isinstance(attribute, torch.dtype):
            name = str(attribute).removeprefix("torch.")
            # Quantized dtypes carry a scale outside of their bytes; bits and sub-byte dtypes have no arithmetic.
            if not name.startswith(("q", "bits")) and getattr(attribute, "itemsize", 0) >= 1:
                _DTYPE_NAMES[attribute] = name
                _DTYPES[name] = attribute


def dtype_name(dtype: torch.dtype) -> str | None:
    """ "float32" for torch.float32; None for a dtype that this package does not move."""
    if not _DTYPE_NAMES:
        _learn_dtypes()
    return _DTYPE_NAMES.get(dtype)


def dtype_named(name: str) -> torch.dtype | None:
    """torch.float32 for "float32"; None for an unknown name."""
    if not _DTYPES:
        _learn_dtypes()
    return _DTYPES.get(name)


def tensor_types() -> tuple[type, ...]:
    """torch.Tensor and torch.nn.Parameter; nothing while torch is not imported, since no value can be one then."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.Tensor, torch.nn.Parameter)


def tensor_bytes(tensor: torch.Tensor) -> tuple[str, memoryview]:
    """The dtype's name and the row-major bytes of a CPU tensor; no copy when it is contiguous.

    Raises:
        Refused: not on the CPU, of a dtype without plain bytes, or the result of a differentiated operation.
    """
    if not tensor.is_cpu:
        raise Refused(f"a tensor on {tensor.device}; move it to the CPU first, tensor.cpu()")
    if tensor.requires_grad and not tensor.is_leaf:
        raise Refused("a tensor with a gradient graph; the graph stays behind, say so with tensor.detach()")
    name = dtype_name(tensor.dtype)
    if name is None:
        raise Refused(f"a tensor of dtype {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = _materialized(tensor)
    return name, borrowed_bytes(tensor, tensor.data_ptr(), tensor.nbytes)


def _materialized(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_strided(tensor: torch.Tensor) -> None:
    """Refuses sparse tensors, which is_contiguous() and data_ptr() cannot describe."""
    import torch

    if tensor.layout is not torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout}; convert it with tensor.to_dense()")


def make_tensor_builder() -> Callable[[Any, str, list[int]], torch.Tensor]:
    """A function (buffer, dtype name, shape) -> tensor that views the buffer and keeps it alive."""
    import torch

    if not _DTYPES:
        _learn_dtypes()
    frombuffer = torch.frombuffer
    empty = torch.empty

    def build(buffer: Any, name: str, shape: list[int]) -> torch.Tensor:
        dtype = _DTYPES[name]
        if len(buffer) == 0:
            return empty(shape, dtype=dtype)
        if type(buffer) is not memoryview:
            buffer = memoryview(buffer)  # frombuffer itself does not lock, say, a bytearray against resizing
        flat = frombuffer(buffer, dtype=dtype)
        if len(shape) == 1 and len(flat) == shape[0]:  # spares the view, two thirds of the time
            return flat
        return flat.view(shape)

    return build


def ndarray_bytes(array: np.ndarray) -> tuple[str, memoryview]:
    """The dtype's string and the row-major bytes of an array; no copy when it is contiguous."""
    dtype = array.dtype
    if dtype.kind not in _NUMPY_KINDS:
        raise Refused(f"an array of dtype {dtype}")
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return dtype.str, array.reshape(-1).view(np.uint8).data


def build_ndarray(buffer: Any, dtype: str, shape: list[int]) -> np.ndarray:
    """An array that views the buffer and keeps it alive."""
    if len(buffer) == 0:
        return np.empty(shape, dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)
