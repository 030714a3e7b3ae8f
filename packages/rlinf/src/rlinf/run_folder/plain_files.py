"""Opens files of a folder that may be untrusted.

Other users must not control which file is read or written under a name, nor block the reader. So links, pipes and
devices are rejected, and files whose owner differs from the folder's, which may be hard links to that user's files.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from rlinf.config.json_file import parse_json
from rlinf.errors import UserError

NEW_FILE = 0o666
"""Mode of a new file, before the umask."""
BLOCK_BYTES = 8 << 20


def open_plain(file: Path, flags: int = os.O_RDONLY, mode: int = NEW_FILE) -> int:
    """Opens a plain file and returns its descriptor. Raises: UserError for anything else; OSError."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if not file.is_symlink():
            raise
        raise not_plain(file, "is a symbolic link") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.stat(file.parent).st_uid:
        return descriptor
    os.close(descriptor)
    raise not_plain(file, "is no plain file of the folder's owner")


def create_plain(file: Path) -> int:
    """Creates a new file, replacing an existing one, and returns its descriptor."""
    file.unlink(missing_ok=True)
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE)


def read_plain(file: Path, *, within: Path | None = None) -> bytes:
    """Reads a plain file. Raises: as `open_plain`; UserError if a link in its path leads out of `within`."""
    if within is not None and not file.parent.resolve().is_relative_to(within.resolve()):
        raise not_plain(file.parent, f"leads out of {within}")
    with open(open_plain(file), "rb") as opened:
        return opened.read()


def copy_plain(source: Path, target: Path) -> None:
    """Copies the bytes of a plain file into a new one. Raises: as `open_plain`."""
    with open(open_plain(source), "rb") as opened, open(create_plain(target), "wb") as new:
        shutil.copyfileobj(opened, new, BLOCK_BYTES)


def read_plain_json(file: Path) -> Any:
    """Reads a plain JSON file. Raises: as `open_plain`; ValueError."""
    return parse_json(read_plain(file))


def not_plain(file: Path, problem: str) -> UserError:
    """Returns the error for a file that rlinf cannot have written like this."""
    return UserError(f"{file} {problem}, and rlinf did not write it", hint=f"find out who did, then remove {file}")
