"""Replaces the names on the Hugging Face Hub in a config by what was downloaded, before anything else is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlinf.config.base import Section
from rlinf.config.embodied import PolicyConfig
from rlinf.hub import HubName, fetch_dataset, fetch_model, hub_name, public_name
from rlinf_workers.policies import FOLDER_OPTIONS

S = TypeVar("S", bound=Section)


def with_downloads(config: S) -> S:
    """Downloads what the cache lacks, and returns the config with the folder of its snapshot for a model, and a name
    with a commit as its revision for a data set.

    Raises: UserError for a name that does not exist or may not be read, and where the Hub cannot be reached.
    """
    return _local(config, "")


def snapshot_folders(config: Section) -> tuple[Path, ...]:
    """The folders of what was downloaded that a config states, each once."""
    texts = dict.fromkeys(_texts(config.model_dump(mode="json")))
    return tuple(Path(text) for text in texts if "/snapshots/" in text and public_name(Path(text)))


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _texts(value)


def _local(section: S, at: str) -> S:
    if isinstance(section, PolicyConfig):
        values: dict[str, Any] = {"options": _local_options(section.options, f"{at}options.")}
    else:
        values = {
            name: _replaced(getattr(section, name), section.HUB_USE, f"{at}{name}")
            for name in type(section).model_fields
        }
    changed = {name: value for name, value in values.items() if value is not getattr(section, name)}
    return section.model_copy(update=changed) if changed else section


def _replaced(value: Any, use: str, key: str) -> Any:
    """The value with what was downloaded in place of names; the same object where it has none."""
    if isinstance(value, Section):
        return _local(value, f"{key}.")
    if isinstance(value, Path):
        name = hub_name(value)
        return value if name is None else _downloaded(name, use, key)
    if isinstance(value, tuple) and any(isinstance(one, Path | Section) for one in value):
        entries = tuple(_replaced(one, use, key) for one in value)
        return value if all(new is old for new, old in zip(entries, value, strict=True)) else entries
    if isinstance(value, dict) and any(isinstance(one, Path | Section) for one in value.values()):
        members = {name: _replaced(one, use, f"{key}.{name}") for name, one in value.items()}
        return value if all(members[name] is value[name] for name in value) else members
    return value


def _local_options(options: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """The options of a robot's policy, whose weights are in the folders of some options."""
    chosen = {name: options[name] for name in FOLDER_OPTIONS if isinstance(options.get(name), str)}
    names = {option: name for option, folder in chosen.items() if (name := hub_name(Path(folder))) is not None}
    fetched = {option: str(fetch_model(name, f"{at}{option}", is_text=False)) for option, name in names.items()}
    return {**options, **fetched} if fetched else options


def _downloaded(name: HubName, use: str, key: str) -> Path:
    if use == "model":
        return fetch_model(name, key)
    folder = fetch_dataset(name, key, is_whole=use == "folder")
    return folder if use == "folder" else Path(str(replace(name, revision=folder.name)))
