"""Files that go away with a process, however it ends.

A worker may be killed at any time, by the kernel among others when its driver dies, and has then no last word; nor has
an engine that is killed with it. So a shell waits for the end of a pipe that only the worker holds. It is neither of
the worker's process group nor its child: whoever kills a worker kills the group, and Ray a worker's children.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SWEEP = 'exec 3<&0; { while read -r path; do set -- "$@" "$path"; done; rm -rf -- "$@"; } <&3 3<&- &'
"""A shell that ends at once, and one in the background that reads its input to the end and then deletes."""


class SweptFolder:
    """A temporary folder of this user alone, deleted by `close` or when this process has ended.

    Args:
        parent: what it is made in; None: where temporary files go.
    Attributes:
        path: of the folder.
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
        """Another file or folder, which need not exist yet, goes away with this one."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.write(f"{path}\n")
        self._sweeper.stdin.flush()

    def close(self) -> None:
        """Deletes all of it; a second time does nothing."""
        assert self._sweeper.stdin is not None and self._sweeper.stdout is not None
        self._sweeper.stdin.close()
        if not self._sweeper.stdout.closed:
            self._sweeper.stdout.read()  # until the shell in the background ends
            self._sweeper.stdout.close()
