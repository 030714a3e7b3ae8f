"""The key `venvs`: which roles run in a venv of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from rlinf.config.base import Conflict
from rlinf_algos import did_you_mean

VENVS = (
    "Role -> the venv that its workers run in: a name that rlinf venv create has made, or the path of an "
    "interpreter, with a slash in it (docs/venvs.md). The others run in the driver's."
)


def _absolute_path(python: str) -> str:
    """A path is absolute once loaded, so that a run can be resumed from elsewhere; links stay, because a venv's
    `python` is one."""
    return os.path.abspath(os.path.expanduser(python)) if "/" in python else python


Python = Annotated[str, Field(min_length=1), AfterValidator(_absolute_path)]


def venv_conflicts(venvs: Mapping[str, str], roles: Sequence[str]) -> Iterator[Conflict]:
    """The roles that are none."""
    for role, python in venvs.items():
        if role not in roles:
            text = f"={python}: no worker of this job has the role {role!r}; {did_you_mean(role, roles)}"
            yield Conflict(keys=(f"venvs.{role}",), text=text)
