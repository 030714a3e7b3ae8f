"""An interpreter on this machine: what it is, and commands that run in it and nothing of the caller's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.errors import UserError

_ASK = """
import json, sys, sysconfig
try:
    import ensurepip, venv
    makes_venvs = True
except ImportError:
    makes_venvs = False
print(json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3],
    "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "site_packages": sysconfig.get_path("platlib"),
    "makes_venvs": makes_venvs,
}))
"""
_ASK_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonBuild:
    """A Python that answered."""

    path: Path
    version: str
    """`3.11.7` for example."""
    extension_suffix: str
    """Ending of native modules that it loads: `.cpython-311-x86_64-linux-gnu.so`."""
    site_packages: Path
    makes_venvs: bool

    @property
    def minor(self) -> str:
        """`3.11` for example."""
        return self.version.rpartition(".")[0]


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment variables without those that lead another Python to the caller's packages."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return {**kept, "PYTHONNOUSERSITE": "1", **(more or {})}


def ask(path: Path | str) -> PythonBuild:
    """Starts an interpreter to see what it is. Raises: UserError where it is none."""
    try:
        done = subprocess.run(
            [str(path), "-"],
            input=_ASK,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
        values = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        said = done.stderr.strip().splitlines()[:1] if isinstance(error, ValueError) else [str(error)]
        raise UserError(f"{path} is no Python that works: {' '.join(said) or 'it said nothing'}") from error
    return PythonBuild(path=Path(path), **{**values, "site_packages": Path(values["site_packages"])})


def choose(wanted: str | None, minor: str, *, what: str) -> PythonBuild:
    """The interpreter that an environment is made with.

    Args:
        wanted: what the user named, a path or a command; None takes the caller's where its minor fits, else
            `python3.11` from the path.
        minor: the one that the requirement list was tried with.
        what: the environment, for messages.

    Raises: UserError where it is another minor, no Python, or cannot make virtual environments.
    """
    hint = f"rlinf env create {what} --python /path/of/python{minor}"
    if wanted is not None:
        path = shutil.which(wanted)
        if path is None:
            raise UserError(f"--python {wanted}: there is no such program", hint=hint)
        found = ask(path)
    elif sys.version_info[:2] == tuple(map(int, minor.split("."))):
        found = ask(sys.executable)
    else:
        path = shutil.which(f"python{minor}")
        if path is None:
            raise UserError(
                f"{what} was tried with Python {minor}, and there is no python{minor} on the path", hint=hint
            )
        found = ask(path)
    if found.minor != minor:
        raise UserError(
            f"{what} was tried with Python {minor} alone; {found.path} is Python {found.version}", hint=hint
        )
    if not found.makes_venvs:
        raise UserError(f"{found.path} cannot make virtual environments", hint=f"apt-get install python{minor}-venv")
    return found
