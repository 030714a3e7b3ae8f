"""A process that takes part in a Ray cluster in place of the driver.

Ray's library writes to stdout and stderr, listens on ports, replaces signal handlers and ends its process together with
the Ray node of its machine. So it runs in a separate process, whose output goes to a file: the driver names functions
of member.py, which run there, and gets their results. However the driver ends, this process then leaves the cluster,
and ends one that it has started.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rlinf_workers.errors import NodeLost, WorkersError
from rlinf_workers.launchers import interpreter

MEMBER = "rlinf_workers.launchers.ray.member"
END_TIMEOUT_S = 15.0
"""Time limit for the process to leave its cluster and to end one that it has started."""
_START = "from rlinf_workers.launchers.ray.process import serve; serve(int(sys.argv.pop()))"


class RayProcess:
    """The driver's end of the process.

    Args:
        variables: all env vars of the process, which Ray reads when it is imported.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._log_path: Path | None = None
        self._lock = threading.Lock()
        self._connection, theirs = Pipe(duplex=True)
        with theirs:
            self._process = subprocess.Popen(
                interpreter.command(sys.executable, _START, str(theirs.fileno())),
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def call(self, name: str, /, *args: Any, module: str = MEMBER, **keywords: Any) -> Any:
        """Runs a function of a module in the process and waits for its result.

        Raises: WorkersErrors of the function, also in place of any other error; NodeLost if the process ends, as it
        does when the Ray node of this machine is lost.
        """
        try:
            with self._lock:
                self._connection.send((module, name, args, keywords))
                succeeded, result = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            last = (self._log_text().strip().splitlines() or ["it left no message"])[-1]
            raise NodeLost(f"Ray's process on this machine has ended, as it does with its Ray node: {last}") from error
        if succeeded:
            return result
        raise result

    def log_to(self, path: Path) -> None:
        """Redirects the log of the process to this file; the first file also gets the earlier output."""
        if path == self._log_path:
            return
        is_first, self._log_path = self._log_path is None, path
        self.call("_log_to", str(path), copies=is_first, module=__name__)
        self._log.close()
        self._log = path.open("rb")

    def close(self) -> None:
        """Ends the process and the cluster that it has started."""
        atexit.unregister(self.close)
        self._connection.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def serve(descriptor: int) -> None:
    """Entry point of the process: runs what the driver sends until it disconnects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the driver's
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        while True:
            try:
                call = connection.recv()
            except (EOFError, OSError):
                break
            _answer(connection, *call)
    if MEMBER in sys.modules:
        _run(MEMBER, "leave")


def _answer(connection: Connection, module: str, name: str, args: tuple, keywords: dict) -> None:
    try:
        answer = True, _run(module, name, *args, **keywords)
    except WorkersError as error:
        answer = False, error
    except Exception as error:  # noqa: BLE001 - re-raised in the driver; the log has the traceback
        traceback.print_exc()
        answer = False, WorkersError(f"Ray: {type(error).__name__}: {error}")
    try:
        connection.send(answer)
    except OSError:
        return  # the driver is gone, which the next recv notices


def _run(module: str, name: str, *args: Any, **keywords: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **keywords)


def _log_to(path: str, *, copies: bool) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    if copies:
        os.write(log, os.pread(1, os.fstat(1).st_size, 0))
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
