"""Temporary files that are deleted with their process, however it ends.

A worker may be killed at any time, for example by the kernel when its driver dies, and cannot clean up then; nor can an
engine that is killed with it. So a shell waits for the end of a pipe that only the worker holds open. It is neither in
the worker's process group nor its child: killing a worker kills the group, and Ray kills a worker's children.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SWEEP = 'exec 3<&0; { while read -r path; do set -- "$@" "$path"; done; rm -rf -- "$@"; } <&3 3<&- &'
"""A shell that exits at once, leaving one in the background that reads its input to the end and then deletes."""


class SweptFolder:
    """A temporary folder that only this user can access, deleted by `close` or when this process has ended.

    Args:
        parent: folder to create it in; None: the default for temporary files.
    Attributes:
        path: path of the folder.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        pipe = subprocess.PIPE
        self._sweeper = subprocess.Popen(
            ["/bin/sh", "-c", SWEEP, "sweep"], stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        self._sweeper.wait()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.also(self.path)

    def also(self, path: Path | str) -> None:
        """Deletes another file or folder, which need not exist yet, together with this one."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.write(f"{path}\n")
        self._sweeper.stdin.flush()

    def close(self) -> None:
        """Deletes everything; may be called twice."""
        assert self._sweeper.stdin is not None and self._sweeper.stdout is not None
        self._sweeper.stdin.close()
        if not self._sweeper.stdout.closed:
            self._sweeper.stdout.read()  # until the shell in the background ends
            self._sweeper.stdout.close()
