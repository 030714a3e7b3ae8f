"""Converts a recipe's options of a policy to a record."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from rlinf_envs import PICTURE
from rlinf_workers.policies.base import PolicyError

Options = TypeVar("Options")


def options_of(record: type[Options], options: Mapping[str, Any]) -> Options:
    """The dataclass with the options.

    Raises: PolicyError for an unknown option.
    """
    names = [each.name for each in fields(record)]  # type: ignore[reportArgumentType]
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"; did you mean {close[0]}?" if close else ";"
            raise PolicyError(f"there is no option {name!r}{meant} it has {', '.join(names)}")
    return record(**options)


def acting_options(options: object, names: Sequence[str], cameras: Sequence[str], **others: Any) -> dict[str, str]:
    """`Needs.acting`, without options that are not set.

    Args:
        options: the record with the options `names`.
        cameras: the fields with pictures that it reads, in order.
        others: options that the record leaves open.
    """
    values = {"cameras": ",".join(name.removeprefix(PICTURE) for name in cameras)}
    values |= {name: getattr(options, name) for name in names} | others
    return {name: str(value) for name, value in values.items() if value is not None}


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises: PolicyError unless the value is one of the choices."""
    if value not in choices:
        raise PolicyError(f"options.{name} is {value!r}; use one of {', '.join(choices)}")
