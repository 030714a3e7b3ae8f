"""How a class is encoded: asked by the native codec (csrc/python/codec_encode.cc) once per class, and for rare values.

In the wire form a scalar stands for itself, a map for a dict, and every other node is an array whose first element is a
tag. Mirrors the tags of csrc/python/codec.h.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_comm import _arrays
from rlinf_comm._arrays import Refused, describe_type

DATACLASS, STRUCT, ENUM, FLAG, PATH, TENSOR, NDARRAY, NUMPY_SCALAR = range(5, 13)
FOREIGN_ARRAY = 14


def is_struct(cls: Any) -> bool:
    """Whether `cls` derives from msgspec.Struct. This package does not import msgspec: who has such a class, has."""
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and isinstance(cls, type) and issubclass(cls, msgspec.Struct)


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
    if is_struct(cls):
        return _record(cls, STRUCT, cls.__struct_fields__)
    if issubclass(cls, enum.Enum):
        return ENUM, [_class_name(cls)], None, _lower_enum
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
    raise Refused(describe_type(cls))


def _record(cls: type, tag: int, names: tuple[str, ...]) -> Description:
    return tag, [_class_name(cls), *names], names, None


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
        raise Refused(f"an array of dtype {array.dtype}")
    return NUMPY_SCALAR, array.dtype.str, array.tobytes()


def _class_name(cls: type) -> str:
    """ "module:qualname", checked to lead back to the class."""
    module_name, qualname = cls.__module__, cls.__qualname__
    try:
        found = operator.attrgetter(qualname)(sys.modules[module_name])
    except (KeyError, AttributeError):
        found = None
    if found is not cls:
        raise Refused(
            f"a {module_name}.{qualname}; the receiver could not import it, so define the class at the top of a module"
        )
    # A spawned child knows its parent's main module as __mp_main__. To every process "__main__" is its own main module.
    return f"{'__main__' if module_name == '__mp_main__' else module_name}:{qualname}"
