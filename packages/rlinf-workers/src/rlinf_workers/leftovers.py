"""Files that go away with a process, however it ends.

A worker may be killed at any time, by the kernel among others when its driver dies, and has then no last word; nor has
an engine that is killed with it. So a shell waits for the end of a pipe that only the worker holds.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SWEEP = 'while read -r path; do set -- "$@" "$path"; done; rm -rf -- "$@"'


class SweptFolder:
    """A temporary folder of this user alone, deleted by `close` or when this process has ended.

    Args:
        parent: what it is made in; None: where temporary files go.
    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        # a session of its own: whoever kills a worker kills its process group
        self._sweeper = subprocess.Popen(
            ["/bin/sh", "-c", SWEEP, "sweep"], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.also(self.path)

    def also(self, path: Path | str) -> None:
        """Another file or folder, which need not exist yet, goes away with this one."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.write(f"{path}\n")
        self._sweeper.stdin.flush()

    def close(self) -> None:
        """Deletes all of it; a second time does nothing."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        self._sweeper.wait()
