"""Main memory: how much this machine has and has free, within the cgroup limits of this process.

A container's limit is its cgroup's, while /proc/meminfo describes the whole machine (kernel: cgroup-v2.rst, memory.rst
of version 1). Only reads files.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Files with the limit and the usage, and the file and key for reclaimable file caches; for version 2 and version 1."""


def machine_bytes() -> int:
    """Memory of the machine in bytes, ignoring limits."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_bytes(*, cgroup: Path = CGROUP) -> int:
    """Memory of the machine in bytes, or the cgroup's limit if that is less."""
    cgroup_limit = _limit(cgroup)
    return machine_bytes() if cgroup_limit is None else min(machine_bytes(), cgroup_limit[0])


def free_bytes(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Available bytes: free memory of the machine, or what the cgroup's limit leaves if that is less."""
    available = _field(meminfo.read_text(), "MemAvailable:") * 1024
    if (cgroup_limit := _limit(cgroup)) is not None:
        limit, (_, used_file, stat_file, droppable) = cgroup_limit
        used = int((cgroup / used_file).read_text()) - _field((cgroup / stat_file).read_text(), droppable)
        available = min(available, limit - used)
    return max(0, available)


def _limit(cgroup: Path) -> tuple[int, tuple[str, str, str, str]] | None:
    """The limit, and the files of its version; None: there is none."""
    for files in CGROUP_FILES:
        path = cgroup / files[0]
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            return int(text), files
    return None


def _field(text: str, name: str) -> int:
    """The number after a name at the beginning of a line."""
    for line in text.splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    raise ValueError(f"no line begins with {name!r}")
