"""Locks a folder for one writer: the folder of a run, an evaluation or a venv.

The lock is the kernel's (flock on a file), so it is released when its process ends, in any way. Child processes do not
inherit it, because Python opens files with close-on-exec.

Other users must not control where a process of this user writes, nor lock it out: folders of other users are rejected,
a lock that is a link is not followed, and other users cannot open it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.run_folder.manifest import timestamp
from rlinf.run_folder.plain_files import not_plain, open_plain

LOCK = ".lock"
OTHER_FOLDER = ", or choose another folder with --output"
SHOWN_COMMAND = 100
"""Maximum length of the holder's command line in messages."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of flock on file systems without locks."""


class FolderLock:
    """Locks on creation, until `release` or the end of the process.

    Args:
        folder: the folder to lock.
        command: the command line, shown to processes that are refused.
        file: the lock file, in an existing folder; None: `.lock` in `folder`.
        otherwise: end of the hint for refused processes: the alternative to waiting or ending the holder.

    Raises: UserError that names the holder.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], *, file: Path | None = None, otherwise: str = OTHER_FOLDER
    ) -> None:
        check_owner((file or folder / LOCK).parent)
        self._descriptor: int | None = _open(file or folder / LOCK, os.O_RDWR | os.O_CREAT)
        self.notes: tuple[str, ...] = ()
        try:
            os.fchmod(self._descriptor, 0o600)
            if not _lock(self._descriptor, fcntl.LOCK_EX, folder, otherwise):
                self.notes = (f"the file system of {folder} has no locks: a second process could write it too",)
            if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
                self.notes += (f"every user of this machine may write into {folder}, and change what is read from it",)
        except BaseException:
            self.release()
            raise
        holder = {"pid": os.getpid(), "host": platform.node(), "since": timestamp(), "command": list(command)}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(holder) + "\n").encode(), 0)

    def release(self) -> None:
        """Releases the lock; may be called more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_free(folder: Path) -> None:
    """Raises: UserError if a process writes the folder or another user owns it. Changes nothing."""
    check_owner(folder)
    try:
        descriptor = _open(folder / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _lock(descriptor, fcntl.LOCK_SH, folder, OTHER_FOLDER)
    finally:
        os.close(descriptor)


def check_owner(folder: Path) -> None:
    """Checks the owner of a folder, if it exists. Raises: UserError if the folder, or a link of its name, belongs to
    another user, who could have put malicious links or files into it or could redirect it."""
    try:
        owner, linker = folder.stat().st_uid, folder.lstat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return
    if folder.is_symlink() and linker not in (0, os.geteuid()):
        raise UserError(
            f"{folder} is a link of the user with id {linker}, who could let it lead elsewhere",
            hint=f"name the folder itself: {folder.resolve()}",
        )
    if owner != os.geteuid():
        raise UserError(
            f"{folder} belongs to the user with id {owner}, and this process runs as {os.geteuid()}",
            hint="choose a folder of your own, or run rlinf as that user",
        )


def check_folder(folder: Path) -> None:
    """Raises: UserError for a file, and for the folder of another user."""
    check_owner(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder} is a file; a folder is written", hint="choose another name with --output")


def check_empty(folder: Path, *, can_resume: bool = True) -> None:
    """Raises: UserError for a file, or a folder that contains more than a lock.

    Args:
        can_resume: whether the command could resume the folder.
    """
    check_folder(folder)
    if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
        raise UserError(
            f"the output folder {folder} exists and is not empty",
            hint=f"{'go on with the run in it with --resume, or ' if can_resume else ''}choose another folder with "
            "--output",
        )


def _open(file: Path, flags: int) -> int:
    """Opens a plain file of this user and returns its descriptor. Raises: UserError for anything else; OSError."""
    descriptor = open_plain(file, flags, mode=0o600)
    status = os.fstat(descriptor)
    if status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise not_plain(file, "is no file of this user, or has a second name")
    return descriptor


def _lock(descriptor: int, kind: int, folder: Path, otherwise: str) -> bool:
    """Locks the file; returns False if the file system has no locks. Raises: UserError that names the holder."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _in_use(folder, _read_holder(descriptor), otherwise) from None
        raise
    return True


def _read_holder(descriptor: int) -> dict[str, Any]:
    """Reads the holder's description; empty if it has not been written yet."""
    try:
        holder = json.loads(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(folder: Path, holder: dict[str, Any], otherwise: str) -> UserError:
    if not holder:
        return UserError(f"{folder} is in use: another process writes it", hint="wait until it has ended")
    pid, host = holder.get("pid"), holder.get("host")
    command = textwrap.shorten(" ".join(map(str, holder.get("command", []))), SHOWN_COMMAND, placeholder=" ...")
    return UserError(
        f"{folder} is in use: process {pid} on {host} has been writing it since {holder.get('since')} ({command})",
        hint=f"wait until it has ended, or end it (kill {pid} on {host}){otherwise}",
    )
