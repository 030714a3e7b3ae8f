"""The parent's side of a child process that simulates some rows: starts, calls and ends it."""

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
    """Returns the process ids of children that have not answered their command; may be called from any thread."""
    return [process.pid for process in list(_PROCESSES) if process.is_awaited]


class SimulatorLost(Exception):
    """The process died or did not answer in time; the text has the details."""


@dataclass(kw_only=True, slots=True)
class _Child:
    """One incarnation of the process."""

    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline_fd: int
    """The parent's end of a pipe that is never written to; closing it ends the child."""


class SimulatorProcess:
    """The rows of one child and the process that currently simulates them; `start_again` replaces the process.

    The shared memory outlives a child, and its replacement reads the same data. Images may go into the caller's memory,
    `pictures_fd`.
    """

    def __init__(self, rows: range, *, pictures_fd: int | None = None) -> None:
        self.rows = rows
        self.block: SharedBlock | None = None
        self.num_losses_here = 0
        """Children lost since the last answer."""
        self.is_awaited = False
        """Whether an answer to the last command is pending."""
        self.memory_fd = os.memfd_create("rlinf_envs", os.MFD_CLOEXEC)
        self._pictures_fd = pictures_fd
        self._child = _started(self.memory_fd, pictures_fd)
        _PROCESSES.add(self)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def connection(self) -> Connection:
        """The connection to pass to `multiprocessing.connection.wait`."""
        return self._child.connection

    @property
    def where(self) -> str:
        rows = f"env {self.rows[0]}" if len(self.rows) == 1 else f"envs {self.rows[0]}..{self.rows[-1]}"
        return f"the process of {rows} (pid {self.pid})"

    def send(self, command: str, arguments: tuple[Any, ...]) -> None:
        """Sends a command. Raises SimulatorLost."""
        try:
            self.connection.send((command, arguments))
            self.is_awaited = True
        except OSError as error:
            raise SimulatorLost(f"{self.where} {self._how_it_ended()} during {command}") from error

    def receive(self, command: str) -> tuple[Any, ...]:
        """Waits for the answer to a command and returns it. Raises SimulatorLost."""
        try:
            answer = self.connection.recv()
            self.is_awaited = False
            return answer
        except (EOFError, OSError) as error:
            raise SimulatorLost(f"{self.where} {self._how_it_ended()} during {command}") from error

    def hung(self, command: str, limit_s: float) -> SimulatorLost:
        """Returns the error for a `command` that exceeded its limit."""
        return SimulatorLost(f"{self.where} gave no answer to {command} in {limit_s:g} s")

    def answer(self, command: str, arguments: tuple[Any, ...], *, limit_s: float) -> tuple[Any, ...]:
        """Sends a command and returns the answer. Raises SimulatorLost, also if it takes longer than the limit."""
        self.send(command, arguments)
        if not self.connection.poll(limit_s):
            raise self.hung(command, limit_s)
        return self.receive(command)

    def start_again(self) -> None:
        """Kills the child and starts a new one, which has to be set up again."""
        self._child.process.kill()
        self._wait()
        self._close_child()
        self._child = _started(self.memory_fd, self._pictures_fd)

    def end(self, *, patience_s: float) -> None:
        """Waits for the child to exit and kills it after `patience_s` seconds."""
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
        except subprocess.TimeoutExpired:  # stuck in the kernel, or unreachable
            return None

    def _close_child(self) -> None:
        self._child.connection.close()
        os.close(self._child.lifeline_fd)


def end_all(processes: list[SimulatorProcess]) -> None:
    """Asks all children to close, waits for them together, then kills the remaining ones."""
    for process in processes:
        try:
            process.connection.send(("close", ()))
        except OSError:
            continue  # it has exited already
    deadline = time.monotonic() + _CLOSE_PATIENCE_S
    for process in processes:
        process.end(patience_s=max(0.0, deadline - time.monotonic()))
    processes.clear()


def _started(memory_fd: int, pictures_fd: int | None) -> _Child:
    """Starts a child, which waits for its first command."""
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
