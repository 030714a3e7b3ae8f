"""The JSON schema of problem files, made from the records themselves, so that the two cannot differ."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlinf_sched.problem import FORMAT_VERSION, Problem
from rlinf_sched.problem_shorthand import SIZE_PATTERN, CpuSlots, EqualNodes

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def problem_json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a problem file, shorthands included; descriptions are those of the records."""
    definitions: dict[str, Any] = {}
    schema = _record(Problem, definitions)
    schema["properties"] = {"format": {"const": FORMAT_VERSION}, **schema["properties"]}
    schema["required"] = ["format", *schema["required"]]
    shorthands = [_reference(record, definitions) for record in (EqualNodes, CpuSlots)]
    schema["properties"]["cluster"] = {"anyOf": [schema["properties"]["cluster"], *shorthands]}
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}], "minItems": 2, "maxItems": 2}
    points = definitions["InstanceProfile"]["properties"]["points"]
    points["items"] = {"anyOf": [points["items"], pair]}
    return {"$schema": DIALECT, "title": "rlinf-sched problem", **schema, "$defs": dict(sorted(definitions.items()))}


def _record(record: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, texts = get_type_hints(record), _field_texts(record)
    properties, required = {}, []
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = _value(hints[field.name], definitions)
        if field.name.endswith(("_bytes", "_bytes_per_s")):
            value = _or_size(value)
        if field.name in texts:
            value = {**value, "description": texts[field.name]}
        if field.default is not dataclasses.MISSING and not isinstance(field.default, tuple):
            value = {**value, "default": field.default}
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        properties[field.name] = value
    text = inspect.cleandoc(record.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(expected: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(expected), get_args(expected)
    if dataclasses.is_dataclass(expected):
        return _reference(expected, definitions)  # type: ignore[arg-type]
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _value(arguments[0], definitions)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _value(arguments[1], definitions)}
    if origin in (Union, types.UnionType):
        return {
            "anyOf": [{"type": "null"} if a is types.NoneType else _value(a, definitions) for a in arguments],
        }
    return {"type": _TYPES[expected]}


def _reference(record: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if record.__name__ not in definitions:
        definitions[record.__name__] = {}
        definitions[record.__name__] = _record(record, definitions)
    return {"$ref": f"#/$defs/{record.__name__}"}


def _or_size(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") == "object":  # item_bytes: sizes by channel
        return {**value, "additionalProperties": _or_size(value["additionalProperties"])}
    return {"anyOf": [value, {"type": "string", "pattern": SIZE_PATTERN}]}


def _field_texts(record: type) -> dict[str, str]:
    """Field -> the string that stands below it in the class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0].body  # type: ignore[attr-defined]
    return {
        line.target.id: inspect.cleandoc(below.value.value).replace("\n", " ")
        for line, below in itertools.pairwise(body)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
