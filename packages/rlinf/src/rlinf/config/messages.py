"""Error messages for configs, which name the place, the value and the allowed values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rlinf.config.annotations import annotation_at, fields_at, literals_of
from rlinf.config.base import CROSS_CHECK, Conflict
from rlinf.config.foreign_names import FOREIGN
from rlinf.config.yaml_source import Key, Tree, describe

_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "none_required": "null",
    "tuple_type": "a list, [a, b]",
    "list_type": "a list, [a, b]",
    "dict_type": "a section with keys",
    "model_type": "a section with keys",
    "dataclass_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "too_short": "a list with at least {min_length} entries",
    "too_long": "a list with at most {max_length} entries",
    "string_too_short": "text of at least {min_length} characters",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', a letter or digit first",  # of `name` alone
}
"""Type of a pydantic error -> the values that are allowed."""


def explain(error: ValidationError, tree: Tree, model: Any) -> list[str]:
    """Returns one message per wrong key of a tree; `model` is the expected section, or a union of sections."""
    by_key: dict[Key, list[Any]] = {}
    messages: list[str] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == CROSS_CHECK:
            messages += [_conflict(conflict, tree) for conflict in detail.get("ctx", {})["conflicts"]]
        else:
            by_key.setdefault(key_of(detail["loc"], tree.values, detail["type"]), []).append(detail)
    return [_single(key, details, tree, model) for key, details in by_key.items()] + messages


def _missing(key: Key, tree: Tree) -> str:
    """Returns the message for a key without a value."""
    return f"{_located(key, tree)} is not set; give --{dotted(key)} VALUE, or write it in a recipe"


def dotted(key: Key) -> str:
    """Joins a key with dots: ("task", "train_files", 0) -> `task.train_files.0`."""
    return ".".join(map(str, key))


def _conflict(conflict: Conflict, tree: Tree) -> str:
    """Names the override if one is involved, because it is the newest value; else the first key that is set
    anywhere."""
    places = [place for key in conflict.keys if (place := _place(tuple(key.split(".")), tree)) is not None]
    overrides = [place for place in places if place.startswith("--")]
    place = next(iter(overrides or places), None)
    if place == f"--{conflict.keys[0]}":
        return f"--{conflict}"
    return f"{place}: {conflict}" if place else str(conflict)


def _single(key: Key, details: list[Any], tree: Tree, model: Any) -> str:
    kinds, first = {detail["type"] for detail in details}, details[0]
    if "missing" in kinds and isinstance(key[-1], int):
        value = describe(first["input"])
        return f"{_located(key[:-1], tree)}={value}; allowed: a list with at least {key[-1] + 1} entries"
    if kinds & {"extra_forbidden", "unexpected_keyword_argument"}:
        return _unknown_key(key, tree, model)
    if "union_tag_not_found" in kinds:
        name = first["ctx"]["discriminator"].strip("'")
        choices = ", ".join(map(repr, literals_of(annotation_at(model, key, tree.values) if key else model, name)))
        extend = "" if key else "; or let it begin with `extends: NAME` of a shipped recipe (rlinf config list)"
        return f"{_missing((*key, name), tree)}; allowed: {choices}{extend}"
    if "missing" in kinds or first["input"] is None:
        return _missing(key, tree)
    allowed = list(dict.fromkeys(_allowed(detail) for detail in details))
    if "union_tag_invalid" in kinds:
        where = (*key, first["ctx"]["discriminator"].strip("'"))
        return f"{_located(where, tree)}={describe(first['ctx']['tag'])}; allowed: {allowed[0]}"
    if kinds & {"dict_type", "model_type", "model_attributes_type", "dataclass_type"} and (
        names := list(fields_at(model, key, tree.values))
    ):
        allowed = [f"a section with the keys {', '.join(names)}"]
    is_text_to_yaml = "string_type" not in kinds or not isinstance(first["input"], bool | int | float | dict | list)
    advice = "" if is_text_to_yaml else "; put it in quotes"  # `no`, `on`, `1.5`, `{question}`, `[INST]`
    return f"{_located(key, tree)}={describe(first['input'])}; allowed: {' or '.join(allowed)}{advice}"


def _allowed(detail: Mapping[str, Any]) -> str:
    form = _ALLOWED.get(detail["type"])
    if form is None:
        return detail["msg"]
    return form.format(
        **{name: f"{value:g}" if isinstance(value, float) else value for name, value in detail.get("ctx", {}).items()}
    )


def _unknown_key(key: Key, tree: Tree, model: Any) -> str:
    *parents, name = key
    name = str(name).replace("-", "_")
    siblings = {dotted((*parents, field)): field for field in fields_at(model, tuple(parents), tree.values)}
    guesses = [dotted(candidate) for candidate in all_keys(model, (), tree.values) if candidate[-1] == name]
    if not guesses:  # otherwise it was the right name in the wrong section
        guesses = [dotted((*parents, field)) for field in siblings.values() if _initials(field) == name]
    if not guesses:
        guesses = list(_foreign(key, tree, model))
    if not guesses:
        close = difflib.get_close_matches(str(name), list(siblings.values()), n=1, cutoff=0.6)
        guesses = [dotted((*parents, match)) for match in close]
    flag = _flag_prefix(key, tree)
    if guesses:
        advice = f"did you mean {' or '.join(flag + guess for guess in guesses)}?"
    else:
        section = dotted(tuple(parents)) or "a recipe"
        advice = f"keys of {section}: {', '.join(siblings.values()) or 'none'}"
    return f"{_located(key, tree)} is not a key; {advice}"


def _foreign(key: Key, tree: Tree, model: Any) -> Iterator[str]:
    """Yields our keys for another framework's name; of verl's dotted names, the last part decides."""
    written = [place for place in tree.places if place[: len(key)] == key] or [key]
    for name in dict.fromkeys(str(place[-1]).replace("-", "_") for place in written):
        ours = FOREIGN.get(name)
        if ours is not None and annotation_at(model, tuple(ours.split(".")), tree.values) is not None:
            yield ours


def _initials(name: str) -> str:
    """Returns the initials of a name: learning_rate -> lr."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def key_of(location: tuple[str | int, ...], values: Any, error_type: str) -> Key:
    """Converts pydantic's location, which includes the union members that were tried, to a key of the tree."""
    key: list[str | int] = []
    node: Any = values
    for i, part in enumerate(location):
        if _has(node, part):
            node = node[part]
        elif error_type != "missing" or i != len(location) - 1:
            continue
        key.append(part)
    return tuple(key)


