"""Turns values into bytes and back without pickle: the structure by msgspec (MessagePack), tensors and arrays beside it.

    encode(value) -> Encoded(header, buffers)        decode(header, buffers) -> value
    pack(value) -> bytes                             unpack(blob) -> value

`encode` copies no contiguous tensor and `decode` copies none at all: the tensors it returns are views of the buffers.

What crosses, and comes back as the same type: None, bool, int (of any size), float (all bits), str, bytes, list, tuple,
dict with str or int keys, Enum and Flag members, pathlib.Path, dataclasses, msgspec.Struct, numpy arrays and scalars, CPU
torch tensors of every dtype and shape. What a view or a subclass adds does not cross: strides (the copy is row-major),
`requires_grad`, Parameter (arrives as a Tensor). Dataclasses are rebuilt from their fields, `__post_init__` does not run again.

A class crosses by name, "module:qualname", and is imported by the receiver. Nothing is built but dataclasses, Enums and
Structs, so that bytes from a stranger cannot call a function of his choice (importing a module does run its body).

Wire form. header = msgpack([classes, root]); a scalar stands for itself, a map for a dict, and every other node is an array
whose first element is one of the tags below. Classes are listed once per item with the names of their fields.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import operator
import os
import pathlib
import struct
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rlinf_comm import _arrays
from rlinf_comm._arrays import Refused
from rlinf_comm.errors import DecodeError, UnsupportedValueError

_PLAIN_LIST, _LIST, _PLAIN_TUPLE, _TUPLE, _BIG_INT, _DATACLASS, _STRUCT, _ENUM, _FLAG, _PATH = range(10)
_TENSOR, _NDARRAY, _NUMPY_SCALAR = range(10, 13)

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, Enum, pathlib.Path, "
    "importable dataclasses and msgspec.Struct, numpy arrays, CPU torch tensors"
)

_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder().decode


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A value in two parts."""

    header: bytes
    """The structure, with a place for each tensor."""
    buffers: tuple[memoryview, ...]
    """Row-major bytes of each tensor and array; they keep the memory alive."""

    @property
    def num_bytes(self) -> int:
        """Of both parts."""
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


# --- encoding -----------------------------------------------------------------------------------------------------------


class _Encoding:
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


_Lowering = Callable[[Any, _Encoding], Any]


def _lower(value: Any, state: _Encoding) -> Any:
    lowering = _LOWERINGS.get(type(value)) or _find_lowering(type(value))
    return lowering(value, state)


def _lower_all(values: Any, state: _Encoding) -> list[Any]:
    return [value if type(value) in _SCALARS else _lower(value, state) for value in values]


def _lower_scalar(value: Any, state: _Encoding) -> Any:
    return value


def _lower_list(value: list[Any], state: _Encoding) -> list[Any]:
    if _SCALARS.issuperset(map(type, value)):  # token ids: not one Python operation for each
        return [_PLAIN_LIST, value]
    return [_LIST, *_lower_all(value, state)]


def _lower_tuple(value: tuple[Any, ...], state: _Encoding) -> list[Any]:
    if _SCALARS.issuperset(map(type, value)):
        return [_PLAIN_TUPLE, value]
    return [_TUPLE, *_lower_all(value, state)]


def _lower_dict(value: dict[Any, Any], state: _Encoding) -> dict[Any, Any]:
    for key in value:
        if type(key) is not str and not (type(key) is int and -(1 << 63) <= key < 1 << 64):
            raise Refused(f"a dict with the key {key!r}; keys must be str, or int of 64 bits")
    return {key: item if type(item) in _SCALARS else _lower(item, state) for key, item in value.items()}


def _lower_path(value: pathlib.Path, state: _Encoding) -> list[Any]:
    return [_PATH, os.fsencode(value)]


def _lower_tensor(value: Any, state: _Encoding) -> list[Any]:
    _arrays.check_strided(value)
    name, buffer = _arrays.tensor_bytes(value)
    return [_TENSOR, state.add_buffer(buffer), name, *value.shape]


def _lower_ndarray(value: np.ndarray, state: _Encoding) -> list[Any]:
    name, buffer = _arrays.ndarray_bytes(value)
    return [_NDARRAY, state.add_buffer(buffer), name, *value.shape]


def _lower_numpy_scalar(value: np.generic, state: _Encoding) -> list[Any]:
    name, buffer = _arrays.ndarray_bytes(np.asarray(value))
    return [_NUMPY_SCALAR, name, bytes(buffer)]


_LOWERINGS: dict[type, _Lowering] = {
    **dict.fromkeys(_SCALARS, _lower_scalar),
    list: _lower_list,
    tuple: _lower_tuple,
    dict: _lower_dict,
    type(pathlib.Path()): _lower_path,
    np.ndarray: _lower_ndarray,
}


