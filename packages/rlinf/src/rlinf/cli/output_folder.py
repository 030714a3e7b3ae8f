"""The folder that a command writes into."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from rlinf.errors import UserError
from rlinf.run_folder.lock import LOCK


def new_folder(name: str) -> Path:
    """runs/<name>-<time>, with a number behind it for runs that start within the same second."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if not folder.exists())


def check_empty(folder: Path) -> None:
    """Raises: UserError for a folder with something in it, or a file."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder} is a file; a folder is written", hint="choose another name with --output")
    if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
        raise UserError(
            f"the output folder {folder} exists and is not empty",
            hint="go on with the run in it with --resume, or choose another folder with --output",
        )


def cannot_write(folder: Path, error: OSError) -> UserError:
    """What to tell of a folder that could not be made or written."""
    return UserError(f"--output={folder}: cannot write there: {error.strerror or error}", hint="choose another folder")
