"""Config of the log writers: which ones a run has, and their options.

    run: {loggers: [tensorboard, mlflow]}                      names: these and no others
    run: {loggers: [tensorboard, {wandb: {project: mine}}]}    the same, with options
    run: {loggers: {wandb: {project: mine}}}                   a section: wandb besides what there is
    run: {loggers: {tensorboard: null}}                        without it

A list becomes a section as it is read, so that overrides and recipes that extend others can change one writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_validator

from rlinf.config.base import Section
from rlinf.config.yaml_source import Key, Tree
from rlinf.log_writers.spec import LOG_WRITERS, LogWriterSpec

KEY = ("run", "loggers")
CUSTOM = "custom"
"""Key of the section with the options of custom writers."""


class LoggersConfig(Section):
    """What gets the metrics of the run beside its folder. One key for each shipped log writer, and `custom`."""

    custom: dict[str, dict[str, Any] | None] = Field(
        default={},
        description="package.module:Class of a custom log writer -> arguments of its constructor (docs/loggers.md).",
    )

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, values: Any) -> Any:
        values = as_sections(values)
        if not isinstance(values, dict) or not (paths := [name for name in values if ":" in str(name)]):
            return values
        custom = {**(values.get(CUSTOM) or {}), **{path: values[path] for path in paths}}
        return {**{name: value for name, value in values.items() if name not in paths}, CUSTOM: custom}

    @property
    def chosen(self) -> dict[str, Any]:
        """Name or import path of each log writer -> its options: its section, or a mapping for a custom one."""
        shipped = {name: getattr(self, name) for name in type(self).model_fields if name != CUSTOM}
        return {name: options for name, options in {**shipped, **self.custom}.items() if options is not None}


def _field(spec: LogWriterSpec) -> Any:
    assert spec.section is not None, f"{spec.name} ships and has a section"
    is_default = spec.name == LOG_WRITERS.default
    description = f"Write to {spec.title}; null: do not (docs/loggers.md)."
    return spec.section | None, Field(default=spec.section() if is_default else None, description=description)


if TYPE_CHECKING:
    Loggers = LoggersConfig
else:
    Loggers = create_model(
        "Loggers",
        __base__=LoggersConfig,
        __doc__=LoggersConfig.__doc__,
        **{spec.name: _field(spec) for spec in LOG_WRITERS.specs()},
    )
    """`LoggersConfig` with a key for each shipped log writer."""


def as_sections(value: Any) -> Any:
    """Returns a list of names and sections, a single name, or null as a section; anything else as it is.

    Example: [mlflow, {wandb: {project: a}}] gives {tensorboard: null, mlflow: {}, wandb: {project: a}}.
    """
    if value is None:
        value = []
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(_is_entry(entry) for entry in entries):
        return value
    sections = [{entry: {}} if isinstance(entry, str) else dict(entry) for entry in entries]
    listed = {name: {} if options is None else options for section in sections for name, options in section.items()}
    return {LOG_WRITERS.default: None, **listed}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry))


def with_sections(tree: Tree) -> Tree:
    """Returns the tree with `run.loggers` as a section, and the places of its values."""
    run = tree.values.get(KEY[0])
    if not isinstance(run, Mapping) or not isinstance(value := run.get(KEY[1]), list | str):
        return tree
    values = {**tree.values, KEY[0]: {**run, KEY[1]: as_sections(value)}}
    return replace(tree, values=values, places=dict(_places(tree.places, value)))


def _places(places: Mapping[Key, str], value: Any) -> Iterator[tuple[Key, str]]:
    """Moves the places of a list's entries to the keys of the section."""
    depth = len(KEY)
    for key, place in places.items():
        if key[:depth] != KEY or len(key) == depth or not isinstance(key[depth], int):
            yield key, place
        elif isinstance(entry := value[key[depth]], str):
            yield (*KEY, entry), place
        elif len(key) > depth + 1:
            yield (*KEY, *key[depth + 1 :]), place
