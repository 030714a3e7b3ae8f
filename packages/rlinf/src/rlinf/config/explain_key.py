"""Explains one config key: type, default, the recipes that set it, meaning, and the page about it.

A key may also be given without its section, under its old name, or under the name that TRL, verl or OpenRLHF use.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.evaluation import EvalConfig
from rlinf.config.foreign_names import FOREIGN
from rlinf.config.overrides import Override
from rlinf.config.pages import page_of
from rlinf.config.playing import TrainedConfig
from rlinf.config.reference import KeyEntry, SectionEntry, option_entries, sections, values_by_preset
from rlinf.config.renamed import renamed_overrides
from rlinf.config.schema import SHIPPED
from rlinf.config.suites import SuiteConfig
from rlinf.errors import UserError
from rlinf_algos import DAGGER, EPISODE_PRESETS, FIELDS_OF_SAMPLES, PRESETS, DaggerAlgorithm, off_policy_preset
from rlinf_workers.plugins import ENGINES, TRAINERS

MAX_GUESSES = 5
BY_SAMPLES = {"completions": PRESETS, "episodes": EPISODE_PRESETS}
_WHERE = {EvalConfig: "rlinf eval", TrainedConfig: "rlinf play", SuiteConfig: "suites (suite.KEY of rlinf eval)"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyExplanation:
    """One key as one or several configs have it."""

    entry: KeyEntry
    places: tuple[str, ...]
    """What has it: `recipes with job: reasoning`, `rlinf eval`."""
    kinds: tuple[str, ...]
    """The kinds of its section that have it; empty if there is one."""
    by_preset: tuple[tuple[str, tuple[str, ...]], ...]
    """Default as JSON, and the values of `algorithm.name` with it; empty if it does not depend on them."""
    by_recipe: tuple[tuple[str, tuple[str, ...]], ...]
    """Value as JSON, and the shipped recipes that set it."""
    members: tuple[KeyEntry, ...]
    """Of a section, its keys."""
    page: str
    """Below docs/."""
    other_names: tuple[str, ...]
    """Names of the key in TRL, verl or OpenRLHF."""


def explain_key(text: str) -> tuple[list[str], list[KeyExplanation]]:
    """Returns notes about the name, and the explanations of a key: one for each form that it has.

    Args:
        text: a dotted key, also as an option: `--algorithm.clip_high=0.3`.

    Raises: UserError for a name that is no key, with the closest ones.
    """
    name = text.strip().lstrip("-+").partition("=")[0].strip()
    (override,), notes = renamed_overrides([Override(key=tuple(name.split(".")), text="")])
    key, notes = ".".join(override.key), list(notes)
    all_sections = _all_sections()
    keys = list(dict.fromkeys(entry.key for _, section in all_sections for entry in section.keys))
    key = _there(key, all_sections)
    if key not in keys:
        key, note = _resolved(key, keys)
        notes.append(note)
    return notes, _explanations(key, all_sections)


@cache
def _all_sections() -> list[tuple[str, SectionEntry]]:
    """Returns (config, section) of all configs, with the options of shipped engines and backends."""
    result = [(f"recipes with job: {_job_of(model)}", section) for model in SHIPPED for section in sections(model)]
    result += [(where, section) for model, where in _WHERE.items() for section in sections(model)]
    for plugins, key in ((ENGINES, "rollout.engine_options"), (TRAINERS, "actor.backend_options")):
        for spec in plugins.specs():
            if spec.options is not None:
                entries = tuple(option_entries(spec.options, key))
                section = SectionEntry(key=key, kinds=(spec.name,), meaning="", keys=entries)
                result.append((f"{key.partition('.')[2].partition('_')[0]} {spec.name}", section))
    return result


def _job_of(model: Any) -> str:
    return model.model_fields["job"].annotation.__args__[0]


def _there(key: str, all_sections: Sequence[tuple[str, SectionEntry]]) -> str:
    """Replaces chosen names by `<name>`, and a section that is described at another key by that key."""
    entries = {entry.key: entry for _, section in all_sections for entry in section.keys}
    for pattern in entries:
        if "<name>" in pattern and re.fullmatch(re.escape(pattern).replace("<name>", r"[^.]+"), key):
            return pattern
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        above = entries.get(".".join(parts[:length]))
        same = above and re.search(r"section, as ([\w.<>]+)", above.type)
        if same:
            return ".".join([same[1], *parts[length:]])
    return key


def _resolved(name: str, keys: Sequence[str]) -> tuple[str, str]:
    """Returns the key that a name stands for, and a note. Raises: UserError if none or several could be meant."""
    last = name.rpartition(".")[2].replace("-", "_")
    if (ours := FOREIGN.get(last)) is not None and ours in keys and not _ends(keys, last):
        return ours, f"{name} of TRL, verl or OpenRLHF is {ours} here"
    named_alike = _ends(keys, last)
    if len(named_alike) == 1:
        return named_alike[0], f"{name}: the whole key is {named_alike[0]}"
    if not named_alike:
        by_last = FOREIGN | {key.rpartition(".")[2]: key for key in reversed(keys)}
        close = [
            *difflib.get_close_matches(name, keys, n=MAX_GUESSES, cutoff=0.75),
            *(by_last[match] for match in difflib.get_close_matches(last, list(by_last), n=MAX_GUESSES, cutoff=0.7)),
        ]
        named_alike = list(dict.fromkeys(close))
    guesses = " or ".join(named_alike[:MAX_GUESSES])
    raise UserError(
        f"{name!r} is not a key" + (f"; did you mean {guesses}?" if guesses else ""),
        hint="rlinf config show RECIPE prints all keys of a recipe",
    )


def _ends(keys: Sequence[str], last: str) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == last]


def _explanations(key: str, all_sections: Sequence[tuple[str, SectionEntry]]) -> list[KeyExplanation]:
    forms: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for where, section in all_sections:
        for entry in section.keys:
            if entry.key == key and not _is_of_others(key, where):
                form = (entry.type, entry.default, entry.meaning, section.kinds)
                places = forms.setdefault(form, [])
                places += [where] if where not in places else []
    members = {entry for _, section in all_sections if section.key == key for entry in section.keys}
    return [
        KeyExplanation(
            entry=KeyEntry(key=key, type=type_text, default=default, meaning=meaning),
            places=tuple(places),
            kinds=kinds,
            by_preset=tuple(_by_preset(key, places, kinds)),
            by_recipe=tuple(_by_recipe(key)),
            members=tuple(sorted(members, key=lambda entry: entry.key)),
            page="evaluation.md" if places == [_WHERE[EvalConfig]] else page_of(key),
            other_names=tuple(foreign for foreign, ours in FOREIGN.items() if ours == key),
        )
        for (type_text, default, meaning, kinds), places in forms.items()
    ]


def _is_of_others(key: str, where: str) -> bool:
    """Whether a field of `algorithm` is for the samples of another job."""
    samples = {"recipes with job: reasoning": "completions", "recipes with job: embodied": "episodes"}.get(where)
    section, _, field = key.partition(".")
    if section != "algorithm" or samples is None:
        return False
    return any(field in names for kind, names in FIELDS_OF_SAMPLES.items() if kind != samples)


def _by_preset(key: str, places: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the defaults that the presets of `algorithm.name` give a key, the commonest first.

    Args:
        kinds: the names of other records (off-policy, dagger), for a key of theirs.
    """
    section, _, field = key.partition(".")
    if section != "algorithm" or field == "name":
        return
    merged: dict[str, list[str]] = {}
    for name in kinds:
        record = DaggerAlgorithm() if name == DAGGER else off_policy_preset(name)
        merged.setdefault(json.dumps(getattr(record, field)), []).append(name)
    for samples, presets in BY_SAMPLES.items() if not kinds else ():
        is_there = any((samples == "completions") == place.endswith("reasoning") for place in places)
        for value, names in values_by_preset(presets, samples).get(field, {}).items() if is_there else ():
            merged[value] = list(dict.fromkeys([*merged.get(value, []), *names]))
    yield from sorted(((value, tuple(names)) for value, names in merged.items()), key=lambda one: -len(one[1]))


@cache
def _recipes() -> dict[str, Any]:
    return {name: read_recipe(name).values for name in shipped_recipes()}


def _by_recipe(key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the values that the shipped recipes give a key, with those that they inherit."""
    by_value: dict[str, list[str]] = {}
    for recipe, value in _recipes().items():
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            by_value.setdefault(json.dumps(value), []).append(recipe)
    yield from ((value, tuple(recipes)) for value, recipes in by_value.items())
