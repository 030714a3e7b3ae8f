"""Output folders of commands."""

from __future__ import annotations

import errno
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.errors import UserError


def new_folder(name: str) -> Path:
    """Returns runs/<name>-<time>, with a number appended for runs that start within the same second."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], numbered) if not folder.exists())


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
