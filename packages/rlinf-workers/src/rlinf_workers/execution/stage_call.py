"""What the executor tells a rank to do in one run of the flow, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.channel import ChannelAddress
from rlinf_comm.records import record
from rlinf_workers.metrics import Metric
from rlinf_workers.spans import SpanTable
from rlinf_workers.worker import StepContext

WHOLE_BATCH = 0
"""Granularity of a stage that takes everything of a run in one chunk."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPort:
    """One channel that a rank reads.

    Items carry a key. With `num_partitions` = R > 1 a rank gets those with key % R == its partition; otherwise any
    rank may take any item. With `ordered` they come in the order of their keys, without gaps, whatever order they
    were put in.
    """

    channel: str
    address: ChannelAddress
    granularity: int
    """Items in a chunk; WHOLE_BATCH for all of the run."""
    partition: int
    num_partitions: int
    ordered: bool
    of_own_turn: bool
    """Written by a stage of the reader's own cycle: the lease is kept while waiting."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class WritePort:
    """One channel that a rank writes."""

    channel: str
    address: ChannelAddress
    num_partitions: int
    max_items_per_entry: int
    """The readers' granularity: more items are never put in one piece, so that several readers share the work. 0: no
    limit."""
    of_own_turn: bool


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StageCall:
    """One stage on one rank, for one run of the flow."""

    stage: str
    method: str
    context: StepContext
    reads: tuple[ReadPort, ...]
    writes: tuple[WritePort, ...]
    lease_turn: int | None
    """The turn to take on shared devices; None for a stage that shares none."""
    offloads: bool
    """Whether the worker's state leaves the devices whenever the lease is given back."""
    starts_leased: bool
    """A stage that computes before it has read anything needs its devices from the start."""
    receives: dict[str, int]
    """Weight edge -> policy version to serve before the first chunk."""
    publishes: tuple[str, ...]
    """Weight edges on which to publish when the stage is done."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """What a rank reports when its stage is done."""

    metrics: dict[str, Metric]
    spans: SpanTable
    shown: list[dict[str, str | float]]
    """Rows for people, see Worker.show."""
    policy_version: int
