"""Finds, describes and removes the venvs of a user.

They are in one folder, `$RLINF_VENVS` or `~/.local/share/rlinf/venvs` (`$XDG_DATA_HOME` is respected). A folder counts
as a venv once its stamp marks it as complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlinf.errors import UserError
from rlinf.run_folder.lock import FolderLock
from rlinf.venvs.catalog import variant

STAMP = "rlinf-environment.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """The inputs from which a venv was created."""

    name: str
    cpu: bool
    """Whether it is for CPU slots."""
    python: str
    """Version of its interpreter, for example `3.11.7`."""
    list_sha256: str
    """Digest of the requirement list."""
    own_packages: Mapping[str, str] = field(default_factory=dict)
    """rlinf's package -> its digest at creation."""
    stand_ins: tuple[str, ...] = ()
    """`NAME VERSION` of each stand-in."""
    is_complete: bool = False
    """False during creation, and if creation was aborted."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Venv:
    """A folder with a stamp."""

    path: Path
    stamp: Stamp

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def title(self) -> str:
        return variant(self.stamp.name, cpu=self.stamp.cpu)


def venvs_folder() -> Path:
    """Returns the folder of this user's venvs, which may be missing. Names of the previous version are still
    accepted."""
    if folder := os.environ.get("RLINF_VENVS") or os.environ.get("RLINF_ENVIRONMENTS"):
        return Path(folder).absolute()
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share").absolute() / "rlinf"
    before = data / "environments"
    return before if before.is_dir() and not (data / "venvs").exists() else data / "venvs"


def read_stamp(path: Path) -> Stamp | None:
    """Reads the stamp of a folder; None if there is none that this version can read."""
    try:
        values = json.loads((path / STAMP).read_text(encoding="utf-8"))
        stamp = Stamp(**{**values, "stand_ins": tuple(values["stand_ins"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return stamp if stamp.format == FORMAT else None


def write_stamp(path: Path, stamp: Stamp) -> None:
    """Replaces the stamp of a folder atomically."""
    temporary = path / f"{STAMP}.new"
    temporary.write_text(json.dumps(asdict(stamp), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path / STAMP)


def venvs() -> Iterator[Venv]:
    """Yields all venvs by name, including incomplete ones."""
    folder = venvs_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        stamp = None if path.name.startswith(".") else read_stamp(path)
        if stamp is not None:
            yield Venv(path=path, stamp=stamp)


def find(name: str) -> Venv:
    """Returns a complete venv. Raises: UserError that lists the existing ones."""
    by_name = {one.path.name: one for one in venvs() if one.stamp.is_complete}
    if name not in by_name:
        there = f"there are {', '.join(by_name)}" if by_name else "there is none"
        raise UserError(
            f"there is no venv {name!r} in {venvs_folder()}; {there}",
            hint=f"rlinf venv create {name} [--cpu], or give the path of an interpreter",
        )
    return by_name[name]


def python_of(name_or_path: str | Path) -> Path:
    """Returns the interpreter that a role runs in.

    Args:
        name_or_path: name of a venv created by `rlinf venv create`; or, with a slash in it, the path of an interpreter
            or a venv folder.

    Raises: UserError if there is no such venv or interpreter.
    """
    if os.sep not in str(name_or_path):
        path = find(str(name_or_path)).python
    else:
        path = Path(name_or_path).expanduser().absolute()  # not resolved, because a venv's interpreter is a link
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK):
        what = "it does not exist" if not path.exists() else "it cannot be executed"
        raise UserError(f"{path} is no interpreter: {what}", hint="give the path of bin/python in a venv")
    return path


@contextmanager
def held(path: Path, command: str) -> Iterator[FolderLock]:
    """Locks a venv while it is created or removed. Raises: UserError that names the process holding the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the venv, which is renamed when it is removed.
    lock = FolderLock(path, command.split(), file=path.parent / f".{path.name}.lock", otherwise="")
    try:
        yield lock
    finally:
        lock.release()


def remove(name: str) -> Path:
    """Deletes a venv, complete or not.

    Raises: UserError if rlinf did not create the folder, or is creating it now.
    """
    path = venvs_folder() / name
    if path.parent != venvs_folder() or name.startswith("."):
        raise UserError(f"{name!r} is no name of a venv", hint="rlinf venv list shows the names")
    if not path.is_dir():
        find(name)
    if path.is_symlink() or (read_stamp(path) is None and any(path.iterdir())):
        raise UserError(f"{path} was not made by rlinf venv create: it has no {STAMP}", hint=f"rm -r {path}")
    with held(path, f"rlinf venv remove {name}"):
        discard(path)
    return path


def discard(path: Path) -> None:
    """Deletes a folder; if interrupted, the rest does not count as a venv."""
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        path.rename(doomed)
        shutil.rmtree(doomed)
