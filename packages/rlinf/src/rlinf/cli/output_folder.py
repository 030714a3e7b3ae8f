"""Output folders of commands."""

from __future__ import annotations

import atexit
import errno
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlinf.errors import UserError

_MADE: list[Path] = []
"""Folders of `new_folder`."""


def new_folder(name: str) -> Path:
    """Creates runs/<name>-<time>, with a number appended if another run has that name, and returns it. If nothing has
    been written there when the command ends, it is removed."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    for folder in itertools.chain([first], numbered):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_write(folder, error) from error
        else:
            _MADE.append(folder.absolute())
            return folder
    raise AssertionError("there are no more names")


@atexit.register
def remove_unused_folders() -> None:
    """Removes the folders of `new_folder` in which nothing has been written."""
    while _MADE:
        with suppress(OSError):
            _MADE[-1].rmdir()
            _MADE[-1].parent.rmdir()
        _MADE.pop()


def cannot_write(folder: Path, error: OSError) -> UserError:
    """Returns the error for a folder that could not be created or written."""
    return UserError(f"--output={folder}: cannot write there: {error.strerror or error}", hint="choose another folder")


@contextmanager
def resumable_evaluation(folder: Path) -> Iterator[None]:
    """Context of an evaluation into the folder: after Ctrl-C it prints how to resume; write errors become
    `cannot_write`."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"go on with: rlinf eval --resume --output {folder}", file=sys.stderr)
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise cannot_write(folder, error) from error
