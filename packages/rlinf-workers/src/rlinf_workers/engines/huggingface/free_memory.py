"""Free memory of a device."""

from __future__ import annotations

import torch

from rlinf_sched import host_memory


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated: on a GPU, or on the host within the cgroup's limit."""
    if device.type != "cuda":
        return host_memory.free_bytes()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
