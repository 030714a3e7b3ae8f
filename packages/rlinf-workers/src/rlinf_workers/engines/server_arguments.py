"""Arguments of a server that a recipe may set (`rollout.engine_options`), by the server's own names; checked without
torch and without the server."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from rlinf_workers.errors import SettingsRefused

ANY_VERSION = "any_version"
"""The one option that is not the server's: accept a version that was not tested."""


class ServerOptions:
    """The arguments that determine memory and times, as fields of a dataclass; None: the server's own default, or that
    of the engine's memory.py."""

    __slots__ = ()
    ALLOWS_WHOLE: ClassVar[bool] = False
    """Whether fractions may be 1."""
    SPECIAL: ClassVar[frozenset[tuple[str, int]]] = frozenset()
    """Arguments with numbers below 1 that have a meaning of their own."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """The problem of the first invalid value."""
        for field in fields(self):  # type: ignore[arg-type] - subclasses are dataclasses
            value = getattr(self, field.name)
            if value is None or (field.name, value) in self.SPECIAL:
                continue
            if problem := self._problem(str(field.type), value):
                yield field.name, f"={value!r} {problem}"
                return

    def _problem(self, kind: str, value: Any) -> str | None:
        if "bool" in kind:
            return None if isinstance(value, bool) else "is neither true nor false"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if "float" in kind:
            is_valid = is_number and (0 < value < 1 or (value == 1 and self.ALLOWS_WHOLE))
            return None if is_valid else "is not a fraction; use a number between 0 and 1"
        is_valid = is_number and isinstance(value, int) and value >= 1
        return None if is_valid else "is not a number of at least 1"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """From the arguments of a recipe; ignores other names."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type] - subclasses are dataclasses
        return cls(**{name: arguments[name] for name in names if arguments.get(name) is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArguments:
    """What is known of a server's arguments."""

    title: str
    """The server's name in messages."""
    kind: str
    """What the server calls them: "engine argument"."""
    names_file: Path
    """The names in the tested version, so that a machine without the server can check them too."""
    owned: Mapping[str, str]
    """Arguments that no recipe may set, and why."""
    options: type[ServerOptions]
    help_command: str
    """Lists them."""

    @property
    def names(self) -> set[str]:
        return set(self.names_file.read_text(encoding="utf-8").split())

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Problems of a recipe's options: (option, text after its name)."""
        for option in options:
            if option in self.owned:
                yield option, self._owned_problem(option)
        if not options.get(ANY_VERSION):
            names = {ANY_VERSION, *self.names}
            for option in options:
                if option not in names:
                    yield option, self._unknown_problem(option, names)
        yield from self.options.of(options).problems()

    def check(self, options: Iterable[str], installed_names: Iterable[str]) -> None:
        """Rejects the first option that no recipe may set, given the names that the installed server has.

        Raises: SettingsRefused.
        """
        names = {name for name in installed_names if not name.startswith("_")}
        for option in options:
            if option in self.owned:
                raise SettingsRefused(f"engine_options.{option}{self._owned_problem(option)}")
            if option not in names:
                raise SettingsRefused(f"engine_options.{option}{self._unknown_problem(option, names)}")

    def _owned_problem(self, option: str) -> str:
        return f" cannot be set: {self.owned[option]}; leave it out"

    def _unknown_problem(self, option: str, names: Iterable[str]) -> str:
        near = difflib.get_close_matches(option, sorted(set(names) - self.owned.keys()), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"`{self.help_command}` lists them"
        return f": {self.title} has no {self.kind} of that name; {hint}"
