"""The key `venvs`: the venvs of roles that do not run in the driver's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from rlinf.config.base import Conflict
from rlinf_algos import did_you_mean

VENVS = (
    "Role -> venv of its workers: a name created by rlinf venv create, or the path of an interpreter, with a slash in "
    "it (docs/venvs.md). Other roles run in the driver's venv."
)


def _absolute_path(python: str) -> str:
    """Makes a path absolute, so that a run can be resumed from another folder. Keeps symlinks, because a venv's
    `python` is one."""
    return os.path.abspath(os.path.expanduser(python)) if "/" in python else python


Python = Annotated[str, Field(min_length=1), AfterValidator(_absolute_path)]


def venv_conflicts(venvs: Mapping[str, str], roles: Sequence[str]) -> Iterator[Conflict]:
    """Yields the names in `venvs` that are not roles of the job."""
    for role, python in venvs.items():
        if role not in roles:
            text = f"={python}: no worker of this job has the role {role!r}; {did_you_mean(role, roles)}"
            yield Conflict(keys=(f"venvs.{role}",), text=text)
