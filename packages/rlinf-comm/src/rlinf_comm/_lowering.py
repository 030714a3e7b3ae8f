"""How a class is encoded: asked by the native codec (csrc/python/codec_encode.cc) once per class, and for rare values.

In the wire form a scalar stands for itself, a map for a dict, and every other node is an array whose first element is a
tag. Mirrors the tags of csrc/python/codec.h.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_comm import _arrays, records
from rlinf_comm._arrays import NotEncodable, describe_type

DATACLASS, STRUCT, ENUM, FLAG, PATH, TENSOR, NDARRAY, NUMPY_SCALAR = range(5, 13)
FOREIGN_ARRAY = 14


Description = tuple[int, list[str] | None, tuple[str, ...] | None, Callable[[Any], tuple[Any, ...]] | None]
"""Tag; name of the class and its fields, where the header lists it; the fields; and, where the value has no native
form, a function to (tag, values...)."""


def describe_class(cls: type) -> Description:
    """Looks at a class for the first time.

    Raises:
        Refused: its values cannot cross.
    """
    if dataclasses.is_dataclass(cls):
        return _record(cls, DATACLASS, tuple(field.name for field in dataclasses.fields(cls)))
    if records.is_struct(cls):
        return _record(cls, STRUCT, cls.__struct_fields__)
    if issubclass(cls, enum.Enum):
        return ENUM, [_name_of(cls)], None, _lower_enum
    if cls in _arrays.tensor_types():
        return TENSOR, None, None, None
    if cls is np.ndarray:
        return NDARRAY, None, None, None
    if issubclass(cls, np.generic):
        return NUMPY_SCALAR, None, None, _lower_numpy_scalar
    if cls is type(pathlib.Path()):
        return PATH, None, None, _lower_path
    if _arrays.is_foreign_array(cls):
        return FOREIGN_ARRAY, None, None, _lower_foreign_array
    raise NotEncodable(describe_type(cls))


def _record(cls: type, tag: int, names: tuple[str, ...]) -> Description:
    return tag, [_name_of(cls), *names], names, None


def _lower_enum(value: enum.Enum) -> tuple[Any, ...]:
    if value.name in type(value).__members__:
        return ENUM, value.name
    return FLAG, value.value  # several flags at once have no name of their own


def _lower_path(value: pathlib.Path) -> tuple[Any, ...]:
    return PATH, os.fsencode(value)


def _lower_foreign_array(value: Any) -> tuple[Any, ...]:
    return FOREIGN_ARRAY, _arrays.tensor_of(value)


def _lower_numpy_scalar(value: np.generic) -> tuple[Any, ...]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields:
        raise NotEncodable(f"an array of dtype {array.dtype}")
    return NUMPY_SCALAR, array.dtype.str, array.tobytes()


def _name_of(cls: type) -> str:
    name = records.name_of(cls)
    if name is None:
        raise NotEncodable(
            f"a {cls.__module__}.{cls.__qualname__}; put @rlinf_comm.record above the class, "
            f"or call rlinf_comm.record({cls.__name__}) in both processes"
        )
    return name
