"""Values to the tree that MessagePack writes: the encoding half of the codec, one function for each kind of value.

In the tree a scalar stands for itself, a map for a dict, and every other node is an array whose first element is a tag.
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

import msgspec
import numpy as np

from rlinf_comm import _arrays
from rlinf_comm._arrays import Refused, describe_type

PLAIN_LIST, LIST, PLAIN_TUPLE, TUPLE, BIG_INT, DATACLASS, STRUCT, ENUM, FLAG, PATH = range(10)
TENSOR, NDARRAY, NUMPY_SCALAR = range(10, 13)

SCALARS = frozenset({type(None), bool, int, float, str, bytes})


class Encoding:
    """What one call to encode() gathers."""

    __slots__ = ("buffers", "class_entries", "class_indices")

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.class_indices: dict[type, int] = {}
        self.class_entries: list[list[str]] = []

    def add_class(self, cls: type, entry: list[str]) -> int:
        index = self.class_indices[cls] = len(self.class_entries)
        self.class_entries.append(entry)
        return index

    def add_buffer(self, buffer: memoryview) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1


_Lowering = Callable[[Any, Encoding], Any]


def lower(value: Any, state: Encoding) -> Any:
    lowering = _LOWERINGS.get(type(value)) or _find_lowering(type(value))
    return lowering(value, state)


def _lower_all(values: Any, state: Encoding) -> list[Any]:
    return [value if type(value) in SCALARS else lower(value, state) for value in values]


def _lower_scalar(value: Any, state: Encoding) -> Any:
    return value


def _lower_list(value: list[Any], state: Encoding) -> list[Any]:
    if SCALARS.issuperset(map(type, value)):  # token ids: not one Python operation for each
        return [PLAIN_LIST, value]
    return [LIST, *_lower_all(value, state)]


def _lower_tuple(value: tuple[Any, ...], state: Encoding) -> list[Any]:
    if SCALARS.issuperset(map(type, value)):
        return [PLAIN_TUPLE, value]
    return [TUPLE, *_lower_all(value, state)]


def _lower_dict(value: dict[Any, Any], state: Encoding) -> dict[Any, Any]:
    for key in value:
        if type(key) is not str and not (type(key) is int and -(1 << 63) <= key < 1 << 64):
            raise Refused(f"a dict with the key {key!r}; keys must be str, or int of 64 bits")
    return {key: item if type(item) in SCALARS else lower(item, state) for key, item in value.items()}


def _lower_path(value: pathlib.Path, state: Encoding) -> list[Any]:
    return [PATH, os.fsencode(value)]


def _lower_tensor(value: Any, state: Encoding) -> list[Any]:
    _arrays.check_strided(value)
    name, buffer = _arrays.tensor_bytes(value)
    return [TENSOR, state.add_buffer(buffer), name, *value.shape]


def _lower_ndarray(value: np.ndarray, state: Encoding) -> list[Any]:
    name, buffer = _arrays.ndarray_bytes(value)
    return [NDARRAY, state.add_buffer(buffer), name, *value.shape]


def _lower_numpy_scalar(value: np.generic, state: Encoding) -> list[Any]:
    name, buffer = _arrays.ndarray_bytes(np.asarray(value))
    return [NUMPY_SCALAR, name, bytes(buffer)]


_LOWERINGS: dict[type, _Lowering] = {
    **dict.fromkeys(SCALARS, _lower_scalar),
    list: _lower_list,
    tuple: _lower_tuple,
    dict: _lower_dict,
    type(pathlib.Path()): _lower_path,
    np.ndarray: _lower_ndarray,
}


def _find_lowering(cls: type) -> _Lowering:
    """Looks at a type for the first time, and remembers what it found."""
    if dataclasses.is_dataclass(cls):
        lowering = _record_lowering(cls, DATACLASS, tuple(field.name for field in dataclasses.fields(cls)))
    elif issubclass(cls, msgspec.Struct):
        lowering = _record_lowering(cls, STRUCT, cls.__struct_fields__)
    elif issubclass(cls, enum.Enum):
        lowering = _enum_lowering(cls)
    elif cls in _arrays.tensor_types():
        lowering = _lower_tensor
    elif issubclass(cls, np.generic):
        lowering = _lower_numpy_scalar
    else:
        raise Refused(describe_type(cls))
    _LOWERINGS[cls] = lowering
    return lowering


def _record_lowering(cls: type, tag: int, names: tuple[str, ...]) -> _Lowering:
    entry = [_class_name(cls), *names]
    get_fields: Callable[[Any], tuple[Any, ...]]
    if len(names) > 1:
        get_fields = operator.attrgetter(*names)
    else:
        get_fields = lambda value: tuple(getattr(value, name) for name in names)  # noqa: E731 - same role as above

    def lower_record(value: Any, state: Encoding) -> list[Any]:
        index = state.class_indices.get(cls)
        if index is None:
            index = state.add_class(cls, entry)
        try:
            fields = get_fields(value)
        except AttributeError as error:
            raise Refused(f"a {cls.__qualname__} with a field that was never set ({error})") from error
        return [tag, index, *_lower_all(fields, state)]

    return lower_record


def _enum_lowering(cls: type[enum.Enum]) -> _Lowering:
    entry = [_class_name(cls)]

    def lower_enum(value: enum.Enum, state: Encoding) -> list[Any]:
        index = state.class_indices.get(cls)
        if index is None:
            index = state.add_class(cls, entry)
        if value.name in cls.__members__:
            return [ENUM, index, value.name]
        return [FLAG, index, value.value]  # several flags at once have no name of their own

    return lower_enum


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


def widen(node: Any) -> Any:
    """A lowered tree with integers beyond 64 bits, which MessagePack lacks, written as text."""
    if type(node) is int:
        return node if -(1 << 63) <= node < 1 << 64 else [BIG_INT, hex(node)]
    if type(node) is dict:
        return {key: widen(item) for key, item in node.items()}
    if type(node) is not list:
        return node
    if node[0] in (PLAIN_LIST, PLAIN_TUPLE):
        return [LIST if node[0] == PLAIN_LIST else TUPLE, *map(widen, node[1])]
    return [node[0], *map(widen, node[1:])]
