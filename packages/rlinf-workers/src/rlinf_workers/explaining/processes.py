"""The state of a run's processes as the kernel reports it: whether they run, what they use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlinf_workers.explaining.snapshot import ProcessRecord

SAMPLE_S = 0.3
"""Interval between two samples of a process, from which its current CPU use is computed."""
HARDLY_COMPUTES = 0.05
"""Cores; a process that uses less counts as idle."""
Condition = Literal["running", "sleeping", "waiting for a device", "stopped", "gone", "unknown"]
"""Stopped: by SIGSTOP or a debugger. Unknown: it is on another machine, or the system has no /proc."""
_CONDITIONS: dict[str, Condition] = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped",
    "Z": "gone",
    "X": "gone",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """A process at one moment."""

    condition: Condition
    cpu_s: float = 0.0
    """CPU seconds of all its threads since it started."""
    cores: float = 0.0
    """Cores that it currently uses."""
    rss_bytes: int = 0
    """Resident memory, including shared memory."""

    @property
    def computes(self) -> bool:
        return self.cores >= HARDLY_COMPUTES


@dataclass(frozen=True, slots=True)
class _Stat:
    letter: str
    cpu_s: float
    started_ticks: int
    rss_bytes: int


def started_ticks(pid: int) -> int:
    """The start time of a process, as in ProcessRecord."""
    stat = _read(pid)
    return stat.started_ticks if stat else 0


def is_running(pid: int) -> bool:
    """Whether a process can run: it exists, and is neither stopped nor ended. False if that is unknown, such as without
    /proc."""
    stat = _read(pid)
    return stat is not None and _CONDITIONS.get(stat.letter, "unknown") not in ("stopped", "gone", "unknown")


def process_states(records: Sequence[ProcessRecord]) -> dict[str, ProcessState]:
    """Name -> its state; takes SAMPLE_S."""
    before = {record.name: _read(record.pid) for record in records}
    start_s = time.monotonic()
    time.sleep(SAMPLE_S)
    return {record.name: _state(record, before[record.name], time.monotonic() - start_s) for record in records}


def handles_usr1(pid: int) -> bool:
    """Whether a process handles SIGUSR1, which kills a process without a handler."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return any(int(mask, 16) & 1 << 9 for mask in masks)


def has_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open; also False if this user may not see that."""
    try:
        status = file.stat()
        descriptors = [descriptor.stat() for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any((one.st_dev, one.st_ino) == (status.st_dev, status.st_ino) for one in descriptors)


def _state(record: ProcessRecord, before: _Stat | None, duration_s: float) -> ProcessState:
    if record.host != platform.node() or not record.started_ticks:
        return ProcessState(condition="unknown")
    now = _read(record.pid)
    if now is None or now.started_ticks != record.started_ticks:
        return ProcessState(condition="gone")
    used_s = now.cpu_s - before.cpu_s if before else 0.0
    return ProcessState(
        condition=_CONDITIONS.get(now.letter, "unknown"),
        cpu_s=now.cpu_s,
        cores=max(0.0, used_s / duration_s),
        rss_bytes=now.rss_bytes,
    )


def _read(pid: int) -> _Stat | None:
    """None: there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # after the name, which may contain anything
    ticks_s = os.sysconf("SC_CLK_TCK")
    return _Stat(
        letter=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_s,
        started_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )
