"""A worker process under the interpreter of another venv, with the interface of multiprocessing's Process that the
local launcher uses.

multiprocessing could start it, but would pickle the driver's `sys.path` and its main module into it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_comm.wire import Connection
from rlinf_workers.errors import InterpreterRefused
from rlinf_workers.launchers import interpreter
from rlinf_workers.launchers.credentials import without_credentials

_BECOME_WORKER = (
    "from rlinf_workers.launchers.child import main_of_interpreter; main_of_interpreter(int(sys.argv.pop()))"
)


class InterpreterProcess:
    """Started by the constructor.

    Args:
        python: path of the interpreter.
        connection: the worker's end; may be closed here afterwards.
        log_path: receives stdout and stderr.
        env_vars: env vars on top of this process's, of which those with credentials are left out.

    Raises:
        InterpreterRefused: it cannot be run.
    """

    def __init__(self, python: str, connection: Connection, log_path: Path, env_vars: Mapping[str, str]) -> None:
        descriptor = connection.fileno()
        self.sentinel, alive = os.pipe()
        """Readable once the process has ended."""
        weakref.finalize(self, os.close, self.sentinel)
        with log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    interpreter.command(python, _BECOME_WORKER, str(descriptor)),
                    env=without_credentials(interpreter.clean_env_vars()) | dict(env_vars),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(descriptor, alive),
                    start_new_session=True,
                )
            except OSError as error:
                raise InterpreterRefused(f"{python} cannot be run: {error.strerror}") from error
            finally:
                os.close(alive)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; -9 if SIGKILL ended it."""
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return  # like multiprocessing: the caller checks exitcode

    def kill(self) -> None:
        self._process.kill()


def kill_with_group(process: Any) -> None:
    """Kills a worker's process and its process group; does nothing if nothing is left.

    Args:
        process: multiprocessing's, or an InterpreterProcess.
    """
    process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
