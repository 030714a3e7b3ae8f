"""Parses and applies command-line overrides: `--actor.learning_rate 1e-4`, `--run.num_steps=50`, `--sft_warm_up
null`."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from rlinf.config.annotations import annotation_at, is_list, is_list_of_text, is_text, leaves
from rlinf.config.loggers import KEY as LOGGERS, as_sections, with_sections
from rlinf.config.renamed import renamed_overrides
from rlinf.config.yaml_source import KINDS, Tree, describe, forget, is_unicode, parse_value, start_afresh
from rlinf.errors import UserError

_NAME = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One value given on the command line."""

    key: tuple[str, ...]
    """("actor", "learning_rate")"""
    text: str
    """The text on the command line, unparsed; `value` parses it."""
    section: str = ""
    """The section that `key` is below, on the command line; "" for a key of the root."""

    @property
    def flag(self) -> str:
        return "--" + ".".join([self.section, *self.key] if self.section else self.key)

    def value(self, annotation: Any) -> Any:
        """Parses the text as a value of the key's type. For text and paths only surrounding quotes are removed;
        everything else is YAML.

        Args:
            annotation: the key's type; None if unknown.

        Raises: UserError if YAML is expected and the text is not YAML.
        """
        members = set(leaves(annotation))
        written_as_text = [member for member in members if is_text(member) or is_list_of_text(member)]
        if not written_as_text:
            return self._yaml()
        if self.text == "null" and NoneType in members:
            return None
        if not self.text and str not in members:  # an unset env var is not a path
            return None
        is_flow_list = self.text.lstrip().startswith("[") and any(map(is_list, members))
        if is_flow_list and len(written_as_text) + (NoneType in members) == len(members):
            return self._yaml()
        return self._text(members)

    def _text(self, members: set[Any]) -> Any:
        """Returns the text unchanged, or without YAML quotes if they surround all of it.

        Args:
            members: the types of the key; numbers, booleans, null and lists among them are not text.
        """
        try:
            value = parse_value(self.text)
        except ValueError:
            return self.text
        if isinstance(value, str):
            return value if self.text.startswith(("'", '"')) else self.text
        if isinstance(value, list):
            return value if any(map(is_list, members)) else self.text
        is_number = type(value) is int and float in members
        return value if type(value) in members or is_number else self.text

    def _yaml(self) -> Any:
        try:
            return parse_value(self.text)
        except ValueError as error:
            raise UserError(
                f"{self.flag}={describe(self.text)}: not a YAML value: {error}",
                hint="put quotes around text with special characters",
            ) from error


def split_overrides(arguments: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Separates overrides from a command's options, in any order. argparse alone may take an override's value for the
    recipe.

    Args:
        arguments: a command line.
        options: the command's options, for example `--output`.
    Returns:
        The arguments for the command's own parser; the overrides with their values.
    """
    own_arguments: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if not name.startswith("--") or name == "--" or name in options:
            own_arguments.append(argument)
            continue
        overrides.append(argument)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own_arguments, overrides


def refuse_misspelt_options(
    arguments: Sequence[str], options: Sequence[str], keys: Collection[str], command: str
) -> None:
    """Rejects misspelt options: `--ouput x` looks like an override, but it is not a key and close to an option.

    Args:
        arguments: overrides as on the command line.
        options: the command's options.
        keys: the keys at the config's root.
    Raises: UserError.
    """
    for flag in (argument.partition("=")[0] for argument in arguments):
        close = difflib.get_close_matches(flag, options, n=1, cutoff=0.75)
        if close and flag.removeprefix("--") not in keys:
            raise UserError(f"unknown option {flag}; did you mean {close[0]}?", hint=f"see {command} --help")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parses the overrides among the arguments that are not options of the command.

    Raises: UserError for a stray word and for a flag without a value.
    """
    overrides, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        match = _NAME.fullmatch(argument)
        if match is None:
            raise UserError(
                f"{argument!r} is neither an option nor an override",
                hint="an override is --key.name VALUE, for example --run.num_steps 50",
            )
        name, text = match.groups()
        if text is None:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{name} has no value", hint=f"write --{name} VALUE or --{name}=VALUE")
            text = rest.pop(0)
        if not is_unicode(text):
            raise UserError(f"--{name}={describe(text)} is not UTF-8 text")
        overrides.append(Override(key=tuple(name.split(".")), text=text))
    return overrides


def apply_overrides(tree: Tree, overrides: Sequence[Override], model: Any) -> Tree:
    """Returns the tree with all overrides applied in order, but those that choose a kind (`--task.kind`) first, because
    they drop values of the old kind.

    Args:
        model: the expected section, or a union of sections; its types decide how texts are parsed.

    Raises: UserError, see `Override.value`; and if a key is set under both its old and its new name.
    """
    tree = with_sections(tree)
    values, places = copy.deepcopy(tree.values), dict(tree.places)
    overrides, notes = renamed_overrides(overrides)
    for override in sorted(overrides, key=lambda override: override.key not in KINDS):
        *parents, name = override.key
        value = override.value(annotation_at(model, override.key, values))
        if len(override.key) == 2 and (kind := (override.key[0], override.key[1])) in KINDS:
            start_afresh(values, places, kind, {name: value})
        section = values
        for depth, parent in enumerate(parents, start=1):
            if not isinstance(section.get(parent), dict):
                section[parent] = {}  # null or a plain value is replaced; validation checks the result
                forget(places, override.key[:depth])
                places[override.key[:depth]] = override.flag
            section = section[parent]
        forget(places, override.key)
        section[name] = as_sections(value) if override.key == LOGGERS else value
        places[override.key] = override.flag
    return Tree(values=values, places=places, notes=(*tree.notes, *notes))
