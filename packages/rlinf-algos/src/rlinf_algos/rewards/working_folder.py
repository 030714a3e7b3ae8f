"""The folder on disk that a sandbox mounts its files over, or in which a program without namespaces works."""

import contextlib
import os
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def working_folder() -> Generator[str]:
    """A new folder, which is removed with its contents, however deep they are."""
    folder = tempfile.mkdtemp(prefix="rlinf-sandbox-")
    try:
        yield folder
    finally:
        if os.listdir(folder):
            _empty(folder)
        os.rmdir(folder)


def _empty(folder: str) -> None:
    """Deletes the contents; walks by descriptors, since paths may be too long."""
    here, path = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), list[str]()
    try:
        while True:
            below = _remove_files(here)
            if below is not None:
                os.chmod(below, 0o700, dir_fd=here)
                here = _moved(here, below)
                path.append(below)
            elif path:
                here = _moved(here, "..")
                os.rmdir(path.pop(), dir_fd=here)
            else:
                return
    finally:
        os.close(here)


def _remove_files(folder: int) -> str | None:
    """Removes the files in a folder; returns the name of a subfolder if there is one."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=folder)
    return None


def _moved(folder: int, name: str) -> int:
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return below
