"""YAML with the file and line of every value, so that an error can point at it.

Departs from PyYAML's defaults: `1e-6` is a number, as in YAML 1.2, and a duplicate key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import UserError

Key = tuple[str | int, ...]
"""Path to a value: ("rollout", "temperature"), ("task", "train_files", 0)."""

KINDS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("task", "kind"): (),
    ("algorithm", "name"): (),
    ("env", "kind"): (
        ("env", "options"),
        ("env", "ignore_terminations"),
        ("env", "eval_ignore_terminations"),
        ("algorithm", "bootstrap_at_termination"),
    ),
    ("policy", "name"): (),
}
"""(Section, the key that selects its kind) -> the keys whose meaning depends on the kind; () for all keys of the
section."""

MAX_DEPTH = 20
"""Deeper than any recipe; only self-referencing files reach it."""
MAX_VALUES = 20_000
"""More than any recipe has. A few lines of nested aliases can expand to billions of values."""
MAX_BYTES = 1 << 20
"""More than any recipe has."""
MAX_DIGITS = 100
"""More than any integer in a recipe has; Python needs quadratic time for long ones and refuses to print them."""


QUOTES_HINT = "text with ': ' in it, or with one of {[*&!%@` at its beginning, belongs in quotes"


class _Bound(yaml.MarkedYAMLError):
    """A limit of this module was exceeded, as opposed to a YAML syntax error."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers and limits on the size that aliases can expand to."""

    def __init__(self, text: str) -> None:
        self._depth = 0
        super().__init__(text)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise _Bound(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.peek_event().start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replaces `<<` by the mappings it refers to, innermost first."""
        num_values = len(node.value)
        for name, value in node.value:
            if name.tag != "tag:yaml.org,2002:merge":
                continue
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(merged, yaml.MappingNode):
                    self.flatten_mapping(merged)
                    num_values += len(merged.value)
                if num_values > MAX_VALUES:
                    raise _Bound(problem=_TOO_MANY, problem_mark=node.start_mark)
        super().flatten_mapping(node)


_TOO_MANY = f"unfolds to more than {MAX_VALUES:,} values; do its aliases (&, *) repeat one another?"


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > MAX_DIGITS or ":" in text:
        raise ValueError(f"{describe(text)} is no whole number of at most {MAX_DIGITS} digits")
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
"""Excludes YAML 1.1's 1:30, which meant 90, and 010, which meant 8."""
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


class _ValueLoader(_Loader):
    """Rejects comments: text after `#` in a command-line value belongs to the value, and YAML would drop it."""

    def __init__(self, text: str) -> None:
        self._text = text
        super().__init__(text)

    def scan_to_next_token(self) -> None:
        start = self.index
        super().scan_to_next_token()
        skipped = self._text[start : self.index]
        if "#" in skipped:
            raise yaml.YAMLError(f"{skipped.strip()!r} is a comment in YAML and would be dropped")


class _Dumper(yaml.SafeDumper):
    """Quotes all text that the loader would not read back as text, such as `1e6`."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML would read these back as blanks if they were not escaped.
    has_odd_break = any(character in text for character in "\x85\u2028\u2029\ufeff")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if has_odd_break else None)


_Dumper.add_representer(str, _text)
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d+)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(kw_only=True, slots=True)
class Tree:
    """Nested values with the place where each was set."""

    values: dict[str, Any]
    """The values that pydantic validates."""
    places: dict[Key, str] = field(default_factory=dict)
    """Key -> `file:line`, or `--a.b` for an override."""
    notes: tuple[str, ...] = ()
    """Notes for the user about how the config is written."""


def parse_file(text: str, filename: str) -> Tree:
    """Parses the text of a YAML file; `filename` names the file in messages.

    Raises: UserError with file and line.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        places: dict[Key, str] = {}
        values = {} if node is None else _value(loader, node, (), filename, places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{filename}:{mark.line + 1}" if mark else filename
        hint = None if isinstance(error, _Bound) else QUOTES_HINT
        raise UserError(f"{place}: not valid YAML: {error.problem or error.context}", hint=hint) from error
    except yaml.YAMLError as error:
        raise UserError(f"{filename}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise UserError(f"{filename}: its aliases refer to one another without an end") from error
    except UserError:
        raise  # a ValueError, too
    except ValueError as error:  # a date or number that YAML allows and Python does not
        raise UserError(f"{filename}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{filename}:1: a recipe is a mapping of keys to values, this is {describe(values)}")
    return Tree(values=values, places=places)


def read_file(file: Path, *, named_by: str = "", hint: str | None = None) -> Tree:
    """Reads and parses a YAML file; `named_by` and `hint` are prefix and hint of the error for an unreadable file.

    Raises: UserError.
    """
    try:
        if (num_bytes := file.stat().st_size) > MAX_BYTES:
            raise UserError(f"{named_by}{file}: has {num_bytes:,} bytes; a file of settings has at most {MAX_BYTES:,}")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{named_by}{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{named_by}{file}: {error.strerror or error}", hint=hint) from error
    return parse_file(text, str(file))


def parse_value(text: str) -> Any:
    """Parses one value of the command line: `3`, `1e-6`, `null`, `[a, b]`, `{x: 1}`, or plain text.

    Raises: ValueError for text that is not YAML or has a comment.
    """
    try:
        loader = _ValueLoader(text)
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, (), "the value", {})
    except yaml.MarkedYAMLError as error:
        raise ValueError(str(error.problem or error.context)) from error
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise ValueError("its aliases refer to one another without an end") from error


def dump(values: Mapping[str, Any]) -> str:
    """Returns the values as YAML, in the order of the keys; `parse_file` reads the same values back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def is_unicode(text: str) -> bool:
    """Returns whether a text is free of surrogates, which come from YAML's `\\ud800` or from command-line bytes that
    are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def describe(value: Any) -> str:
    """Returns a value as YAML, shortened to one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def merge(base: Tree, over: Tree) -> Tree:
    """Merges `over` into `base`: mappings key by key, any other value is replaced.

    A different `task.kind` has different keys, so it drops the task's old values; likewise for all `KINDS`.
    """
    values, places = dict(base.values), dict(base.places)
    for section, key in KINDS:
        start_afresh(values, places, (section, key), over.values.get(section))
    _merge_into(values, over.values, places, ())
    return Tree(values=values, places={**places, **over.places}, notes=(*base.notes, *over.notes))


def start_afresh(values: dict[str, Any], places: dict[Key, str], kind: tuple[str, str], new: Any) -> None:
    """Drops the values that belong to the old kind if a section of another kind is merged on top.

    Args:
        values: the values of the whole tree; changed in place, as are its `places`.
        kind: an entry of `KINDS`.
        new: the section that is merged on top.
    """
    section, key = kind
    old = values.get(section)
    if not (isinstance(old, Mapping) and isinstance(new, Mapping) and key in new and new[key] != old.get(key)):
        return
    for place in KINDS[kind] or tuple((section, name) for name in old):
        forget(places, place)
        if isinstance(holder := values.get(place[0]), Mapping):
            values[place[0]] = {name: value for name, value in holder.items() if name != place[1]}


def forget(places: dict[Key, str], key: Key) -> None:
    """Removes the places of a value and of all values below it."""
    for other in [other for other in places if other[: len(key)] == key]:
        del places[other]


def _merge_into(values: dict[str, Any], over: Mapping[str, Any], places: dict[Key, str], key: Key) -> None:
    for name, value in over.items():
        here = (*key, name)
        old = values.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            values[name] = dict(old)
            _merge_into(values[name], value, places, here)
        else:
            forget(places, here)
            values[name] = value


def _value(loader: _Loader, node: yaml.Node, key: Key, filename: str, places: dict[Key, str]) -> Any:
    if len(places) > MAX_VALUES:
        raise UserError(f"{filename}:{node.start_mark.line + 1}: {_TOO_MANY}")
    if len(key) > MAX_DEPTH:
        raise UserError(
            f"{filename}:{node.start_mark.line + 1}: nested more than {MAX_DEPTH} deep; does it refer to itself?"
        )
    if node.tag not in _TAGS:
        raise UserError(f"{filename}:{node.start_mark.line + 1}: the tag {_short(node.tag)} has no meaning here")
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, filename)
        loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode):
                raise UserError(f"{filename}:{line}: a key must be text, this is a list or a mapping")
            name = _scalar(loader, name_node, filename)
            if not isinstance(name, str):
                raise UserError(f"{filename}:{line}: a key must be text, this is {describe(name)}; put it in quotes")
            places[(*key, name)] = f"{filename}:{line}"
            values[name] = _value(loader, value_node, (*key, name), filename, places)
        return values
    if isinstance(node, yaml.SequenceNode):
        for i, entry in enumerate(node.value):
            places[(*key, i)] = f"{filename}:{entry.start_mark.line + 1}"
        return [_value(loader, entry, (*key, i), filename, places) for i, entry in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode), "there are three kinds of nodes"
    return _scalar(loader, node, filename)


_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}
"""The allowed YAML tags; values with other tags, such as !!binary, would be misread."""


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _scalar(loader: _Loader, node: yaml.ScalarNode, filename: str) -> Any:
    line = node.start_mark.line + 1
    try:
        value = loader.construct_object(node)
    except (KeyError, AttributeError, TypeError) as error:  # PyYAML raises these for `!!bool word` and the like
        raise UserError(f"{filename}:{line}: {node.value!r:.80} is no {_short(node.tag)}") from error
    if isinstance(value, str) and not is_unicode(value):
        raise UserError(f"{filename}:{line}: {describe(value)} holds half of a character (a surrogate)")
    if isinstance(value, str) and " " in value and node.style is None and _is_cut(node):
        raise UserError(
            f"{filename}:{line}: YAML takes '#' after a blank for a comment, so the text ends with {value[-40:]!r}",
            hint="put quotes around the whole text, or the comment on a line of its own",
        )
    return value


def _is_cut(node: yaml.ScalarNode) -> bool:
    """Returns whether a comment follows on the line where the text ends."""
    end = node.end_mark
    return end.buffer is not None and end.buffer[end.pointer :].partition("\n")[0].lstrip(" \t").startswith("#")


def _refuse_duplicates(node: yaml.MappingNode, filename: str) -> None:
    lines: dict[str, int] = {}
    for name_node, _ in node.value:
        if not isinstance(name_node, yaml.ScalarNode) or name_node.value == "<<":
            continue
        line = name_node.start_mark.line + 1
        if name_node.value in lines:
            raise UserError(
                f"{filename}:{line}: the key {name_node.value!r} is already on line {lines[name_node.value]}; "
                "keep one of them"
            )
        lines[name_node.value] = line
