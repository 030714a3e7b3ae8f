"""Keys of recipes that were renamed; the old name is accepted for one more version.

Recipes, configs in run folders and overrides are renamed as they are read; no other module handles old names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf.config.loggers import as_sections
from rlinf.config.yaml_source import Key, Tree
from rlinf.errors import UserError

if TYPE_CHECKING:
    from rlinf.config.overrides import Override

RENAMED = {
    "cluster.weight_link": "cluster.weight_sync",
    "cluster.weight_link_options": "cluster.weight_sync_options",
    "rollout.sglang": "rollout.engine_options",
    "sglang": "engine_options",
    "warm_start": "sft_warm_up",
    "environments": "venvs",
    "task.prompt_field": "task.columns.prompt",
    "task.answer_field": "task.columns.answer",
    "run.wandb": "run.loggers.wandb",
    "benchmarks.*.question_field": "benchmarks.*.columns.prompt",
    "benchmarks.*.answer_field": "benchmarks.*.columns.answer",
    "benchmarks.*.template": "benchmarks.*.prompt_template",
}
"""Old dotted key -> new key; the key of a section renames all keys below it. `*` stands for any name."""
ABSENT = object()


def renamed_tree(tree: Tree) -> Tree:
    """Returns the tree with new names, and a note for each old one.

    Raises: UserError if both names of a key are set.
    """
    for key, target in _keys_in(tree.values):
        if (value := _value(tree.values, key)) is ABSENT:
            continue
        old, new = ".".join(key), ".".join(target)
        place, others = tree.places.get(key), _without(tree.values, key)
        if value == {} or (value is None and key[0] == "benchmarks"):  # a resolved config has all keys
            tree = replace(tree, values=others)
            continue
        name = f"{place}: {old}" if place else old
        if _value(tree.values, target) not in (ABSENT, {}):
            raise _both(name, new)
        tree = Tree(
            values=_put(others, target, value),
            places={_moved(written, key, target): at for written, at in tree.places.items()},
            notes=(*tree.notes, _note(name, new)),
        )
    return tree


def renamed_overrides(overrides: Sequence[Override]) -> tuple[list[Override], tuple[str, ...]]:
    """Returns the overrides with new names, and a note for each old one.

    Raises: UserError if a key is overridden under both names.
    """
    result: list[Override] = []
    notes: list[str] = []
    written = {override.key for override in overrides}
    for override in overrides:
        key: Key = override.key
        for old, new in RENAMED.items():
            key = _moved(key, _named(old, key), _named(new, key))
        if key != override.key:
            new_name = "--" + ".".join(map(str, key))
            if key in written:
                raise _both(override.flag, new_name)
            notes.append(_note(override.flag, new_name))
        result.append(replace(override, key=tuple(map(str, key))))
    return result, tuple(dict.fromkeys(notes))


def _keys_in(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields (old key, new key), with each name of the section in place of `*`."""
    for old, new in RENAMED.items():
        section, star, _ = old.partition(".*.")
        names = values.get(section) if star else None
        for name in (names if isinstance(names, Mapping) else ()) if star else ("",):
            yield _named(old, (section, name)), _named(new, (section, name))


def _named(dotted: str, key: Key) -> tuple[str, ...]:
    """Splits a dotted key; `*`, its second part, becomes the second part of `key`."""
    first, *rest = dotted.split(".")
    return (first, *(str(key[1]) if part == "*" and len(key) > 1 else part for part in rest))


def _note(old: str, new: str) -> str:
    return f"{old} is now called {new}; the old name is accepted in this version alone"


def _both(old: str, new: str) -> UserError:
    return UserError(f"{old} is the old name of {new}, and both are set", hint=f"keep {new}")


def _moved(key: Key, old: Key, new: Key) -> Key:
    return (*new, *key[len(old) :]) if key[: len(old)] == old else key


def _value(values: Any, key: Key) -> Any:
    """Returns the value at a key, or `ABSENT`."""
    for part in key:
        if not isinstance(values, Mapping) or part not in values:
            return ABSENT
        values = values[part]
    return values


def _without(values: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """Returns a copy without the key and without sections that become empty."""
    first, *rest = key
    copy = dict(values)
    below = _without(copy[str(first)], tuple(rest)) if rest else {}
    if below:
        copy[str(first)] = below
    else:
        del copy[str(first)]
    return copy


def _put(values: Mapping[str, Any], key: Key, value: Any) -> dict[str, Any]:
    """Returns a copy with the value set at the key."""
    first, *rest = key
    below = values.get(str(first))
    if isinstance(below, list):
        below = as_sections(below)  # run.loggers
    copy = dict(values)
    copy[str(first)] = _put(below if isinstance(below, Mapping) else {}, tuple(rest), value) if rest else value
    return copy
