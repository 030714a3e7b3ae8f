"""What the driver knows of a run at one moment: enough to say, in any process and later, whose move it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rlinf_workers.launchers.base import OwnProcess, Wait

DRIVER = "driver"
"""Name of the driver's process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """A process of the run, and how to be sure that it is still the same one."""

    name: str
    """`role/rank`, DRIVER, or a worker's own process: `role/rank KIND NUMBER`."""
    host: str
    """As `platform.node()` names it."""
    pid: int
    started_ticks: int
    """When it began, in the kernel's clock ticks since the machine's boot; 0 where the system does not say it."""
    log_path: str
    """Where its output goes; empty for a driver that writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """A stage of the flow that runs: where it stands in the plan, and who has not finished it."""

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
    """What lies in a channel."""

    name: str
    num_entries: int
    num_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment. Waits are as old as the last beat of their worker, about a second."""

    taken_s: float
    """Unix time."""
    flow: str = ""
    """Of which a run is under way; empty between runs."""
    step: int = 0
    phase: str = ""
    """`train` or `evaluate`."""
    began_s: float = 0.0
    """Unix time at which the run of the flow began."""
    expected_s: float = 0.0
    """Seconds that it should take; 0: nobody knows."""
    stages: tuple[StageState, ...] = ()
    channels: tuple[ChannelState, ...] = ()
    keepers: dict[str, str] = field(default_factory=dict)
    """Channel -> the process that it lives in."""
    feeding: tuple[str, ...] = ()
    """Channels into which the driver has not put everything yet."""
    collecting: tuple[str, ...] = ()
    """Channels that the driver reads and that are not closed."""
    waits: tuple[Wait, ...] = ()
    lease_holders: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Turn -> who is inside it or inside a turn that keeps it from starting: `role/rank stage`."""
    leaving: tuple[str, ...] = ()
    """Workers that were told to take their state off the devices and have not done it."""
    processes: tuple[ProcessRecord, ...] = ()


def workers_of(group: str, snapshot: Snapshot) -> list[str]:
    """The workers of a group that are up: `actor/0`, `actor/1`."""
    workers = (record.name for record in snapshot.processes if " " not in record.name)
    return [name for name in workers if name.rpartition("/")[0] == group]


def own_process_name(wait: Wait, process: OwnProcess) -> str:
    """Of one that the waiter has started: `rollout/0 engine 4711`."""
    kind = wait.kind if wait.kind in ("simulator", "checker") else "engine"
    return f"{wait.waiter} {kind} {process.pid}"


def own_processes(waits: Iterable[Wait], workers: Mapping[str, ProcessRecord]) -> Iterator[ProcessRecord]:
    """Those that workers have started and wait for, each once; they write to the log of their worker."""
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
    """The snapshot in what `snapshot_json` made. Raises: msgspec.DecodeError for what another version made."""
    return msgspec.json.decode(content, type=Snapshot)


def snapshot_json(snapshot: Snapshot) -> bytes:
    """What `read_snapshot` reads."""
    return msgspec.json.encode(snapshot)
