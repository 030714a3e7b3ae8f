"""What the processes of a run hold, read from /proc: memory, descriptors, threads, shared segments; and what a run that
has ended has left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from command_line import is_running

SHARED_MEMORY = Path("/dev/shm")
CACHES = ("torchinductor_", "ray")
"""Of libraries, which keep them for the next process; Ray's are the logs of its sessions."""
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of a Ray cluster that end by themselves some minutes after one that was killed."""
_SEGMENT = re.compile(r"^(?:\S+ ){3}(\S+ \d+) +(?:/memfd:|/dev/shm/)", flags=re.MULTILINE)
"""A line of /proc/<pid>/maps of memory that others can share: its device and inode."""
_SHARED_LINK = ("/memfd:", "/dev/shm/")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResources:
    """What one process holds at a moment."""

    rss_bytes: int
    """Resident memory, shared pages included."""
    num_descriptors: int
    num_threads: int
    num_segments: int
    """Shared memory (memfd, /dev/shm) that is mapped, or open without being mapped."""


def resources_of(pid: int) -> ProcessResources | None:
    """None: the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
        mapped = set(_SEGMENT.findall((folder / "maps").read_text()))
        links = [_link(path) for path in (folder / "fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "VmRSS" not in status:
        return None  # a zombie
    opened = {(link, inode) for link, inode in links if link.startswith(_SHARED_LINK)}
    unmapped = {inode for _, inode in opened} - {int(key.split()[1]) for key in mapped}
    return ProcessResources(
        rss_bytes=1024 * _number(status, "VmRSS"),
        num_descriptors=len(links),
        num_threads=_number(status, "Threads"),
        num_segments=len(mapped) + len(unmapped),
    )


def processes_below(pid: int) -> set[int]:
    """A process and all that it has started, directly or not, and that are there; without Ray's agents."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (parent := _parent(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    pids, left = set(), [pid]
    while left:
        pids.add(one := left.pop())
        left += children.get(one, [])
    return {one for one in pids if not _command(one).startswith(RAYS_AGENTS)}


@dataclass(frozen=True, slots=True)
class Before:
    """What there was before a run, to say what it leaves behind."""

    shared: frozenset[str]
    temporary: Path
    """The folder that the run has for its temporary files (TMPDIR), empty at first."""

    @classmethod
    def now(cls, temporary: Path) -> Before:
        temporary.mkdir(parents=True, exist_ok=True)
        return cls(frozenset(os.listdir(SHARED_MEMORY)), temporary)

    def left(self, names: Mapping[int, str]) -> list[str]:
        """Processes and shared memory that are there now and were not before, a phrase each; `names` are the run's
        processes. Shared memory that a living process has is that process's: others work on this machine too."""
        processes = [f"process {pid} ({name})" for pid, name in names.items() if is_running(pid)]
        new = set(os.listdir(SHARED_MEMORY)) - self.shared
        return processes + [f"{SHARED_MEMORY}/{name}" for name in sorted(new - _in_use(new))]

    def folders(self) -> list[str]:
        """What is left of temporary files."""
        return [path.name for path in sorted(self.temporary.iterdir()) if not path.name.startswith(CACHES)]


def _in_use(names: set[str]) -> set[str]:
    """Those of the files in shared memory that a process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        mapped |= {name for name in names if f"{SHARED_MEMORY}/{name}" in text}
    return mapped


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(path: Path) -> tuple[str, int]:
    """Where a descriptor leads, and the inode there; empty for one that was closed meanwhile."""
    try:
        return os.readlink(path), path.stat().st_ino
    except OSError:
        return "", 0


def _parent(pid: int) -> int | None:
    try:
        return _number(Path(f"/proc/{pid}/status").read_text(), "PPid")
    except (FileNotFoundError, ProcessLookupError):
        return None


def _number(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", status, flags=re.MULTILINE)
    assert match is not None, f"no {name} in /proc/<pid>/status"
    return int(match.group(1))
