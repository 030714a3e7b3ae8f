"""How a class is built: asked by the native codec (csrc/python/codec_decode.cc) once per class, and for rare values."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import operator
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_comm._lowering import DATACLASS, ENUM, FLAG, FOREIGN_ARRAY, NUMPY_SCALAR, PATH, STRUCT, is_struct
from rlinf_comm.errors import DecodeError

_Build = Callable[[list[Any]], Any]


def find_class(name: str, sender_fields: list[str]) -> tuple[int, type, _Build | None]:
    """(tag, class, function from the fields' values to an object); no function where fields are set one by one.

    Raises:
        DecodeError: no such class here, one that is not built from bytes, or one with other fields.
    """
    cls = _import_class(name)
    build: _Build | None = None
    if is_struct(cls):
        tag, fields, build = STRUCT, list(cls.__struct_fields__), _struct_builder(cls)
    elif isinstance(cls, type) and dataclasses.is_dataclass(cls):
        tag, fields = DATACLASS, [field.name for field in dataclasses.fields(cls)]
        build = _through_dict(cls, fields) if _hides_a_field(cls, fields) else None
    elif isinstance(cls, type) and issubclass(cls, enum.Enum):
        tag, fields = ENUM, []
    else:
        raise DecodeError(f"{name} is no dataclass, Enum or msgspec.Struct, and nothing else is built from bytes")
    if fields != sender_fields:
        raise DecodeError(
            f"{name} has the fields {fields} here, the sender's has {sender_fields}; run the same code on both sides"
        )
    return tag, cls, build


def _import_class(name: str) -> Any:
    module_name, _, qualname = name.partition(":")
    module_names = ("__main__", "__mp_main__") if module_name == "__main__" else (module_name,)
    for candidate in module_names:
        module = sys.modules.get(candidate)
        if module is None and candidate not in ("__main__", "__mp_main__"):
            try:
                module = importlib.import_module(candidate)
            except ImportError as error:
                raise DecodeError(f"cannot import {candidate!r} to build a {qualname}: {error}") from error
        try:
            return operator.attrgetter(qualname)(module)
        except AttributeError:
            continue
    raise DecodeError(f"{module_name!r} has no {qualname!r} in this process; sender and receiver run different code")


def _hides_a_field(cls: type, fields: list[str]) -> bool:
    """Whether a descriptor of the class, say a property, stands where a field's value is to be stored."""
    if any("__slots__" in vars(base) for base in cls.__mro__[:-1]):
        return False  # the slots themselves are descriptors
    return any(hasattr(type(inspect.getattr_static(cls, name, None)), "__set__") for name in fields)


def _through_dict(cls: Any, names: list[str]) -> _Build:
    def build(values: list[Any]) -> Any:
        record = cls.__new__(cls)
        record.__dict__.update(zip(names, values, strict=True))
        return record

    return build


def _struct_builder(cls: Any) -> _Build:
    names = cls.__struct_fields__
    return lambda values: cls(**dict(zip(names, values, strict=True)))


def lift(tag: int, cls: Any, values: list[Any]) -> Any:
    """The value of a tag that has no native form."""
    if tag in (ENUM, FLAG):
        if not issubclass(cls, enum.Enum):
            raise DecodeError(f"{cls!r} is no Enum")
        (value,) = values
        return cls[value] if tag == ENUM else cls(value)
    if tag == PATH:
        (raw,) = values
        return pathlib.Path(os.fsdecode(raw))
    if tag == NUMPY_SCALAR:
        dtype, raw = values
        return np.frombuffer(raw, dtype=dtype)[0]
    if tag == FOREIGN_ARRAY:
        (tensor,) = values
        return tensor
    raise ValueError(f"unknown tag {tag}")