def _find_lowering(cls: type) -> _Lowering:
    """Looks at a type for the first time, and remembers what it found."""
    if dataclasses.is_dataclass(cls):
        lowering = _record_lowering(cls, _DATACLASS, tuple(field.name for field in dataclasses.fields(cls)))
    elif issubclass(cls, msgspec.Struct):
        lowering = _record_lowering(cls, _STRUCT, cls.__struct_fields__)
    elif issubclass(cls, enum.Enum):
        lowering = _enum_lowering(cls)
    elif cls in _arrays.tensor_types():
        lowering = _lower_tensor
    elif issubclass(cls, np.generic):
        lowering = _lower_numpy_scalar
    else:
        raise Refused(_describe_type(cls))
    _LOWERINGS[cls] = lowering
    return lowering


def _record_lowering(cls: type, tag: int, names: tuple[str, ...]) -> _Lowering:
    entry = [_class_name(cls), *names]
    get_fields: Callable[[Any], tuple[Any, ...]]
    if len(names) > 1:
        get_fields = operator.attrgetter(*names)
    else:
        get_fields = lambda value: tuple(getattr(value, name) for name in names)  # noqa: E731 - same role as above

    def lower_record(value: Any, state: _Encoding) -> list[Any]:
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

    def lower_enum(value: enum.Enum, state: _Encoding) -> list[Any]:
        index = state.class_indices.get(cls)
        if index is None:
            index = state.add_class(cls, entry)
        if value.name in cls.__members__:
            return [_ENUM, index, value.name]
        return [_FLAG, index, value.value]  # several flags at once have no name of their own

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
            f"a {module_name}.{qualname}, which the receiver could not import; define the class at the top of a module"
        )
    # A spawned child knows its parent's main module as __mp_main__. To every process "__main__" is its own main module.
    return f"{'__main__' if module_name == '__mp_main__' else module_name}:{qualname}"


def encode(value: Any) -> Encoded:
    """Splits a value into its structure and the bytes of its tensors.

    Raises:
        UnsupportedValueError: some part of it cannot cross; names the place, `samples[3].scorer: a function ...`.
    """
    state = _Encoding()
    try:
        root = _lower(value, state)
        try:
            header = _encode_msgpack([state.class_entries, root])
        except OverflowError:
            header = _encode_msgpack([state.class_entries, _widen(root)])
    except (Refused, UnicodeEncodeError):
        raise _located(value) from None
    except RecursionError:
        raise UnsupportedValueError("value: nested too deeply, or contains itself") from None
    return Encoded(header, tuple(state.buffers))


def _widen(node: Any) -> Any:
    """A lowered tree with integers beyond 64 bits, which MessagePack lacks, written as text."""
    if type(node) is int:
        return node if -(1 << 63) <= node < 1 << 64 else [_BIG_INT, hex(node)]
    if type(node) is dict:
        return {key: _widen(item) for key, item in node.items()}
    if type(node) is not list:
        return node
    if node[0] in (_PLAIN_LIST, _PLAIN_TUPLE):
        return [_LIST if node[0] == _PLAIN_LIST else _TUPLE, *map(_widen, node[1])]
    return [node[0], *map(_widen, node[1:])]


# --- where an unsupported value is ----------------------------------------------------------------------------------------


