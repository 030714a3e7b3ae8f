"""Measures the memory and CPU time of a program's processes, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from .users import end_processes_of

MEMORY_FIELDS = ("RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:", "VmPTE:")
"""Fields of /proc/PID/status, in KiB, without RssFile (programs and libraries), which all processes share. VmPTE: page
tables; distant addresses need 8 KiB of them per page, although reading an untouched page takes no memory."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 2.0
"""Time limit for killed processes to end."""


def memory_bytes(processes: list[int]) -> int:
    """Total private memory, shared memory and page tables of these processes, including swapped pages."""
    total_kib = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/status") as file:
            total_kib += sum(int(line.split()[1]) for line in file if line.startswith(MEMORY_FIELDS))
    return total_kib * 1024


class ProcessorTime:
    """CPU time of a program's processes, updated at each look: the time of the running processes and of the children
    that they waited for, or the time of all processes ever seen, whichever is longer. A process that ignores SIGCHLD
    waits for none of its children."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[int, str], int] = {}
        """Number and start time of each process -> its CPU time when it was last seen."""

    def total_s(self, processes: list[int]) -> float:
        ticks = 0
        for process in processes:
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                utime, stime, *of_children = map(int, fields[11:15])
                self._ticks[process, fields[19]] = utime + stime
                ticks += utime + stime + sum(of_children)
        return max(ticks, sum(self._ticks.values())) / TICKS_PER_S


def in_namespace() -> list[int]:
    """All processes of the namespace but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def descendants() -> list[int]:
    """All processes below this one."""
    below, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children_of(parent)]
        below += parents
    return below


def children_of(process: int) -> list[int]:
    """Numbers of the processes that its threads started or that it inherited."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as file:
                children += map(int, file.read().split())
    return children


def end_descendants(users: tuple[int, int] | None) -> None:
    """Without namespaces, kills the processes that the program left; orphans have become children of this process."""
    deadline = time.monotonic() + PATIENCE_S
    while children_of(os.getpid()) and time.monotonic() < deadline:
        if users is not None:
            end_processes_of(*users)
        else:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot start another
                for process in descendants():
                    with contextlib.suppress(OSError):
                        os.kill(process, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
