"""How much memory a device has left now, for what an engine may take."""

from __future__ import annotations

from pathlib import Path

import torch

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
"""Limit, use, and where the use says how much of it are files that can be dropped; of version 2 and of version 1."""


def free_bytes(device: torch.device, *, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken: of a GPU's memory, or of the host's as far as the cgroup allows."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    available = _field(meminfo.read_text(), "MemAvailable:") * 1024
    for limit_file, used_file, stat_file, droppable in CGROUP_FILES:
        if not (cgroup / limit_file).exists():
            continue
        limit = (cgroup / limit_file).read_text().strip()
        if limit != "max":
            used = int((cgroup / used_file).read_text()) - _field((cgroup / stat_file).read_text(), droppable)
            available = min(available, int(limit) - used)
        break
    return max(0, available)


def _field(text: str, name: str) -> int:
    """The number behind a name at the beginning of a line."""
    for line in text.splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    raise ValueError(f"no line begins with {name!r}")
