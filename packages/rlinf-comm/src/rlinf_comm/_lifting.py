"""How a class is built: asked by the native codec (csrc/python/codec_decode.cc) once per class, and for rare values."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_comm import records
from rlinf_comm._arrays import find_numpy_dtype
from rlinf_comm._lowering import DATACLASS, ENUM, FLAG, FOREIGN_ARRAY, NUMPY_SCALAR, PATH, STRUCT
from rlinf_comm.errors import DecodeError

_Build = Callable[[list[Any]], Any]
ARRIVALS: dict[type, _Build] = {}
"""Registered classes that are there for the way alone -> function from the fields' values to what arrives."""

_MAX_SHOWN = 200
"""The most that an error message quotes of data that a stranger may have sent, in characters or list elements."""


def find_class(name: str, sender_fields: list[str]) -> tuple[int, type, _Build | None]:
    """(tag, class, function from the fields' values to an object); no function where fields are set one by one.

    Raises:
        DecodeError: no class is registered under that name here, or one with other fields.
    """
    record_class = records.class_named(name)
    if record_class is None:
        raise DecodeError(
            f"no class is registered as {name[:_MAX_SHOWN]!r} in this process; import the module that defines it "
            "before receiving, and see that @rlinf_comm.record stands above it there"
        )
    cls: Any = record_class
    build: _Build | None = None
    if records.is_struct(cls):
        tag, fields, build = STRUCT, list(cls.__struct_fields__), _struct_builder(cls)
    elif dataclasses.is_dataclass(record_class):
        tag, fields = DATACLASS, [field.name for field in dataclasses.fields(cls)]
        build = ARRIVALS.get(cls) or (_through_dict(cls, fields) if _hides_a_field(cls, fields) else None)
    else:
        tag, fields = ENUM, []
    if fields != sender_fields:
        raise DecodeError(
            f"{name} has the fields {fields} here, the sender's has {str(sender_fields[:_MAX_SHOWN])[:_MAX_SHOWN]}; "
            "run the same code on both sides"
        )
    return tag, cls, build


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
    if tag == ENUM:
        (name,) = values
        return _enum(cls)[name]
    if tag == FLAG:
        (bits,) = values
        return _flag(cls)(bits)
    if tag == PATH:
        (raw,) = values
        return pathlib.Path(os.fsdecode(raw))
    if tag == NUMPY_SCALAR:
        dtype, raw = values
        return np.frombuffer(raw, dtype=find_numpy_dtype(dtype), count=1)[0]
    if tag == FOREIGN_ARRAY:
        (tensor,) = values
        return tensor
    raise ValueError(f"unknown tag {tag}")


def _enum(cls: type) -> type[enum.Enum]:
    if not issubclass(cls, enum.Enum):
        raise DecodeError(f"{cls!r} is no Enum")
    return cls


def _flag(cls: type) -> type[enum.Flag]:
    if not issubclass(cls, enum.Flag):
        raise DecodeError(f"{cls!r} is no Flag")
    return cls
