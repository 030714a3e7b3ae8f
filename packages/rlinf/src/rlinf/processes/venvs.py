"""Checks the venvs of roles before any process of a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf.errors import UserError
from rlinf.venvs import python_of
from rlinf_workers import InterpreterRefused
from rlinf_workers.launchers import Interpreter, examine_interpreter

SHOWN = ("torch", "transformers")
"""Packages whose versions are listed in the manifest, as for the driver."""


def examine_venvs(venvs: Mapping[str, str]) -> dict[str, Interpreter]:
    """Returns role -> its interpreter.

    Raises: UserError for a venv that cannot start workers of this run.
    """
    interpreters: dict[str, Interpreter] = {}
    for role, python in venvs.items():
        try:
            if python not in interpreters:
                interpreters[python] = examine_interpreter(python_of(python))
        except UserError as error:
            raise UserError(f"venvs.{role}: {error.message}", hint=error.hint) from error
        except InterpreterRefused as error:
            raise UserError(f"venvs.{role}: {error}") from error
    return {role: interpreters[python] for role, python in venvs.items()}


def describe_venvs(venvs: Mapping[str, Interpreter]) -> dict[str, Any]:
    """Returns the manifest's description of the venvs by role."""
    return {
        role: {
            "interpreter": interpreter.path,
            "python": interpreter.python,
            **{name: interpreter.packages.get(name) for name in SHOWN},
            "packages": dict(sorted(interpreter.packages.items(), key=lambda pair: pair[0].lower())),
        }
        for role, interpreter in venvs.items()
    }
