"""Finds the part of a value that does not encode, for the message. Slow, and only used after a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_comm._arrays import NotEncodable
from rlinf_comm.errors import UnsupportedValueError
from rlinf_comm.records import is_struct

_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, pathlib.Path, "
    "dataclasses, msgspec.Struct and Enum under @rlinf_comm.record, numpy arrays, torch tensors, arrays with DLPack"
)


def located(value: Any, encode: Callable[[Any], Any]) -> UnsupportedValueError:
    """The error for the first part of `value` that `encode` refuses. Slow; only walked after a failure."""
    path, reason = _first_refusal(value, "", encode) or ("", "a value that changed while it was encoded")
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
    cls: Any = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    elif is_struct(cls):
        names = cls.__struct_fields__
    prefix = f"{path}." if path else ""
    return [(prefix + name, getattr(value, name)) for name in names if hasattr(value, name)] or None


def _first_refusal(value: Any, path: str, encode: Callable[[Any], Any]) -> tuple[str, str] | None:
    for child_path, child in _children(value, path) or ():
        refusal = _first_refusal(child, child_path, encode)
        if refusal:
            return refusal
    try:
        encode(value)
    except NotEncodable as error:
        return path, str(error)
    except UnicodeEncodeError as error:
        return path, f"text that is no valid Unicode ({error.reason})"
    return None
