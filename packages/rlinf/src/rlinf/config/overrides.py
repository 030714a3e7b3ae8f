"""Overrides on the command line: `--actor.learning_rate 1e-4`, `--run.num_steps=50`, `--sft_warm_up null`."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from rlinf.config.annotations import annotation_at, is_list, is_list_of_text, is_text, leaves
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
    """As it stands on the command line; `value` reads it."""

    @property
    def flag(self) -> str:
        return "--" + ".".join(self.key)

    def value(self, annotation: Any) -> Any:
        """The text as a value of the key's type. Text and paths are taken as they stand, but for quotes around all of
        it; everything else is YAML.

        Args:
            annotation: of the key; None where it is not known.

        Raises: UserError for text that is not YAML where it has to be.
        """
        members = set(leaves(annotation))
        written_as_text = [member for member in members if is_text(member) or is_list_of_text(member)]
        if not written_as_text:
            return self._yaml()
        if self.text == "null" and NoneType in members:
            return None
        if not self.text and str not in members:  # an unset variable of the shell is no path
            return None
        is_flow_list = self.text.lstrip().startswith("[") and any(map(is_list, members))
        if is_flow_list and len(written_as_text) + (NoneType in members) == len(members):
            return self._yaml()
        return self._text(members)

    def _text(self, members: set[Any]) -> Any:
        """The text as it stands, or what is in it where YAML's quotes are around all of it.

        Args:
            members: what the key takes; a number, a truth value, null or a list that is among it is no text.
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
    """Tells overrides from the options of a command, wherever they stand. Left to itself, argparse may take an
    override's value for the recipe.

    Args:
        arguments: a command line.
        options: the command's own, `--output` for example.
    Returns:
        What the command itself knows or has to complain about; the overrides with their values.
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
    """`--ouput x` looks like an override; a word that is no key and nearly an option is meant as one.

    Args:
        arguments: overrides as on the command line.
        options: the command's own.
        keys: the keys at the config's root.
    Raises: UserError.
    """
    for flag in (argument.partition("=")[0] for argument in arguments):
        close = difflib.get_close_matches(flag, options, n=1, cutoff=0.75)
        if close and flag.removeprefix("--") not in keys:
            raise UserError(f"unknown option {flag}; did you mean {close[0]}?", hint=f"see {command} --help")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """The overrides among the arguments that the command itself does not know.

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
    """The tree with every override in it, in their order; those that choose a kind (`--task.kind`) first, because what
    belonged to another kind is dropped.

    Args:
        model: the section that the tree is to be, or a union of them; its types decide how texts are read.

    Raises: UserError, see `Override.value`; and where a key is set under its old and its new name.
    """
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
                section[parent] = {}  # null or a plain value gives way; the schema judges the result
                forget(places, override.key[:depth])
                places[override.key[:depth]] = override.flag
            section = section[parent]
        forget(places, override.key)
        section[name] = value
        places[override.key] = override.flag
    return Tree(values=values, places=places, notes=(*tree.notes, *notes))
