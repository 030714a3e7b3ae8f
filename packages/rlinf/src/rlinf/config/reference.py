"""Describes every key of a config: type, default and meaning, for the reference pages of the docs."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlinf_algos import preset

REQUIRED = "required"
"""The default of a key that has none."""
UNITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}
PLAIN = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number", "null": "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """One key of a config.

    Example: KeyEntry(key="rollout.temperature", type="number, more than 0", default="1.0", meaning="Sampling
        temperature in training.")
    """

    key: str
    """Dotted, from the root of the config. `<name>` stands for a name that the user chooses."""
    type: str
    """In words, with the range; a value of a fixed set is JSON."""
    default: str
    """As JSON, or `REQUIRED`; empty for a section that has defaults for all its keys."""
    meaning: str
    """Whole sentences; empty if the source has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionEntry:
    """The keys of one section, or of one kind of a section that has several.

    Example: SectionEntry(key="reward", kinds=("math",), meaning="1 if ...", keys=(...))
    """

    key: str
    """Dotted; empty for the root."""
    kinds: tuple[str, ...] = ()
    """The values of `kind`, or of `algorithm.name`, that have these keys; empty if all others have them."""
    meaning: str
    keys: tuple[KeyEntry, ...]


def sections(model: type[BaseModel]) -> list[SectionEntry]:
    """Returns all sections of a config model, the root first, each before those below it.

    A model that occurs at two keys is listed at the first one; the second key's type names it.
    """
    schema = model.model_json_schema()
    return list(_sections(schema, schema.get("$defs", {}), "", {}))


def option_entries(options: type, key: str) -> list[KeyEntry]:
    """Returns the options of a plug-in.

    Args:
        options: `Spec.options`, a dataclass whose fields have docstrings.
        key: of the section, for example `actor.backend_options`.
    """
    (node,) = ast.parse(inspect.cleandoc(inspect.getsource(options))).body
    assert isinstance(node, ast.ClassDef), options
    entries = []
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        text = following.value if isinstance(following, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
        entries.append(
            KeyEntry(
                key=f"{key}.{field.target.id}",
                type=_python_type(field.annotation),
                default=REQUIRED if field.value is None else _python_default(field.value),
                meaning=_one_line(meaning),
            )
        )
    return entries


def values_by_preset(presets: Iterable[str], samples: str) -> dict[str, dict[str, list[str]]]:
    """Returns field of `algorithm` -> its default as JSON -> the presets (`algorithm.name`) with this default.

    Args:
        samples: `completions` or `episodes`.
    """
    algorithms = {name: preset(name, samples=samples) for name in presets}
    result: dict[str, dict[str, list[str]]] = {}
    for name, algorithm in algorithms.items():
        for field in type(algorithm).__dataclass_fields__:
            result.setdefault(field, {}).setdefault(json.dumps(getattr(algorithm, field)), []).append(name)
    return result


def _sections(
    node: Mapping[str, Any], models: Mapping[str, Any], key: str, places: dict[str, str]
) -> Iterator[SectionEntry]:
    """Yields the section `node` and those below. `places` collects model -> the key at which it is listed."""
    keys, below = [], []
    required = node.get("required", ())
    for name, value in node["properties"].items():
        here = f"{key}.{name}" if key else name
        if "const" in value and "description" not in value:
            continue  # the key that selects this kind of a section
        nested = [(place, ref) for place, ref in _references(value, here) if ref not in places]
        keys.append(
            KeyEntry(
                key=here,
                type=_type(value, places),
                default=_default(value, name in required),
                meaning=_one_line(value.get("description") or _meaning_of_model(value, models)),
            )
        )
        places |= {ref: place for place, ref in nested}
        below += nested
    yield SectionEntry(
        key=key,
        kinds=_kinds(node),
        meaning=_one_line(node.get("description", "").partition("\n\n")[0]),
        keys=tuple(keys),
    )
    for place, ref in below:
        yield from _sections(models[ref], models, place, places)


def _kinds(node: Mapping[str, Any]) -> tuple[str, ...]:
    properties = node["properties"]
    kind = properties.get("kind") or properties.get("name", {})
    return tuple(kind.get("enum", [kind["const"]] if "const" in kind else []))


def _references(value: Mapping[str, Any], key: str) -> Iterator[tuple[str, str]]:
    """Yields (key, model) of the sections that a value may be or contain."""
    if "$ref" in value:
        yield key, value["$ref"].rpartition("/")[2]
    for member in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _references(member, key)
    for entry in _values_of_mapping(value):
        yield from _references(entry, f"{key}.<name>")


def _values_of_mapping(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    additional = value.get("additionalProperties")
    return [*([additional] if isinstance(additional, dict) else []), *value.get("patternProperties", {}).values()]


def _meaning_of_model(value: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    meanings = [models[ref].get("description", "") for _, ref in _references(value, "")]
    return meanings[0].partition("\n\n")[0] if len(meanings) == 1 else ""


def _type(value: Mapping[str, Any], places: Mapping[str, str]) -> str:
    members = value.get("anyOf") or value.get("oneOf")
    if members:
        types = list(dict.fromkeys(_type(member, places) for member in members))
        return (", or " if any("," in one for one in types) else " or ").join(types)
    if "$ref" in value:
        place = places.get(value["$ref"].rpartition("/")[2])
        return f"section, as {place}" if place else "section"
    if "enum" in value or "const" in value:
        return " or ".join(json.dumps(choice) for choice in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return _list_type(value, places)
    if value.get("type") == "object":
        entries = " or ".join(_type(entry, places) for entry in _values_of_mapping(value))
        return f"mapping of names to {entries or 'values'}"
    if value.get("format") == "path":
        return "path"
    limits = [text.format(value[limit]) for limit, text in UNITS.items() if limit in value]
    return ", ".join([PLAIN.get(value.get("type", ""), "value"), *limits])


def _list_type(value: Mapping[str, Any], places: Mapping[str, str]) -> str:
    fixed = value.get("prefixItems")
    if fixed:
        return f"list of {len(fixed)}: {'; '.join(_type(entry, places) for entry in fixed)}"
    return f"list of {_type(value.get('items', {}), places)}"


def _default(value: Mapping[str, Any], is_required: bool) -> str:
    if is_required:
        return REQUIRED
    if isinstance(value.get("default"), dict) and value["default"]:
        return ""
    return json.dumps(value.get("default"))


def _python_type(annotation: ast.expr) -> str:
    text = ast.unparse(annotation)
    if text.startswith("Literal[") and isinstance(annotation, ast.Subscript):
        choices = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return " or ".join(json.dumps(ast.literal_eval(choice)) for choice in choices)
    words = {"str": "text", "bool": "true or false", "int": "integer", "float": "number", "None": "null"}
    return " or ".join(words.get(part, part) for part in text.split(" | "))


def _python_default(value: ast.expr) -> str:
    try:
        return json.dumps(ast.literal_eval(value))
    except ValueError:
        return ast.unparse(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
