"""The tree that MessagePack wrote back to values: the decoding half of the codec."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import operator
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rlinf_comm import _arrays
from rlinf_comm._lowering import DATACLASS, ENUM, SCALARS, STRUCT
from rlinf_comm.errors import DecodeError

_setattr = object.__setattr__
_Build = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownClass:
    cls: Any
    kind: int
    fields: list[str]
    build: _Build


_KNOWN: dict[str, KnownClass] = {}


def _find_class(name: str) -> Any:
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


def _learn_class(name: str) -> KnownClass:
    cls = _find_class(name)
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        known = KnownClass(cls, STRUCT, list(cls.__struct_fields__), _struct_builder(cls))
    elif isinstance(cls, type) and dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        known = KnownClass(cls, DATACLASS, names, _dataclass_builder(cls, names))
    elif isinstance(cls, type) and issubclass(cls, enum.Enum):
        known = KnownClass(cls, ENUM, [], lambda values: cls(values[0]))
    else:
        raise DecodeError(f"{name} is no dataclass, Enum or msgspec.Struct, and nothing else is built from bytes")
    _KNOWN[name] = known
    return known


def _dataclass_builder(cls: Any, names: list[str]) -> _Build:
    """Sets the fields of a bare object: exact for frozen classes, init=False fields and __post_init__ alike."""
    new = cls.__new__
    has_slots = any("__slots__" in vars(base) for base in cls.__mro__[:-1])

    def build_with_slots(values: list[Any]) -> Any:
        record = new(cls)
        for name, value in zip(names, values):  # noqa: B905 - lengths are equal, strict= costs as much as a field
            _setattr(record, name, value)
        return record

    def build_with_dict(values: list[Any]) -> Any:
        record = new(cls)
        record.__dict__.update(zip(names, values))  # noqa: B905
        return record

    return build_with_slots if has_slots else build_with_dict


def _struct_builder(cls: Any) -> _Build:
    names = cls.__struct_fields__
    return lambda values: cls(**dict(zip(names, values)))  # noqa: B905


class Decoding:
    """What one call to decode() looks up."""

    __slots__ = ("buffers", "classes")

    def __init__(self, buffers: Sequence[Any], classes: list[KnownClass]) -> None:
        self.buffers = buffers
        self.classes = classes


def lift(node: Any, state: Decoding) -> Any:
    if type(node) is list:
        return _LIFTINGS[node[0]](node, state)
    if type(node) is dict:
        for key, item in node.items():
            if type(item) not in SCALARS:
                node[key] = lift(item, state)
    return node


def _lift_all(nodes: list[Any], state: Decoding) -> list[Any]:
    return [node if type(node) in SCALARS else lift(node, state) for node in nodes]


def _lift_record(node: list[Any], state: Decoding) -> Any:
    known = state.classes[node[1]]
    if known.kind != node[0]:
        raise DecodeError(f"{known.cls!r} is not the kind of class that the sender encoded")
    return known.build([item if type(item) in SCALARS else lift(item, state) for item in node[2:]])


def _lift_enum(node: list[Any], state: Decoding) -> Any:
    cls = state.classes[node[1]].cls
    if not issubclass(cls, enum.Enum):
        raise DecodeError(f"{cls!r} is no Enum")
    return cls[node[2]] if node[0] == ENUM else cls(lift(node[2], state))


_build_tensor: Callable[[Any, str, list[int]], Any] | None = None


def _lift_tensor(node: list[Any], state: Decoding) -> Any:
    global _build_tensor
    if _build_tensor is None:
        _build_tensor = _arrays.make_tensor_builder()
    return _build_tensor(state.buffers[node[1]], node[2], node[3:])


_LIFTINGS: tuple[Callable[[list[Any], Decoding], Any], ...] = (
    lambda node, state: node[1],
    lambda node, state: _lift_all(node[1:], state),
    lambda node, state: tuple(node[1]),
    lambda node, state: tuple(_lift_all(node[1:], state)),
    lambda node, state: int(node[1], 16),
    _lift_record,
    _lift_record,
    _lift_enum,
    _lift_enum,
    lambda node, state: pathlib.Path(os.fsdecode(node[1])),
    _lift_tensor,
    lambda node, state: _arrays.build_ndarray(state.buffers[node[1]], node[2], node[3:]),
    lambda node, state: np.frombuffer(node[2], dtype=node[1])[0],
)


def resolve_classes(entries: list[list[str]]) -> list[KnownClass]:
    """The classes that a sender listed, checked to have the same fields here."""
    classes = []
    for name, *fields in entries:
        known = _KNOWN.get(name) or _learn_class(name)
        if known.fields != fields:
            raise DecodeError(
                f"{name} has the fields {known.fields} here, the sender's has {fields}; run the same code on both sides"
            )
        classes.append(known)
    return classes
