"""The local launcher: processes on this machine, each watched by a thread. Needs no server and no installation.

A worker in the driver's own Python is spawned or forked by multiprocessing; one in another venv is started by that
venv's interpreter. From their first message on they are the same (served.py).

A worker has its own session, so a Ctrl-C at the terminal reaches only the driver, and killing its process group
includes its children. The kernel kills it when the driver dies (see child.py).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
from typing import Any

from rlinf_comm.wire import Connection
from rlinf_workers.explaining.processes import is_running
from rlinf_workers.launchers import child
from rlinf_workers.launchers.base import WorkerSpec
from rlinf_workers.launchers.credentials import worker_variables
from rlinf_workers.launchers.interpreter_process import InterpreterProcess, kill_with_group
from rlinf_workers.launchers.served import ServedWorker, ServingLauncher, birth_of, check_outside_main, describe_exit


class LocalProcess:
    """A process of this machine, started by this process.

    Args:
        process: multiprocessing's, or an InterpreterProcess.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self.sentinel: int = process.sentinel
        self.host = socket.gethostname()

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def is_running(self) -> bool:
        return is_running(self._process.pid)

    def join(self, timeout: float | None = None) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        kill_with_group(self._process)

    def describe_end(self) -> str:
        return describe_exit(self.exitcode)


class LocalLauncher(ServingLauncher):
    """Starts workers as processes of this machine.

    Args:
        heartbeat_timeout_s: a worker that sends nothing for this long after its start counts as lost; see
            ServingLauncher.
        pins_slots: workers on CPU slots are pinned to their cores (slot i to core i), as those on GPUs to their GPUs.
            False: slots are only counted, and the system may use any idle core.
        forks: workers are forked from multiprocessing's fork server, which has already done their imports and must not
            have touched a GPU. The code that starts the server gives it the workers' env vars. Workers in another venv
            are not forked.
    """

    def __init__(self, *, heartbeat_timeout_s: float = 60.0, pins_slots: bool = False, forks: bool = False) -> None:
        super().__init__(heartbeat_timeout_s=heartbeat_timeout_s)
        self._pins_slots = pins_slots
        self._forks = forks
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")

    def start(self, spec: WorkerSpec) -> ServedWorker:
        self._check(spec)
        if spec.python is not None:
            check_outside_main(spec, f"the worker's own venv ({spec.python})")
        elif getattr(sys.modules["__main__"], "__file__", None) is None:  # a notebook or an interpreter's prompt
            check_outside_main(spec, "a worker process")
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        is_forked = self._forks and spec.python is None
        birth = birth_of(
            spec,
            log_path=str(spec.log_path),
            pins_slots=self._pins_slots,
            is_forked=is_forked,
            dies_with_thread=is_forked or threading.current_thread() is threading.main_thread(),
            driver_pid=os.getpid(),
        )
        ours, theirs = Connection.pair()
        process: Any
        if spec.python is not None:
            process = InterpreterProcess(spec.python, theirs, spec.log_path, spec.env_vars)
        else:
            process = self._context.Process(target=child.main, args=(theirs,), daemon=False)
            with worker_variables(spec.env_vars):
                process.start()
        theirs.close()
        return self._adopt(spec, LocalProcess(process), ours, birth)