def _describe_type(cls: type) -> str:
    if issubclass(cls, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return "a function"
    if issubclass(cls, type):
        return "a class"
    if issubclass(cls, types.ModuleType):
        return "a module"
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _located(value: Any) -> UnsupportedValueError:
    """The error for the first part of `value` that does not encode. Slow; only walked after a failure."""
    path, reason = _first_refusal(value, "") or ("", "a value that changed while it was encoded")
    cause = reason.split(";")[0]
    advice = reason[len(cause) :]
    return UnsupportedValueError(f"{path or 'value'}: {cause} cannot cross a channel{advice}; allowed: {_ALLOWED}")


def _children(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """(path, child) of a container, None for a leaf."""
    if type(value) in (list, tuple):
        return [(f"{path or 'value'}[{index}]", child) for index, child in enumerate(value)]
    if type(value) is dict:
        if not path:
            return [(str(key), child) for key, child in value.items()]
        return [(f"{path}[{key!r}]", child) for key, child in value.items()]
    names: Sequence[str] = ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    prefix = f"{path}." if path else ""
    return [(prefix + name, getattr(value, name)) for name in names if hasattr(value, name)] or None


def _first_refusal(value: Any, path: str) -> tuple[str, str] | None:
    for child_path, child in _children(value, path) or ():
        found = _first_refusal(child, child_path)
        if found:
            return found
    try:
        _encode_msgpack(_widen(_lower(value, _Encoding())))
    except Refused as error:
        return path, str(error)
    except UnicodeEncodeError as error:
        return path, f"text that is no valid Unicode ({error.reason})"
    return None


# --- decoding -----------------------------------------------------------------------------------------------------------

_setattr = object.__setattr__
_Build = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownClass:
    cls: Any
    kind: int
    fields: list[str]
    build: _Build


_KNOWN: dict[str, _KnownClass] = {}


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


def _learn_class(name: str) -> _KnownClass:
    cls = _find_class(name)
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        known = _KnownClass(cls, _STRUCT, list(cls.__struct_fields__), _struct_builder(cls))
    elif isinstance(cls, type) and dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        known = _KnownClass(cls, _DATACLASS, names, _dataclass_builder(cls, names))
    elif isinstance(cls, type) and issubclass(cls, enum.Enum):
        known = _KnownClass(cls, _ENUM, [], lambda values: cls(values[0]))
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


class _Decoding:
    """What one call to decode() looks up."""

    __slots__ = ("buffers", "classes")

    def __init__(self, buffers: Sequence[Any], classes: list[_KnownClass]) -> None:
        self.buffers = buffers
        self.classes = classes


def _lift(node: Any, state: _Decoding) -> Any:
    if type(node) is list:
        return _LIFTINGS[node[0]](node, state)
    if type(node) is dict:
        for key, item in node.items():
            if type(item) not in _SCALARS:
                node[key] = _lift(item, state)
    return node


def _lift_all(nodes: list[Any], state: _Decoding) -> list[Any]:
    return [node if type(node) in _SCALARS else _lift(node, state) for node in nodes]


def _lift_record(node: list[Any], state: _Decoding) -> Any:
    known = state.classes[node[1]]
    if known.kind != node[0]:
        raise DecodeError(f"{known.cls!r} is not the kind of class that the sender encoded")
    return known.build([item if type(item) in _SCALARS else _lift(item, state) for item in node[2:]])


def _lift_enum(node: list[Any], state: _Decoding) -> Any:
    cls = state.classes[node[1]].cls
    if not issubclass(cls, enum.Enum):
        raise DecodeError(f"{cls!r} is no Enum")
    return cls[node[2]] if node[0] == _ENUM else cls(_lift(node[2], state))


_build_tensor: Callable[[Any, str, list[int]], Any] | None = None


def _lift_tensor(node: list[Any], state: _Decoding) -> Any:
    global _build_tensor
    if _build_tensor is None:
        _build_tensor = _arrays.make_tensor_builder()
    return _build_tensor(state.buffers[node[1]], node[2], node[3:])


_LIFTINGS: tuple[Callable[[list[Any], _Decoding], Any], ...] = (
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


def decode(header: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The value of encode(). Its tensors and arrays are views of `buffers` and keep them alive.

    Args:
        header: Encoded.header.
        buffers: Bytes-like objects with the bytes of Encoded.buffers, aligned as their dtypes need; writable, or the tensors
            are views of memory that must not be written.

    Raises:
        DecodeError: no encoded value, or of a class that cannot be imported or may not be built.
    """
    try:
        entries, root = _decode_msgpack(header)
        if type(root) in _SCALARS:
            return root
        classes = []
        for name, *fields in entries:
            known = _KNOWN.get(name) or _learn_class(name)
            if known.fields != fields:
                raise DecodeError(
                    f"{name} has the fields {known.fields} here, the sender's has {fields}; run the same code on both sides"
                )
            classes.append(known)
        return _lift(root, _Decoding(buffers, classes))
    except (msgspec.DecodeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"not an encoded value: {type(error).__name__}: {error}") from error


# --- one blob -----------------------------------------------------------------------------------------------------------

_MAGIC = b"rlp1"
_PRELUDE = struct.Struct("<4sIQ")  # magic, number of buffers, bytes of the header
_ALIGNMENT = 64


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT


def pack(value: Any) -> bytes:
    """One self-contained blob, for messages and files. Tensors are copied."""
    encoded = encode(value)
    lengths = struct.pack(f"<{len(encoded.buffers)}Q", *(buffer.nbytes for buffer in encoded.buffers))
    parts: list[bytes | memoryview] = [_PRELUDE.pack(_MAGIC, len(encoded.buffers), len(encoded.header)), lengths]
    parts.append(encoded.header)
    if encoded.buffers:
        parts.append(bytes(_padding(_PRELUDE.size + len(lengths) + len(encoded.header))))
    for buffer in encoded.buffers:
        parts += (buffer, bytes(_padding(buffer.nbytes)))
    return b"".join(parts)


def unpack(blob: bytes | bytearray | memoryview) -> Any:
    """The value of pack(). Tensors are private copies.

    Raises:
        DecodeError: not such a blob, or cut short.
    """
    view = memoryview(blob).cast("B")
    try:
        magic, num_buffers, header_bytes = _PRELUDE.unpack_from(view)
        lengths = struct.unpack_from(f"<{num_buffers}Q", view, _PRELUDE.size)
    except struct.error as error:
        raise DecodeError(f"not a packed value: {error}") from error
    if magic != _MAGIC:
        raise DecodeError(f"not a packed value: starts with {magic!r} instead of {_MAGIC!r}")
    start = _PRELUDE.size + 8 * num_buffers
    header = view[start : start + header_bytes]
    start += header_bytes
    body_start = start + (_padding(start) if num_buffers else 0)
    body_bytes = sum(length + _padding(length) for length in lengths)
    if len(view) != body_start + body_bytes:
        raise DecodeError(f"a packed value of {body_start + body_bytes} bytes, but {len(view)} bytes are here")
    if not num_buffers:
        return decode(header, ())
    body = memoryview(_aligned_bytes(body_bytes))
    body[:] = view[body_start:]
    buffers, start = [], 0
    for length in lengths:
        buffers.append(body[start : start + length])
        start += length + _padding(length)
    return decode(header, buffers)


def _aligned_bytes(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]
