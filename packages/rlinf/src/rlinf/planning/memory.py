"""Memory that ranks need on a device or a host, whether they fit, and the table of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rlinf.config.common import ClusterConfig
from rlinf.plugin_checks import spec_of
from rlinf_sched import Cluster, Plan
from rlinf_sched.derive import MEMORY_KINDS, RankMemory
from rlinf_workers import CONTEXT_BYTES
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync import EdgeEnds, WeightSyncSpec, suitable_weight_syncs

PROCESS_BYTES = 384 << 20
"""Bytes of a worker process on a CPU slot without its model: the interpreter with torch and transformers, as measured
in the reference's process (benchmarks/results/memory.json)."""
HEAP_SHARE = 0.4
"""Freed blocks that malloc keeps in such a process, as a share of the memory that comes and goes and of the optimizer's
moments, which are allocated in between; chosen so that no worker in the same measurements takes more."""
ALLOCATED_SHARE = 1.25
"""GPU memory that torch's allocator reserves relative to what is in use, unless it has to free its cache; up to 1.21
was measured (docs/memory.md)."""
COMMUNICATOR_BYTES = 384 << 20
"""Buffers of NCCL for each group of ranks that a process communicates in. An assumption, since no run has used several
GPUs: 32 channels with a receive buffer of 4 MiB for large messages (NCCL_BUFFSIZE), one of 4.7 MiB for those of LL128
and a small one, 288 MiB in a ring, and a third for trees and the communicator itself."""
DEVICE_BYTES = 512 << 20
"""GPU memory that the driver keeps for itself."""

UNITS = (("GiB", 30), ("MiB", 20))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptWeights:
    """Published weights that a rank of the trainer keeps until the engines have received them.

    Example: with max_staleness 1, weights of 15.2 GB in GPU memory: num_versions=2, gpu_bytes=30.4e9, host_bytes=0
    """

    num_versions: int = 1
    """Maximum number of versions."""
    gpu_bytes: int = 0
    """Bytes of all versions on the rank's GPU. Offloading does not move them."""
    host_bytes: int = 0
    """The same in the memory of its machine."""


