"""What the driver knows of a run at one moment: enough to find the root cause later, in any process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rlinf_workers.launchers.base import OwnProcess, Wait

DRIVER = "driver"
"""Name of the driver's process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """A process of the run, with what is needed to recognize that it is still the same one."""

    name: str
    """`role/rank`, DRIVER, or a worker's own process: `role/rank KIND NUMBER`."""
    host: str
    """As returned by `platform.node()`."""
    pid: int
    started_ticks: int
    """Its start time, in the kernel's clock ticks since boot; 0 if unknown."""
    log_path: str
    """Receives its output; empty for a driver that writes no log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """A running stage: its place in the plan, and the ranks that have not finished it."""

    name: str
    worker: str
    """Its worker group."""
    num_ranks_per_replica: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    unfinished: tuple[int, ...] = ()
    """Ranks whose call has not returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelState:
    """The contents of a channel."""

    name: str
    num_entries: int
    num_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsAhead:
    """Steps that overlap: how far generation is ahead of the oldest step under way."""

    max_staleness: int
    num_under_way: int
    """Steps that have begun and not ended."""
    idle: tuple[str, ...] = ()
    """Worker groups that generate and have ended their stages of all steps under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment. Waits are as old as the last heartbeat of their worker, about a second."""

    taken_s: float
    """Unix time."""
    flow: str = ""
    """The flow that is running; empty between runs."""
    step: int = 0
    phase: str = ""
    """`train` or `evaluate`."""
    began_s: float = 0.0
    """Unix time at which the run of the flow began."""
    expected_s: float = 0.0
    """Expected duration; 0: unknown."""
    ahead: StepsAhead | None = None
    """None: steps of the flow do not overlap."""
    stages: tuple[StageState, ...] = ()
    channels: tuple[ChannelState, ...] = ()
    keepers: dict[str, str] = field(default_factory=dict)
    """Channel -> the process that holds it."""
    feeding: tuple[str, ...] = ()
    """Channels that the driver is still writing to."""
    collecting: tuple[str, ...] = ()
    """Channels that the driver reads and that are still open."""
    waits: tuple[Wait, ...] = ()
    lease_holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Turn -> `role/rank stage` inside it or inside a turn that keeps it from starting."""
    leaving: tuple[str, ...] = ()
    """Workers whose offload was requested and is not finished."""
    processes: tuple[ProcessRecord, ...] = ()


def workers_of(group: str, snapshot: Snapshot) -> list[str]:
    """The running workers of a group: `actor/0`, `actor/1`."""
    workers = (record.name for record in snapshot.processes if " " not in record.name)
    return [name for name in workers if name.rpartition("/")[0] == group]


def own_process_name(wait: Wait, process: OwnProcess) -> str:
    """The name of a process that the waiter has started: `rollout/0 engine 4711`."""
    kind = wait.kind if wait.kind in ("simulator", "checker", "agents") else "engine"
    return f"{wait.waiter} {kind} {process.pid}"


def own_processes(waits: Iterable[Wait], workers: Mapping[str, ProcessRecord]) -> Iterator[ProcessRecord]:
    """The processes that workers have started and wait for, without duplicates; they write to the log of their
    worker."""
    by_name = {own_process_name(wait, process): (wait, process) for wait in waits for process in wait.processes}
    for name, (wait, process) in by_name.items():
        if (worker := workers.get(wait.waiter)) is not None:
            yield ProcessRecord(
                name=name,
                host=worker.host,
                pid=process.pid,
                started_ticks=process.started_ticks,
                log_path=worker.log_path,
            )


def read_snapshot(content: bytes) -> Snapshot:
    """Parses the output of `snapshot_json`. Raises: msgspec.DecodeError for another version's output."""
    return msgspec.json.decode(content, type=Snapshot)


def snapshot_json(snapshot: Snapshot) -> bytes:
    """What `read_snapshot` reads."""
    return msgspec.json.encode(snapshot)
