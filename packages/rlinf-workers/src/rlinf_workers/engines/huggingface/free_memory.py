"""How much memory a device has left now, for what an engine may take."""

from __future__ import annotations

import torch

from rlinf_sched import host_memory


def free_bytes(device: torch.device) -> int:
    """Bytes that can be taken: of a GPU's memory, or of the host's as far as the cgroup allows."""
    if device.type != "cuda":
        return host_memory.free_bytes()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
