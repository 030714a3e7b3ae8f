"""Tensors and arrays as (description, bytes): the part of the codec that knows torch and numpy.

torch is not imported before a tensor is met, so that a process which only passes control messages starts quickly.
"""

from __future__ import annotations

import math
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_NUMPY_KINDS = frozenset("biufcMmSU")  # bool, integers, floats, complex, dates, fixed-width bytes and text
_NUMPY_DTYPE = re.compile(r"[<>=|]?[biufcMmSU][0-9]{0,8}(\[[0-9]{0,8}[A-Za-z]{1,7}\])?")


class NotEncodable(Exception):
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


def is_foreign_array(cls: type) -> bool:
    """Whether values of the class are arrays that neither torch nor numpy made (CuPy's, JAX's, ...)."""
    if issubclass(cls, (np.ndarray, np.generic, *tensor_types())):
        return False
    return hasattr(cls, "__cuda_array_interface__") or (
        hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__")
    )


def tensor_of(array: Any) -> torch.Tensor:
    """A torch tensor of the same memory: itself, or of an array with DLPack or __cuda_array_interface__.

    DLPack is taken where both are there: it alone knows bfloat16, and orders the two libraries' streams.

    Raises:
        Refused: torch cannot take it; says why.
    """
    import torch

    if isinstance(array, torch.Tensor):
        return array
    try:
        return torch.from_dlpack(array) if hasattr(array, "__dlpack__") else torch.as_tensor(array, device="cuda")
    except (RuntimeError, TypeError, ValueError, BufferError, AssertionError) as error:
        raise NotEncodable(f"{describe_type(type(array))} that torch cannot take: {error}") from error


def describe_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, str]:
    """(owner, pointer, num_bytes, dtype's name) of the row-major bytes; no copy when it is a contiguous CPU tensor.

    Raises:
        Refused: without values (meta), sparse, of a dtype without plain bytes, or with a gradient graph.
    """
    import torch

    if tensor.layout is not torch.strided:
        raise NotEncodable(f"a tensor of layout {tensor.layout}; convert it with tensor.to_dense()")
    if tensor.is_meta:
        raise NotEncodable("a tensor on meta; it has a shape but no values")
    if tensor.requires_grad and not tensor.is_leaf:
        raise NotEncodable("a tensor with a gradient graph; the graph stays behind, say so with tensor.detach()")
    name = dtype_name(tensor.dtype)
    if name is None:
        raise NotEncodable(f"a tensor of dtype {tensor.dtype}")
    if not tensor.is_cpu:
        tensor = tensor.detach().cpu()  # waits for the device
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor, tensor.data_ptr(), tensor.nbytes, name


def describe_view(tensor: torch.Tensor) -> tuple[int, str, int, list[int], list[int]] | None:
    """(pointer, dtype's name, bytes of an element, shape, strides) of a CPU tensor; None where it is more than that."""
    import torch

    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.requires_grad:
        return None
    name = dtype_name(tensor.dtype)
    if name is None or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.data_ptr(), name, tensor.element_size(), list(tensor.shape), list(tensor.stride())


def build_view(buffer: Any, name: str, shape: list[int], strides: list[int]) -> torch.Tensor:
    """A strided tensor that views the buffer and keeps it alive."""
    import torch

    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"a tensor of dtype {name!r}, which this version of torch does not have")
    num_elements = len(memoryview(buffer)) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=num_elements).as_strided(shape, strides)


def build_tensor(buffer: Any, name: str, shape: list[int]) -> torch.Tensor:
    """A tensor that views the buffer and keeps it alive."""
    import torch

    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"a tensor of dtype {name!r}, which this version of torch does not have")
    if len(memoryview(buffer)) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(memoryview(buffer))} bytes for a {name} tensor of shape {shape}")
    if len(memoryview(buffer)) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def torch_bridge() -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """What the native codec needs of torch: its DLPack exchange API, None before torch 2.10, and a tensor per dtype."""
    import torch

    if not _DTYPES:
        _learn_dtypes()
    raw = torch.zeros(16, dtype=torch.uint8)
    probes = [(name, raw[: dtype.itemsize].view(dtype)) for name, dtype in _DTYPES.items()]
    return getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), probes


def describe_array(array: np.ndarray) -> tuple[np.ndarray, int, int, str]:
    """(owner, pointer, num_bytes, dtype's string) of the row-major bytes; no copy when it is contiguous."""
    if array.dtype.kind not in _NUMPY_KINDS:
        raise NotEncodable(f"an array of dtype {array.dtype}")
    array = np.ascontiguousarray(array)
    return array, array.__array_interface__["data"][0], array.nbytes, array.dtype.str


def find_numpy_dtype(name: str) -> np.dtype:
    """The dtype of a `dtype.str`. The name comes from outside: numpy gets to see what looks like one, and no more."""
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"an array of dtype {name[:40]!r}")
    return np.dtype(name)
