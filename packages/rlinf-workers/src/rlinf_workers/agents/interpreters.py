"""Env vars of child processes: those of this interpreter import what it imports, others have the user's own path."""

from __future__ import annotations

import os
import sys

_USERS_PATH = "RLINF_USERS_PYTHONPATH"
"""PYTHONPATH before `same_interpreter` extended it."""


def same_interpreter() -> dict[str, str]:
    """Env vars of a child with this interpreter: it looks for modules where this process does."""
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, "PYTHONPATH": path, _USERS_PATH: _users_path()}


def other_interpreter() -> dict[str, str]:
    """Env vars of a child with another interpreter, which must not see the packages of this one."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", _USERS_PATH)}
    return {**others, "PYTHONPATH": users} if (users := _users_path()) else others


def _users_path() -> str:
    return os.environ.get(_USERS_PATH, os.environ.get("PYTHONPATH", ""))
