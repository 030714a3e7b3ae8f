"""A child process that simulates some rows, as its `SubprocessVector` sees it: how it is started, asked and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlinf_envs.core.shared_block import SharedBlock

_CLOSE_PATIENCE_S = 5.0  # a simulator that does not close in this time is killed


_PROCESSES: weakref.WeakSet[SimulatorProcess] = weakref.WeakSet()


def awaited_processes() -> list[int]:
    """Numbers of those children of this process that have not answered their command; from any thread."""
    return [process.pid for process in list(_PROCESSES) if process.is_awaited]


class SimulatorLost(Exception):
    """The process died, or has not answered in time; the text says which and how."""


@dataclass(kw_only=True, slots=True)
class _Child:
    """One incarnation of the process."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline_fd: int
    """Our end of a pipe that is never written to; closing it ends the child."""


class SimulatorProcess:
    """The rows of one child, and the child that holds them now; `start_again` puts a new one in its place.

    The shared memory outlives a child: what was written for it there is read by the next one. Pictures may go into a
    file of memory of the caller's, `pictures_fd`.
    """

    def __init__(self, rows: range, *, pictures_fd: int | None = None) -> None:
        self.rows = rows
        self.block: SharedBlock | None = None
        self.num_losses_here = 0
        """Children that were lost since the last answer."""
        self.is_awaited = False
        """Whether it has not answered its last command."""
        self.memory_fd = os.memfd_create("rlinf_envs", os.MFD_CLOEXEC)
        self._pictures_fd = pictures_fd
        self._child = _started(self.memory_fd, pictures_fd)
        _PROCESSES.add(self)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def connection(self) -> Connection:
        """What `multiprocessing.connection.wait` tells an answer by."""
        return self._child.connection

    @property
    def where(self) -> str:
        rows = f"env {self.rows[0]}" if len(self.rows) == 1 else f"envs {self.rows[0]}..{self.rows[-1]}"
        return f"the process of {rows} (pid {self.pid})"

    def send(self, command: str, arguments: tuple[Any, ...]) -> None:
        """Raises SimulatorLost."""
        try:
            self.connection.send((command, arguments))
            self.is_awaited = True
        except OSError as error:
            raise SimulatorLost(f"{self.where} {self._how_it_ended()} during {command}") from error

    def receive(self, command: str) -> tuple[Any, ...]:
        """The answer to a command; waits for it. Raises SimulatorLost."""
        try:
            answer = self.connection.recv()
            self.is_awaited = False
            return answer
        except (EOFError, OSError) as error:
            raise SimulatorLost(f"{self.where} {self._how_it_ended()} during {command}") from error

    def hung(self, command: str, limit_s: float) -> SimulatorLost:
        """What to raise where `command` has taken longer than its limit."""
        return SimulatorLost(f"{self.where} gave no answer to {command} in {limit_s:g} s")

    def answer(self, command: str, arguments: tuple[Any, ...], *, limit_s: float) -> tuple[Any, ...]:
        """`send`, and what it answers within its limit. Raises SimulatorLost."""
        self.send(command, arguments)
        if not self.connection.poll(limit_s):
            raise self.hung(command, limit_s)
        return self.receive(command)

    def start_again(self) -> None:
        """Ends the child at once, whatever it does, and starts another, which has to be told everything anew."""
        self._child.process.kill()
        self._wait()
        self._close_child()
        self._child = _started(self.memory_fd, self._pictures_fd)

    def end(self, *, patience_s: float) -> None:
        """Waits for the child to end by itself, and kills it afterwards."""
        try:
            self._child.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._child.process.kill()
            self._wait()
        self._close_child()
        os.close(self.memory_fd)
        self.is_awaited = False

    def _how_it_ended(self) -> str:
        status = self._wait()
        if status is None:
            return "closed its socket, but lives on"
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with code {status}"
        return f"{ended} (its stderr may tell more)"

    def _wait(self) -> int | None:
        try:
            return self._child.process.wait(_CLOSE_PATIENCE_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, or nothing we can talk to any more
            return None

    def _close_child(self) -> None:
        self._child.connection.close()
        os.close(self._child.lifeline_fd)


def end_all(processes: list[SimulatorProcess]) -> None:
    """Ask every child to close, give them some time together, then end what is left."""
    for process in processes:
        try:
            process.connection.send(("close", ()))
        except OSError:
            continue  # it is gone already
    deadline = time.monotonic() + _CLOSE_PATIENCE_S
    for process in processes:
        process.end(patience_s=max(0.0, deadline - time.monotonic()))
    processes.clear()


def _started(memory_fd: int, pictures_fd: int | None) -> _Child:
    """A child that waits for its first command."""
    ours, theirs = socket.socketpair()
    lifeline_read, lifeline_write = os.pipe()
    in_main_thread = threading.current_thread() is threading.main_thread()
    code = (
        "from rlinf_envs.core.subprocess_child import serve; "
        f"serve({theirs.fileno()}, {lifeline_read}, {memory_fd}, {pictures_fd}, dies_with_thread={in_main_thread})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), lifeline_read, memory_fd, *([] if pictures_fd is None else [pictures_fd])),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(_python_path(sys.path)), "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    os.close(lifeline_read)
    return _Child(process=process, connection=Connection(ours.detach()), lifeline_fd=lifeline_write)


def _python_path(entries: Sequence[str]) -> list[str]:
    return [entry or os.getcwd() for entry in entries]
