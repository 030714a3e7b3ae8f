"""The Python interpreter of another venv, in which a worker can run: inspecting and starting it.

A venv is isolated. It gets none of the driver's installed packages, and no shell settings for the driver's Python; only
the folders that the user has put on the driver's `sys.path` are appended to its own, so that rewards, environments and
engines of a user's project can be imported there as in the driver.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import rlinf_comm.protocol
from rlinf_comm.wire import Hello, disagreement
from rlinf_workers import protocol
from rlinf_workers.errors import InterpreterRefused

EXAMINE_TIMEOUT_S = 60.0
PACKAGES = ("rlinf-comm", "rlinf-workers", "rlinf-algos")
"""Packages that a worker needs."""
DRIVERS_OWN = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Env vars that would lead another interpreter, or tools that it starts, into the driver's venv. Packages installed
with `pip install --user` belong to their interpreter, and a venv does not see them anyway."""

FIRST_LINES = "import sys; sys.path[:] = [entry for entry in sys.path if entry] + sys.argv[2:]; del sys.argv[2:]\n"
"""Runs first: `-c` puts the current folder before everything else, and the user's folders come last."""

_EXAMINE = """
import importlib.metadata, importlib.util, json, os, platform, runpy
found = {"python": platform.python_version(), "protocols": {}, "folders": {}, "packages": {}}
for distribution in importlib.metadata.distributions():
    if distribution.metadata and distribution.metadata["Name"]:
        found["packages"].setdefault(distribution.metadata["Name"], distribution.version)
for name in sys.argv[1].split(","):
    spec = importlib.util.find_spec(name.replace("-", "_"))
    for folder in spec.submodule_search_locations or () if spec else ():
        found["folders"].setdefault(name, folder)
        file = os.path.join(folder, "protocol.py")
        if os.path.isfile(file):
            found["protocols"][name] = runpy.run_path(file)["PROTOCOL"]
print()
print(json.dumps(found))
"""
"""Finds the packages without importing them, which would take torch's seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """An interpreter that can start workers.

    Example: Interpreter(path="/envs/sglang/bin/python", python="3.11.9", packages={"torch": "2.13.0", ...}, ...)
    """

    path: str
    python: str
    """Its version."""
    packages: Mapping[str, str]
    """Distribution -> version, of all that are installed."""
    folders: Mapping[str, Path]
    """Each of PACKAGES -> the folder of its modules."""


def examine_interpreter(python: str | Path) -> Interpreter:
    """Inspects an interpreter; takes a few tenths of a second and imports no installed package there.

    Raises:
        InterpreterRefused: it is not an interpreter, or rlinf-workers is not installed there, or speaks another
        protocol.
    """
    path, own = os.fspath(python), own_hello("worker")
    answer = _answer(path, ",".join(PACKAGES))
    missing = [name for name in PACKAGES if name not in answer["folders"]]
    if missing:
        raise InterpreterRefused(
            f"{path}: {' and '.join(missing)} not found in its venv; install what the driver has, from the folder that "
            f"tools/build-wheels.sh writes: {path} -m pip install --find-links wheels {' '.join(missing)}"
        )
    why = disagreement(own, Hello(interpreter=path, python=answer["python"], protocols=answer["protocols"]))
    if why is not None:
        raise InterpreterRefused(why)
    folders = {name: Path(folder) for name, folder in answer["folders"].items()}
    return Interpreter(path=path, python=answer["python"], packages=answer["packages"], folders=folders)


def own_protocols() -> dict[str, int]:
    """Distribution -> its protocol number in this process."""
    return {"rlinf-comm": rlinf_comm.protocol.PROTOCOL, "rlinf-workers": protocol.PROTOCOL}


def own_hello(service: str, details: bytes = b"") -> Hello:
    """The first message of this process on a connection between a driver and what it starts."""
    return Hello(protocols=own_protocols(), service=service, details=details)


def command(python: str, code: str, argument: str) -> list[str]:
    """The command line that runs `code` under an interpreter; `argument` is its `sys.argv[1]`."""
    return [python, "-c", FIRST_LINES + code, argument, *own_path()]


def clean_env_vars(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The env vars for a process under another interpreter: this process's, except those of its Python, plus `more`."""
    return {name: value for name, value in os.environ.items() if name not in DRIVERS_OWN} | dict(more or {})


def own_path() -> list[str]:
    """The folders that the user has put on this process's `sys.path`: the script's, those of PYTHONPATH, and later
    additions."""
    folders = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return [folder for folder in folders if folder not in _installed_path() and not _holds_packages(folder)]


@functools.cache
def _installed_path() -> frozenset[str]:
    """The default search path of this interpreter."""
    code = "import json, sys; print(); print(json.dumps(sys.path[1:]))"
    done = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True, check=True)
    return frozenset(map(os.path.abspath, json.loads(done.stdout.splitlines()[-1])))


def _holds_packages(folder: str) -> bool:
    """Whether the folder belongs to a venv or its programs, not to the user."""
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(folder).parts)
    return is_installed or folder == os.path.dirname(sys.executable)


def _answer(path: str, names: str) -> dict:
    if not os.path.isfile(path):
        inside = os.path.join(path, "bin", "python")
        hint = f"; did you mean {inside}?" if os.path.exists(inside) else "; give the path of its `python`"
        raise InterpreterRefused(f"{path} {'is a folder' if os.path.isdir(path) else 'does not exist'}{hint}")
    try:
        done = subprocess.run(
            command(path, _EXAMINE, names),
            env=clean_env_vars(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=EXAMINE_TIMEOUT_S,
        )
        return json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise InterpreterRefused(f"{path} did not report its version within {EXAMINE_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise InterpreterRefused(f"{path} cannot be run: {error.strerror}; give the path of its `python`") from error
    except ValueError as error:
        last_line = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise InterpreterRefused(f"{path} is not a Python interpreter: it printed {last_line[:200]!r}") from error
