"""Turns a flow and its plan into the calls of a run: pure functions, no process.

StageCall is the message to a rank, StageOutcome its reply. PlannedFlow makes the calls: ports with the granularity of
the plan, turns on shared devices, versions of the weights to serve.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlinf_comm import ChannelAddress, ServerAddress, record
from rlinf_sched import FlowGraph, Plan, WeightEdge
from rlinf_workers.flow import Flow
from rlinf_workers.metrics import WeightedMetric
from rlinf_workers.spans import Span
from rlinf_workers.worker import Decision, Decisions, ShownRow, StepContext

WHOLE_BATCH = 0
"""Granularity of a stage that takes all items of a run in one chunk."""


ItemAddress = ChannelAddress | ServerAddress
"""A channel's address on its own node, or that of its server for other nodes."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One end of a channel, as a rank reads or writes it.

    Items carry a key. With `num_partitions` = R > 1 a replica of the reading stage gets those with key % R == its
    partition; otherwise any replica may take any item. With `ordered` they come in the order of their keys, without
    gaps, whatever order they were put in.
    """

    channel: str
    address: ItemAddress
    granularity: int
    """Items per chunk of the reading stage; WHOLE_BATCH: all items of the run. A put has no more items than this, so
    that several readers share the work."""
    num_partitions: int
    partition: int
    """0 if there is only one, and for a writer."""
    ordered: bool
    of_own_turn: bool
    """The other end belongs to this stage's own cycle, so the lease is kept while waiting."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StageCall:
    """One stage on one rank, for one run of the flow."""

    stage: str
    method: str
    context: StepContext
    reads: tuple[Port, ...]
    writes: tuple[Port, ...]
    lease_turn: int | None
    """The turn of its lease; None for a stage that shares no device and is never offloaded."""
    offloads: bool
    """Whether the worker's state is offloaded when another turn needs the devices."""
    discards: bool
    """Whether the weights that it receives may be dropped at the end, because this run publishes new ones."""
    receives: dict[str, int]
    """Weight edge -> policy version to serve before the first chunk; a newer one that an earlier stage took stays."""
    publishes: tuple[str, ...]
    """Weight edges on which to publish when the stage ends."""
    replica_channel: ItemAddress | None
    """The replica channel, on which the first rank broadcasts what it took; None if a replica is one rank."""
    trains: bool
    """Whether the stage changes the worker's weights."""
    offered: str = ""
    """Weight edge whose newer versions the stage may take before it ends; empty: none."""
    ahead: bool = False
    """Whether the stage of the next run may begin before this one has ended."""
    number: int = 0
    """Runs of the flow that began before this one."""
    follows: bool = False
    """Whether the run before was under way when this one began."""
    records: bool = False
    """Whether the outcome has the stage's decisions."""
    recorded: Decisions | None = None
    """The decisions to follow; None: the stage makes its own."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """What a rank reports when its stage is done."""

    metrics: dict[str, WeightedMetric]
    spans: list[Span]
    shown_rows: list[ShownRow]
    """Rows for display, see Worker.show."""
    notes: list[str]
    """Notes for the manifest, see Worker.note."""
    policy_version: int
    decisions: list[Decision]
    """What decided the numbers, see Worker.decide; empty if nothing is recorded."""


@dataclass(frozen=True, kw_only=True)
class PlannedFlow:
    """A flow with one plan that fits it."""

    flow: Flow
    graph: FlowGraph
    plan: Plan

    def stage_calls(
        self,
        addresses: Mapping[str, ItemAddress],
        versions: Mapping[WeightEdge, int],
        context: StepContext,
        *,
        number: int = 0,
        follows: bool = False,
        records: bool = False,
        recorded: Mapping[str, Decisions] | None = None,
    ) -> Iterator[tuple[int, int, StageCall]]:
        """(rank, lane, call) for each rank of each stage; every stage of a worker group has its own lane, or two if it
        may begin before the run before has ended.

        Args:
            addresses: channel -> its address, for every channel including `replica_channels`.
            versions: weight edge -> optimizer steps behind the weights last published on it; for every synced edge,
                also of other flows.
            number: runs of the flow that began before this one.
            follows: whether the run before is under way.
            records: whether the stages record their decisions.
            recorded: stage -> decisions to follow; None: none.
        """
        for stages in self.graph.workers.values():
            for lane, stage in enumerate(stages):
                ahead = stage in self.stages_ahead
                lane += len(stages) * (number % 2) if ahead else 0
                for rank in range(self.plan.stage(stage).num_ranks):
                    call = self._stage_call(stage, rank, addresses, versions, context)
                    call = replace(call, ahead=ahead, number=number, follows=follows)
                    own = None if recorded is None else recorded.get(stage)
                    yield rank, lane, replace(call, records=records, recorded=own)

    @cached_property
    def stages_ahead(self) -> frozenset[str]:
        """Stages that may begin before the same stage of the run before has ended, see `Flow.stage`."""
        declared = [name for name, stage in self.flow.stages.items() if stage.ahead]
        placed = [self.plan.stage(name) for name in declared]
        is_alone = all(each.turn not in self.leased_devices and not each.offload for each in placed)
        is_whole = all(each.num_ranks_per_replica == 1 for each in placed)
        return frozenset(declared if is_alone and is_whole and self.graph.max_staleness else ())

    def num_writers(self, channel: str) -> int:
        """How many writers must close the channel: each replica that writes it, or the driver."""
        if channel in self.replica_channels:
            return self.plan.stage(self.replica_channels[channel]).num_replicas
        num_replicas = sum(self.plan.stage(stage).num_replicas for stage in self.graph.writers(channel))
        return num_replicas + (channel in self.graph.feeds)

    @cached_property
    def replica_channels(self) -> dict[str, str]:
        """Additional channels -> their stages: on each, the first ranks of replicas broadcast what they took."""
        split = [placed.stage for placed in self.plan.stages if placed.num_ranks_per_replica > 1]
        return {f"{stage}, within its replicas": stage for stage in split}

    def port(
        self,
        channel: str,
        address: ItemAddress,
        *,
        other_end: Sequence[str],
        turn: Sequence[str] = (),
        replica: int = 0,
    ) -> Port:
        """One end of a channel whose other end is the stages `other_end`.

        Args:
            turn: the stages in the turn of this end; empty for the driver.
            replica: the replica of a reader.
        """
        granularity, num_partitions, ordered = WHOLE_BATCH, 1, False
        for reader in self.graph.readers(channel):
            placed, ordered = self.plan.stage(reader), self.flow.stages[reader].ordered
            granularity = placed.granularity
            # Whole batches cannot go to whichever reader comes first.
            if ordered or granularity == WHOLE_BATCH or self.graph.stage(reader).dispatch == "key":
                num_partitions = placed.num_replicas
        return Port(
            channel=channel,
            address=address,
            granularity=granularity,
            num_partitions=num_partitions,
            partition=replica % num_partitions,
            ordered=ordered,
            of_own_turn=bool(other_end) and set(other_end) <= set(turn),
        )

    @cached_property
    def leased_devices(self) -> dict[int, frozenset[int]]:
        """Turn -> its devices that it shares with another turn, or with a stage whose state is offloaded (worker groups
        of other flows may have state there). Turns without such devices are left out and need no lease."""
        pairs = {(placed.turn, device) for placed in self.plan.stages for device in placed.devices}
        num_turns = Counter(device for _, device in pairs)
        leaves = {(placed.turn, device) for placed in self.plan.stages if placed.offload for device in placed.devices}
        leased: dict[int, set[int]] = defaultdict(set)
        for turn, device in pairs:
            if num_turns[device] > 1 or (turn, device) in leaves:
                leased[turn].add(device)
        return {turn: frozenset(devices) for turn, devices in leased.items()}

    def groups_of(self, turn: int) -> frozenset[str]:
        """The worker groups that have a stage in a turn."""
        return frozenset(self.graph.stage(placed.stage).worker for placed in self.plan.stages if placed.turn == turn)

    @cached_property
    def _turns(self) -> dict[str, tuple[str, ...]]:
        return {name: turn for turn in self.graph.turns() for name in turn}

    def _are_renewed(self, worker: str, versions: Mapping[WeightEdge, int]) -> bool:
        """Whether every run serves newer weights than the one before, and no other stage of the group serves the old
        ones. A weight sync may drop weights once they are received."""
        if self.graph.max_staleness:  # the first runs all serve the same
            return False
        sources = {edge.source for edge in versions if edge.target == worker}
        is_alone = sum(stage.worker == worker for stage in self.graph.stages) == 1
        return is_alone and bool(sources) and sources <= {stage.worker for stage in self.graph.stages if stage.trains}

    def _stage_call(
        self,
        name: str,
        rank: int,
        addresses: Mapping[str, ItemAddress],
        versions: Mapping[WeightEdge, int],
        context: StepContext,
    ) -> StageCall:
        stage, placed, turn = self.graph.stage(name), self.plan.stage(name), self._turns[name]
        replica = rank // placed.num_ranks_per_replica
        readers, writers = self.graph.readers, self.graph.writers
        return StageCall(
            stage=name,
            method=self.flow.stages[name].method,
            context=context,
            reads=tuple(
                self.port(channel, addresses[channel], other_end=writers(channel), turn=turn, replica=replica)
                for channel in stage.reads
            ),
            writes=tuple(
                self.port(channel, addresses[channel], other_end=readers(channel), turn=turn)
                for channel in stage.writes
            ),
            lease_turn=placed.turn if placed.turn in self.leased_devices else None,
            offloads=placed.offload,
            discards=placed.offload and self._are_renewed(stage.worker, versions),
            receives={edge.name: version for edge, version in versions.items() if edge.target == stage.worker},
            publishes=tuple(edge.name for edge in versions if edge.source == stage.worker and stage.trains),
            trains=stage.trains,
            offered=next((edge.name for edge in self.flow.offered if edge.target == stage.worker), ""),
            replica_channel=next(
                (addresses[channel] for channel, owner in self.replica_channels.items() if owner == name), None
            ),
        )
