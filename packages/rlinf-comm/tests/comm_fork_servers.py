"""The tests' side of comm_fork_server.py."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rlinf_comm import pack

HANG_S = 60.0
_SCRIPT = pathlib.Path(__file__).with_name("comm_fork_server.py")


class ForkServer:
    """Starts light processes by the millisecond. All of them are dead after the `with` block."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, str(_SCRIPT), *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pids: list[int] = []

    def start(self, role: str, *arguments: Any) -> int:
        """The pid of a child that runs the role."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{role} {pack(arguments).hex()}\n")
        self._process.stdin.flush()
        self._pids.append(int(self._process.stdout.readline()))
        return self._pids[-1]

    def running(self) -> list[int]:
        """The children that have not ended."""
        self._pids = [pid for pid in self._pids if is_running(pid)]
        return self._pids

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate(timeout=HANG_S)


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, "a hang"
        time.sleep(0.001)


def kill(pid: int) -> None:
    """Returns when the process is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