def weight_sync_of(cluster: ClusterConfig, nodes: Sequence[int], *, on_gpu: bool) -> WeightSyncSpec:
    """The weight sync between ranks on these nodes; of several candidates the first one."""
    if cluster.weight_sync != "auto":
        return spec_of(WEIGHT_SYNCS, cluster.weight_sync, at="cluster.weight_sync")
    return suitable_weight_syncs(EdgeEnds(sources=nodes, targets=nodes, on_gpus=on_gpu))[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The memory of a rank of a worker group on a device."""

    group: str
    memory: RankMemory
    num_items: int
    """Maximum number of prompts that the rank works on at once."""
    offload: bool
    devices: tuple[int, ...] = ()
    """Each of them carries as much."""
    engine_process_bytes: int = 0
    """Host bytes of the processes that the rank's own process starts, beside the model."""
    num_contexts: int = 1
    """Its processes on each of its GPUs: its own, and that of an engine that starts others."""
    num_communicators: int = 0
    """Groups of several ranks with which each of its processes communicates through NCCL."""
    versions: KeptWeights = KeptWeights()
    held_bytes: int | None = None
    """What the driver counted on one of its GPUs in an earlier run; None: not measured."""

    @property
    def peak(self) -> int:
        return self.memory.peak(self.num_items)

    @property
    def context_bytes(self) -> int:
        """Memory of CUDA and NCCL in its processes, which offloading does not free."""
        return self.num_contexts * CONTEXT_BYTES + self.num_communicators * COMMUNICATOR_BYTES

    @property
    def gpu_bytes(self) -> int:
        """What the driver counts for its processes on a GPU at most: measured, or else predicted."""
        return self.predicted_gpu_bytes if self.held_bytes is None else self.held_bytes

    @property
    def predicted_gpu_bytes(self) -> int:
        """As much if nothing makes torch free its cache, published weights included. An engine allocates its KV pool in
        one piece."""
        pool, versions = self.memory.kv_pool, self.versions.gpu_bytes
        return round(ALLOCATED_SHARE * (self.peak - pool)) + pool + versions + self.context_bytes

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
    """Memory that ranks share, and their maximum need."""

    name: str
    has_bytes: int
    needed_bytes: int
    loads: tuple[Load, ...]
    needs: str = "a device needs"
    """Who needs it, in words."""
    held_bytes: int | None = None
    """What the driver is expected to count at most, with what torch's allocators keep; None: nothing is kept apart."""

    @property
    def missing_bytes(self) -> int:
        """Negative if the ranks fit."""
        return self.needed_bytes - self.has_bytes


def cuda_bytes(loads: Sequence[Load]) -> int:
    """Memory of a GPU that CUDA and NCCL take in the processes of these ranks, whether their state is there or not."""
    return DEVICE_BYTES + sum(load.context_bytes for load in loads)


def beside_cuda(cluster: Cluster, cuda_bytes: int) -> Cluster:
    """The cluster with the memory that CUDA leaves of each of its GPUs."""
    devices = (replace(device, memory_bytes=device.memory_bytes - cuda_bytes) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def device_place(name: str, has_bytes: int, loads: Sequence[Load]) -> MemoryPool:
    """What stays there, and the largest of those that take turns."""
    resident = sum(load.versions.gpu_bytes + (0 if load.offload else load.memory.state) for load in loads)
    needed = max((resident + load.peak - (0 if load.offload else load.memory.state) for load in loads), default=0)
    of_cuda = cuda_bytes(loads)
    cached_bytes = round((ALLOCATED_SHARE - 1) * max(0, needed - sum(load.memory.kv_pool for load in loads)))
    return MemoryPool(
        name=name,
        has_bytes=has_bytes,
        needed_bytes=needed + of_cuda,
        held_bytes=max(needed + of_cuda, min(needed + of_cuda + cached_bytes, has_bytes)),
        loads=tuple(loads),
    )


def host_place(has_bytes: int, loads: Sequence[Load], shared: int = 0) -> MemoryPool:
    """The machine whose CPU slots are the devices: offloading leaves everything where it is, so all processes add up.

    Args:
        shared: bytes that the processes share.
    """
    return MemoryPool(
        name="this machine",
        has_bytes=has_bytes,
        needed_bytes=sum(load.process for load in loads) + shared,
        loads=tuple(loads),
        needs="the process needs" if len(loads) == 1 else f"the {len(loads)} processes need",
    )


def at_once_place(name: str, has_bytes: int, loads: Sequence[Load]) -> MemoryPool:
    """A GPU that holds the peaks of all its ranks at once."""
    needed = DEVICE_BYTES + sum(load.gpu_bytes for load in loads)
    return MemoryPool(name=name, has_bytes=has_bytes, needed_bytes=needed, loads=tuple(loads))


def versions_place(has_bytes: int, loads: Sequence[Load], node_of: Callable[[int], int]) -> MemoryPool:
    """The machine whose trainer ranks keep the most published weights in its memory.

    Args:
        has_bytes: memory of every machine.
        node_of: returns the node of a device.
    """
    needed_bytes: Counter[int] = Counter()
    for load in loads:
        needed_bytes[node_of(load.devices[0])] += load.versions.host_bytes
    return MemoryPool(
        name="the trainer's machine",
        has_bytes=has_bytes,
        needed_bytes=max(needed_bytes.values(), default=0),
        loads=tuple(loads),
        needs="the published weights need",
    )


class PlanMemory(ABC):
    """Predicts the memory that a plan's ranks need on the devices of a run."""

    def with_measured(self, held_bytes: Mapping[str, int]) -> PlanMemory:
        """A copy that takes what an earlier run measured for the peaks of resident ranks.

        Args:
            held_bytes: role -> what a rank's processes held of a GPU.
        """
        return self

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises: UserError with suggested settings if the ranks do not fit."""

    @abstractmethod
    def all_fit_at_once(self, plan: Plan) -> bool:
        """Whether the devices are GPUs that hold the state of all ranks at once, so that nothing is offloaded."""

    @abstractmethod
    def fullest_place(self, plan: Plan) -> MemoryPool:
        """Returns the device, or the host, with the least free memory."""

    @abstractmethod
    def place_beside(self, plan: Plan, other: Plan, groups: Collection[str]) -> MemoryPool | None:
        """Returns the device, or the host, with the least free memory while the plan runs and these worker groups of
        the other plan have started beside it; None if a group is not counted."""


# -- for people --------------------------------------------------------------------------------------------------------


def memory_rows(loads: Sequence[Load]) -> tuple[str, list[tuple[str, ...]]]:
    """The unit, and a header with a row for each role: what one of its ranks takes of a device.

    The optimizer's step and the weight sync come at other times than a pass, so a row may be more than its peak.
    """
    of_role = {load.group: load for load in loads}
    parts = {role: load.memory.parts(load.num_items) for role, load in of_role.items()}
    kinds = [kind for kind in MEMORY_KINDS if any(kind in sizes for sizes in parts.values())]
    largest = max((load.peak for load in of_role.values()), default=0)
    unit, shift = next((unit for unit in UNITS if largest >> unit[1]), UNITS[-1])

    def amount(num_bytes: int) -> str:
        return f"{num_bytes / (1 << shift):,.2f}"

    rows = [("role", *kinds, "peak")]
    for role, load in of_role.items():
        cells = (amount(parts[role][kind]) if kind in parts[role] else "" for kind in kinds)
        rows.append((role, *cells, amount(load.peak)))
    return unit, rows


def memory_lines(place: MemoryPool) -> list[str]:
    """What a run says before its processes start."""
    unit, rows = memory_rows(place.loads)
    lines = _columns([(f"memory, {unit}", *rows[0][1:]), *rows[1:]])
    needs = f"{place.needs} {place.needed_bytes / 2**30:.2f} GiB at most"
    if place.held_bytes is not None:
        needs += f", CUDA's own included, and may hold {place.held_bytes / 2**30:.2f} with what torch keeps"
    needs += f"; {place.name} has"
    return [*lines, *versions_lines(place.loads), f"{needs} {place.has_bytes / 2**30:.1f}"]


def memory_text(loads: Sequence[Load]) -> str:
    """What `rlinf plan` prints."""
    unit, rows = memory_rows(loads)
    return "\n".join(
        [f"memory of a rank, {unit}", *(f"  {line}" for line in [*_columns(rows), *versions_lines(loads)])]
    )


def versions_lines(loads: Sequence[Load]) -> list[str]:
    """A line for the versions of the weights that a rank keeps; none where steps do not overlap."""
    lines = [
        f"{load.group}: {load.versions.num_versions} versions of the weights, kept until the engines have received "
        f"them: {_size_text(size)} {where} for each rank"
        for load in loads
        for size, where in ((load.versions.gpu_bytes, "of GPU memory"), (load.versions.host_bytes, "of host memory"))
        if load.versions.num_versions > 1 and size
    ]
    return list(dict.fromkeys(lines))


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 100 << 20 else f"{num_bytes / 2**20:.2f} MiB"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers end below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
