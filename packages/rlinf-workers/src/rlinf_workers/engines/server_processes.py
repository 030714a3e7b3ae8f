"""Processes of a server around a model: they end with the worker, and the last error that one logged is kept in a file.

A server logs why one of its processes failed and then ends. Each process also writes its errors to a folder that it
shares with the worker, which can then report the reason.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

LONGEST_ERROR = 1200
"""Characters of an error that are shown; some errors list every model that a server supports."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent died before the previous line
        os._exit(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # lets `rlinf explain` read the stacks of a hanging process


def keep_errors(folder: Path, logger: str) -> None:
    """Writes the errors that `logger` logs in this process to a file in the folder."""
    errors = logging.FileHandler(folder / f"errors-{os.getpid()}", delay=True)
    errors.setLevel(logging.ERROR)
    logging.getLogger(logger).addHandler(errors)


def last_error(folder: Path, pid: int | None = None) -> str | None:
    """The exception that ended a process of the server, as logged last: its own lines, without the stack."""
    pattern = "errors-*" if pid is None else f"errors-{pid}"
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))
    lines = text.strip().splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if _is_exception(lines[i])), None)
    message = "\n".join(lines[start:]) if start is not None else (lines[-1] if lines else None)
    return message and message[:LONGEST_ERROR]


def _is_exception(line: str) -> bool:
    """Whether a line of a traceback begins the exception's own text: `ValueError: ...`."""
    name = line.partition(":")[0]
    return bool(name) and name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Interrupt"))


def kill_family(pid: int | None) -> None:
    """Kills a process and all its descendants."""
    import psutil  # a requirement of the servers

    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
