"""Memory that ranks need on a device or a host, and whether they fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_sched import Plan
from rlinf_sched.derive import RankMemory

PROCESS_BYTES = 384 << 20
"""Bytes that a worker process on a CPU slot takes beside its model: the interpreter with torch and transformers, as
measured in the reference's process (benchmarks/results/memory.json)."""
HEAP_SHARE = 0.4
"""Freed blocks that malloc keeps in such a process, as a share of the memory that comes and goes and of the optimizer's
moments, which are allocated in between; chosen so that no worker in the same measurements takes more."""
ALLOCATED_SHARE = 1.25
"""What torch's allocator takes of a GPU over what is in use, while nobody asks it to give back; up to 1.21 was measured
(docs/memory.md)."""
CONTEXT_BYTES = 1 << 30
"""Room for CUDA's own memory in each process: its context, kernels and workspaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a rank of a worker group puts on a device."""

    group: str
    memory: RankMemory
    num_items: int
    """The most prompts that the rank works on at once."""
    offload: bool
    devices: tuple[int, ...] = ()
    """Each of them carries as much."""
    engine_process_bytes: int = 0
    """Host bytes of the processes that the rank's own process starts, beside the model."""

    @property
    def peak(self) -> int:
        return self.memory.peak(self.num_items)

    @property
    def process(self) -> int:
        """Bytes that the rank's processes take on CPU slots, without the store of weights; while a checkpoint is
        written, too."""
        work = self.memory.work(self.num_items)
        working = self.peak + round(HEAP_SHARE * (work + self.memory.optimizer))
        most = max(working + self.memory.host_copy, self.memory.state + self.memory.host_start)
        return PROCESS_BYTES + self.engine_process_bytes + max(1, len(self.devices)) * most


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPool:
    """Memory that ranks share, and what they need of it at most."""

    name: str
    has_bytes: int
    needed_bytes: int
    loads: tuple[Load, ...]
    needs: str = "a device needs"
    """Who needs it, in words."""

    @property
    def missing_bytes(self) -> int:
        """Negative where there is room."""
        return self.needed_bytes - self.has_bytes


def device_place(name: str, has_bytes: int, loads: Sequence[Load], mailbox: int = 0) -> MemoryPool:
    """What stays there, and the largest of those that take turns.

    Args:
        mailbox: as `mailbox_bytes`.
    """
    resident = sum(load.memory.state for load in loads if not load.offload)
    resident += mailbox if any(load.group == "actor" for load in loads) else 0
    needed = max((resident + load.peak - (0 if load.offload else load.memory.state) for load in loads), default=0)
    return MemoryPool(name=name, has_bytes=has_bytes, needed_bytes=needed, loads=tuple(loads))


class PlanMemory(ABC):
    """Predicts the memory that a plan's ranks need on the devices of a run."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises: UserError where the ranks do not fit, with settings that would."""

    @abstractmethod
    def all_fit_at_once(self, plan: Plan) -> bool:
        """Whether the devices are GPUs that hold the state of all ranks at once, so that nothing is offloaded."""

    @abstractmethod
    def fullest_place(self, plan: Plan) -> MemoryPool:
        """Returns the device, or the host, with the least free memory."""