def _has(node: Any, part: str | int) -> bool:
    return part in (node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ())


def _place(key: Key, tree: Tree) -> str | None:
    """Returns the place of the value, or of the nearest section around it."""
    for length in range(len(key), 0, -1):
        if key[:length] in tree.places:
            return tree.places[key[:length]]
    return None


def _located(key: Key, tree: Tree) -> str:
    """Returns place and key: `sort-grpo.yaml:14: rollout.temperature`, or `--rollout.temperature` for an override."""
    place = _place(key, tree)
    if place is None:
        return dotted(key)
    return f"{_flag_prefix(key, tree)}{dotted(key)}" if place.startswith("--") else f"{place}: {dotted(key)}"


def _flag_prefix(key: Key, tree: Tree) -> str:
    """Returns what precedes the key in its override's flag: `--`, or `--a.` with `Override.section`; "" without one."""
    for length in range(len(key), 0, -1):
        if (place := tree.places.get(key[:length])) is not None:
            text = dotted(key[:length])
            return "" if not place.startswith("--") else place.removesuffix(text) if place.endswith(text) else "--"
    return ""


def all_keys(model: Any, key: Key, values: Any) -> Iterator[Key]:
    """Yields the keys of a section and its subsections; for a union of sections, the keys of the kind in `values`."""
    for name in fields_at(model, key, values):
        yield (*key, name)
        if len(key) < 3:
            yield from all_keys(model, (*key, name), values)
