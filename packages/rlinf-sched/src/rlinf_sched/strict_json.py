"""Frozen dataclasses to and from JSON: sorted keys on the way out, no unknown key or wrong type on the way in.

Only what the records of this package need: str, int, float, bool, Literal strings, optional values, tuples of one
element type, mappings from strings, nested records.
A message names the place the way a person would point at it in the file: `plan.stages[2].granularity`.
"""

import dataclasses
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlinf_sched.errors import SchedError, did_you_mean

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""The limit of numpy and other JSON readers."""

_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def dump(record: object, *, format_version: int) -> str:
    """The record as JSON text: two spaces of indent, keys sorted, a "format" number, one newline at the end.

    Equal records give equal text.
    """
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"dump() takes a dataclass instance, not {record!r}")
    tree = {"format": format_version, **dataclasses.asdict(record)}
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def load(text: str, record_type: type[T], *, root: str, format_version: int, error: type[SchedError]) -> T:
    """Reads what `dump` wrote.

    Args:
        text: the JSON document.
        record_type: the dataclass to build; nested records come from its annotations.
        root: the word that paths in messages begin with, such as "plan".
        format_version: the only "format" accepted.
        error: raised, with the path, for malformed JSON, duplicate, unknown or missing keys, wrong types and formats.
    """
    tree = parse(text, root=root, error=error)
    return load_tree(tree, record_type, root=root, format_version=format_version, error=error)


def parse(text: str, *, root: str, error: type[SchedError]) -> Any:
    """Parses a JSON document; raises `error` for invalid JSON and for duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, root, error))
    except json.JSONDecodeError as e:
        raise error(f"{root} is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}") from e
    except RecursionError:
        raise error(f"{root} is not valid JSON: it is nested too deep") from None
    except SchedError:
        raise
    except ValueError as e:  # an integer of thousands of digits
        raise error(f"{root} is not valid JSON: {e}") from e


def load_tree(tree: Any, record_type: type[T], *, root: str, format_version: int, error: type[SchedError]) -> T:
    """Like `load`, from the output of a JSON or YAML parser."""
    if not isinstance(tree, dict):
        raise error(f"{root} is {_kind(tree)}; expected an object with the keys of a {root}")
    tree = dict(tree)
    if "format" not in tree:
        raise error(f'{root}.format is missing; expected "format": {format_version}')
    version = tree.pop("format")
    if isinstance(version, bool) or not isinstance(version, int) or version != format_version:
        raise error(f"{root}.format={version!r}: this version of rlinf-sched reads format {format_version}")
    return record(tree, record_type, root, error)


def _object(pairs: list[tuple[str, Any]], root: str, error: type[SchedError]) -> dict[str, Any]:
    """json's default, keeping the last of two equal keys, would hide a mistake."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise error(f"{root}: the key {twice!r} occurs twice in one object; keep one of them")
    return result


def record(value: Any, record_type: type[T], path: str, error: type[SchedError]) -> T:
    """The record that an object at `path` describes; raises `error` as `load` does."""
    if not isinstance(value, dict):
        raise error(f"{path} is {_kind(value)}; expected an object")
    fields, hints = _fields_and_hints(record_type)
    for key in value:
        if key not in fields:
            raise error(f"{path}.{key} is not a known key{did_you_mean(str(key), fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _value(value[name], hints[name], f"{path}.{name}", error)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{path}.{name} is missing; add it")
    return record_type(**arguments)


@functools.cache
def _fields_and_hints(record_type: type) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    fields = {f.name: f for f in dataclasses.fields(record_type) if f.init}  # type: ignore[arg-type]
    return fields, get_type_hints(record_type)


def _value(value: Any, expected: Any, path: str, error: type[SchedError]) -> Any:
    if dataclasses.is_dataclass(expected):
        return record(value, expected, path, error)  # type: ignore[arg-type]
    origin = get_origin(expected)
    if origin is Literal:
        if value not in get_args(expected) or not isinstance(value, str):
            raise error(f"{path}={value!r} is not allowed; use one of {', '.join(get_args(expected))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{path}={value!r} is {_kind(value)}; expected a list")
        element = get_args(expected)[0]
        return tuple(_value(v, element, f"{path}[{i}]", error) for i, v in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise error(f"{path}={value!r} is {_kind(value)}; expected an object")
        for key in value:
            if not isinstance(key, str):
                raise error(f"{path}: the key {key!r} is {_kind(key)}; expected a string")
        element = get_args(expected)[1]
        return {key: _value(v, element, f"{path}.{key}", error) for key, v in value.items()}
    if origin in (Union, types.UnionType):  # `X | None`
        options = [option for option in get_args(expected) if option is not types.NoneType]
        return None if value is None else _value(value, options[0], path, error)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise error(f"{path} is an integer beyond 2**63; give a smaller one")
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{path}={value!r} is not a finite number")
    # bool is an int to Python, but `true` is no count to a reader
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise error(f"{path}={value!r} is {_kind(value)}; expected {_NAMES[expected]}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", types.NoneType: "null", **_NAMES, float: "a number with a fraction"}
    return kinds.get(type(value), f"a {type(value).__name__}")
