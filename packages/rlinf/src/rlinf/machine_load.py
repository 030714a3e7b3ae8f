"""Measures the load by other processes during a measurement: the CPU time of all processes (/proc/stat) minus that of
this process and its descendants."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
INTERVAL_S = 1.0
"""Seconds between two readings. CPU time of own processes that start and end in between counts as other load."""
MAX_SHARE = 0.1
"""Share of the machine's CPUs used by others above which a measurement counts as disturbed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """CPU seconds of all CPUs since the machine started."""

    busy_s: float
    own_s: float
    """CPU seconds of this process and its descendants."""
    clock_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLoad:
    """Load by other processes, in CPUs."""

    mean_cpus: float
    most_cpus: float
    """Load in the busiest interval."""
    num_cpus: int
    """CPUs of the machine."""

    @property
    def note(self) -> str | None:
        """Returns a warning; None if the load is negligible."""
        if self.mean_cpus <= MAX_SHARE * self.num_cpus:
            return None
        return (
            f"other processes took {self.mean_cpus:.1f} of this machine's {self.num_cpus} CPUs while it was measured "
            f"(at most {self.most_cpus:.1f}), so times may be too long; measure again when it is quiet"
        )


class LoadMeter:
    """Measures while its context is open.

    Args:
        read: returns the times; None: those of /proc.
    Attributes:
        load: load between begin and end; None if the system does not provide it.
    """

    load: OtherLoad | None = None

    def __init__(self, read: Callable[[], CpuTimes] | None = None) -> None:
        self._read = read or (read_times if (PROC / "stat").is_file() else None)
        self._readings: list[CpuTimes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="load meter", daemon=True)

    def __enter__(self) -> LoadMeter:
        if self._read is not None:
            self._readings.append(self._read())
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._read is not None:
            self._ended.set()
            self._thread.join()
            self._readings.append(self._read())
            self.load = other_load(self._readings, num_cpus=os.cpu_count() or 1)

    def _look(self) -> None:
        assert self._read is not None, "started only where there is something to read"
        while not self._ended.wait(INTERVAL_S):
            self._readings.append(self._read())


def other_load(readings: list[CpuTimes], *, num_cpus: int) -> OtherLoad:
    """Computes the load by other processes from consecutive readings."""
    others_s, most_cpus = 0.0, 0.0
    for before, after in pairwise(readings):
        own_s, clock_s = max(0.0, after.own_s - before.own_s), after.clock_s - before.clock_s
        taken_s = max(0.0, after.busy_s - before.busy_s - own_s)
        others_s += taken_s
        if clock_s >= INTERVAL_S / 2:  # the last interval may be too short for the system's ticks
            most_cpus = max(most_cpus, taken_s / clock_s)
    length_s = max(readings[-1].clock_s - readings[0].clock_s, 1e-9)
    mean_cpus = min(others_s / length_s, num_cpus)
    return OtherLoad(mean_cpus=mean_cpus, most_cpus=min(max(most_cpus, mean_cpus), num_cpus), num_cpus=num_cpus)


def read_times() -> CpuTimes:
    """Reads the current times. Idle and I/O wait do not count as busy; time stolen by a hypervisor does."""
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, (PROC / "stat").read_text().split()[1:11])
    busy = user + nice + system + irq + softirq + steal
    clock_s = float((PROC / "uptime").read_text().split()[0])
    return CpuTimes(busy_s=busy / ticks, own_s=_family_ticks(os.getpid()) / ticks, clock_s=clock_s)


def _family_ticks(pid: int) -> int:
    """Returns the CPU time of a process and its descendants, including those that have ended and were waited for."""
    parents, ticks = {}, {}
    for entry in PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    family, seen = [pid], {pid}
    for member in family:
        children = [child for child, parent in parents.items() if parent == member and child not in seen]
        family += children
        seen.update(children)
    return sum(ticks.get(member, 0) for member in family)
