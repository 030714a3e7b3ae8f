"""Shows a recipe with every key, even if it still lacks the user's model or data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from rlinf.config.base import CROSS_CHECK
from rlinf.config.catalog import read_recipe
from rlinf.config.load import config_type, validated
from rlinf.config.messages import dotted, key_of
from rlinf.config.overrides import Override, apply_overrides
from rlinf.config.yaml_source import Key, dump
from rlinf.errors import UserError


def show_recipe(recipe: str, overrides: Sequence[Override]) -> str:
    """Returns the resolved recipe as YAML. Keys that the user has to set stay null and are listed in the first line.

    Raises: UserError for every error other than a missing value.
    """
    tree = read_recipe(recipe)
    tree = apply_overrides(tree, overrides, config_type(tree.values, overrides))
    open_keys: list[Key] = []
    while True:
        try:
            values = validated(tree).model_dump(mode="json")
            break
        except UserError as error:
            gaps = {key: value for key, value in _gaps(error.__cause__, tree.values) if key not in open_keys}
            if not gaps:
                raise
            for key, value in gaps.items():
                open_keys.append(key)
                _put(tree.values, key, value)
    for key in open_keys:
        _put(values, key, None)
    notes = "".join(f"# note: {note}\n" for note in tree.notes)
    first_line = f"# to be given: {', '.join(map(dotted, open_keys))}\n" if open_keys else ""
    return first_line + notes + dump(values)


def _gaps(error: BaseException | None, values: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yields the keys whose value is missing, each with a placeholder."""
    if not isinstance(error, ValidationError):
        return
    for detail in error.errors(include_url=False):
        if detail["type"] == CROSS_CHECK:
            keys: list[Key] = [tuple(conflict.keys[0].split(".")) for conflict in detail.get("ctx", {})["conflicts"]]
        else:
            keys = [key_of(detail["loc"], values, detail["type"])]
        for key in keys:
            if _value(values, key) is None:
                yield key, ["YOURS"] if detail["type"] in ("tuple_type", "list_type") else "YOURS"


def _value(values: Any, key: Key) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _put(values: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        values = values.setdefault(str(part), {})
    values[str(key[-1])] = value
