"""Python interpreters of this machine: inspects them, and chooses the one for a venv."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.errors import UserError
from rlinf_workers.launchers import clean_env_vars

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
    """A working Python interpreter."""

    path: Path
    version: str
    """For example `3.11.7`."""
    extension_suffix: str
    """Suffix of its native modules: `.cpython-311-x86_64-linux-gnu.so`."""
    site_packages: Path
    makes_venvs: bool

    @property
    def minor(self) -> str:
        """For example `3.11`."""
        return minor_of(self.version)


def minor_of(version: str) -> str:
    """Returns the minor version: `3.11` of `3.11.7`."""
    return version.rpartition(".")[0]


def ask(path: Path | str) -> PythonBuild:
    """Starts an interpreter and inspects it. Raises: UserError if it is not a Python interpreter."""
    try:
        done = subprocess.run(
            [str(path), "-"],
            input=_ASK,
            env=clean_env_vars(),
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
        values = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        lines = done.stderr.strip().splitlines()[:1] if isinstance(error, ValueError) else [str(error)]
        raise UserError(f"{path} is no Python that works: {' '.join(lines) or 'it said nothing'}") from error
    return PythonBuild(path=Path(path), **{**values, "site_packages": Path(values["site_packages"])})


def choose(program: str | None, minors: Sequence[str], *, what: str) -> PythonBuild:
    """Returns the interpreter for a new venv.

    Args:
        program: path or command from the user; None takes the caller's interpreter if its minor version fits, else the
            first of `python3.11`, ... on the path.
        minors: minor versions that the requirement list supports.
        what: name of the venv, for messages.

    Raises: UserError if it has another minor version, is not Python, or cannot create venvs.
    """
    commands = [f"python{minor}" for minor in minors]
    if program is not None:
        path = shutil.which(program)
        problem = f"--python {program}: there is no such program"
    elif f"{sys.version_info[0]}.{sys.version_info[1]}" in minors:
        path, problem = sys.executable, ""
    else:
        path = next(filter(None, map(shutil.which, commands)), None)
        problem = f"{what} is for Python {' and '.join(minors)}, and there is no {' or '.join(commands)} on the path"
    hint = f"rlinf venv create {what} --python /path/of/{commands[0]}"
    if path is None:
        raise UserError(problem, hint=hint)
    build = ask(path)
    if build.minor not in minors:
        text = f"{what} is for Python {' and '.join(minors)}; {build.path} is Python {build.version}"
        raise UserError(text, hint=hint)
    if not build.makes_venvs:
        text = f"{build.path} cannot make virtual environments"
        raise UserError(text, hint=f"apt-get install python{build.minor}-venv")
    return build
