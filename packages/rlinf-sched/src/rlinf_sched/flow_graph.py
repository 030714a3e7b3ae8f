"""The macro flow as plain data: stages joined by named channels, and weight sync edges.

A flow graph describes dependencies; it has no device, no mode and no batch size, which belong to a plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from rlinf_sched import strict_json
from rlinf_sched.components import strongly_connected_components
from rlinf_sched.errors import FlowError, did_you_mean, raise_problems

Dispatch = Literal["any", "key"]
"""How items reach the ranks of a stage: `any` takes the next item, `key` binds a key to a rank."""

FORMAT_VERSION = 1
MAX_STALENESS = 64
"""Maximum number of steps that generation may run ahead. The simulator runs 12 for each, 780 with this, so a mistyped
number would keep it busy for hours. AReaL, which bounds staleness too, allows 4 in its guide to asynchronous
training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One worker method in the flow.

    Example: the stage that samples completions in GRPO:
        Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",))
    """

    name: str
    """Name of the stage, unique in the flow."""
    worker: str
    """The worker group whose method this is. Stages of one group run in the same processes, on the same devices."""
    role: str
    """actor, rollout, reference, critic, reward, env, or a custom word. "critic" counts as training."""
    reads: tuple[str, ...] = ()
    """Channels the method takes from."""
    writes: tuple[str, ...] = ()
    """Channels the method puts into. A stage may read what it writes (unfinished items go round again)."""
    dispatch: Dispatch = "any"
    """How the items of its input channels are distributed over the group's replicas.

    "any": items go to the next replica that asks (load balancing; the replica of an item may vary between runs).
    "key": items carry an integer key, and the replica is `key % num_replicas`. So all items of one key go to the same
    replica, in the order they were put, as a stage with state per key needs (an environment slot, a conversation).
    """
    needs_device: bool = True
    """False: the stage runs on the host only (a rule-checked reward), holds no device and never waits for one."""
    trains: bool = False
    """True: the stage changes the weights its worker group holds."""
    whole_batch: bool = False
    """True: the method must see every item of a step in one hand-over, so every plan gives it granularity 0."""
    item_multiple: int = 1
    """A hand-over holds a multiple of this many items (a micro-batch size, a data-parallel degree); at least 1."""
    granularities: tuple[int, ...] = ()
    """The items per hand-over to choose from, 0 = the whole batch. Empty: item_multiple times any power of two, and the
    whole batch."""
    num_parts: int = 0
    """Number of equal parts of the stage's work (shards of a batch, groups of environments), which the number of ranks
    must divide. 0: any number of ranks."""
    devices_per_rank: int = 0
    """Devices that each rank computes on (a tensor-parallel engine). 0: a rank gets the devices of the plan and
    computes on the first."""

    def __post_init__(self) -> None:
        for key, channels in (("reads", self.reads), ("writes", self.writes)):
            if isinstance(channels, str):  # would be taken apart into letters
                raise FlowError(f"stage {self.name!r}: {key}={channels!r} is a string; write {key}=({channels!r},)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEdge:
    """After `source` has trained, `target` serves its weights; both are worker groups."""

    source: str
    target: str
    kept_bytes: int = 0
    """Bytes of a published version that all devices of `source` together keep until `target` has received it; with
    `max_staleness` k up to k + 1 versions are kept. 0: versions are kept in host memory."""

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.target}"

    @staticmethod
    def source_of(name: str) -> str:
        """The source of the edge with this `name`."""
        return name.partition(" -> ")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowGraph:
    """Stages, the channels between them, and the weights that flow back.

    Example: prompts -> rollout -> samples -> actor, and the actor's weights back to rollout:
        FlowGraph(
            name="grpo",
            stages=(
                Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
                Stage(name="actor", worker="actor", role="actor", reads=("samples",), trains=True),
            ),
            weight_edges=(WeightEdge(source="actor", target="rollout"),),
            feeds=("prompts",),
        )
    """

    name: str
    stages: tuple[Stage, ...]
    """The stages in the order of declaration, which breaks ties wherever the channels leave the order open."""
    weight_edges: tuple[WeightEdge, ...] = ()
    feeds: tuple[str, ...] = ()
    """Channels the driver writes. A stage may write to them too (items that return)."""
    collects: tuple[str, ...] = ()
    """Channels the driver reads. No stage may read them: the driver and the stage would take each other's items."""
    item_bytes: Mapping[str, int] = field(default_factory=dict)
    """Channel -> bytes of one of its items. A channel that is not named here costs nothing to move."""
    max_staleness: int = 0
    """Maximum number of optimizer steps between the weights that generated an item and those it trains. 0: synchronous,
    each step's generation begins with the weights of the step before. At most 64."""

    @property
    def channels(self) -> tuple[str, ...]:
        """Every channel name, in order of first mention: feeds, then each stage's reads and writes, then collects."""
        names = list(self.feeds)
        for stage in self.stages:
            names += [*stage.reads, *stage.writes]
        return tuple(dict.fromkeys([*names, *self.collects]))

    @property
    def workers(self) -> dict[str, tuple[str, ...]]:
        """Worker group -> names of its stages, groups in order of first appearance."""
        groups: dict[str, tuple[str, ...]] = {}
        for stage in self.stages:
            groups[stage.worker] = (*groups.get(stage.worker, ()), stage.name)
        return groups

    @property
    def training_groups(self) -> tuple[str, ...]:
        """Worker groups with a device and a stage that trains or plays the role "critic": the training side."""
        training = {stage.worker for stage in self.stages if stage.trains or stage.role == "critic"}
        return tuple(group for group in self._device_groups() if group in training)

    @property
    def generation_groups(self) -> tuple[str, ...]:
        """The other worker groups with a device (rollout, reference, env, ...): the generation side."""
        training = self.training_groups
        return tuple(group for group in self._device_groups() if group not in training)

    def _device_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stage.worker for stage in self.stages if stage.needs_device))

    def devices_per_rank(self, worker: str) -> int:
        """Devices that each rank of the worker group computes on, as declared by its stages; 0: any number."""
        return max((stage.devices_per_rank for stage in self.stages if stage.worker == worker), default=0)

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            FlowError: there is none; says which there are.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise FlowError(f"flow {self.name!r} has no stage {name!r}{did_you_mean(name, [s.name for s in self.stages])}")

    def writers(self, channel: str) -> tuple[str, ...]:
        """Names of the stages that put into the channel (the driver, for a feed, is not among them)."""
        return tuple(stage.name for stage in self.stages if channel in stage.writes)

    def readers(self, channel: str) -> tuple[str, ...]:
        """Names of the stages that take from the channel (the driver, for a collect, is not among them)."""
        return tuple(stage.name for stage in self.stages if channel in stage.reads)

    def successors(self) -> dict[str, tuple[str, ...]]:
        """Stage -> the stages that read a channel it writes, in order of declaration; including itself if it reads its
        own."""
        return {
            stage.name: tuple(other.name for other in self.stages if set(stage.writes) & set(other.reads))
            for stage in self.stages
        }

    def turns(self) -> tuple[tuple[str, ...], ...]:
        """The strongly connected components of the stages, in topological order.

        Stages of one cycle feed each other and must run at the same time, so they share a turn; otherwise a turn holds
        one stage. Where channels leave the order open it follows the order of declaration.
        """
        index = {stage.name: i for i, stage in enumerate(self.stages)}
        edges = [[index[other] for other in others] for others in self.successors().values()]
        components = strongly_connected_components(edges)
        return tuple(tuple(self.stages[i].name for i in component) for component in components)

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """The turns that are cycles: several stages, or one that reads a channel it writes."""
        successors = self.successors()
        return tuple(turn for turn in self.turns() if len(turn) > 1 or any(name in successors[name] for name in turn))

    def validate(self) -> None:
        """Checks that the flow can run.

        Raises:
            FlowError: with every mistake found, one a line where there are several.
        """
        subject = f"flow {self.name!r}"
        raise_problems(FlowError, subject, _problems(self), prefix=f"{subject}: ")

    def to_json(self) -> str:
        """The graph as JSON text: keys sorted, versioned, equal graphs give equal text."""
        return strict_json.dump(self, format_version=FORMAT_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "FlowGraph":
        """Reads what `to_json` wrote; does not call `validate`.

        Raises:
            FlowError: malformed JSON, unknown or missing keys, wrong types; names the place (`flow.stages[1].reads`).
        """
        return strict_json.load(text, cls, root="flow", format_version=FORMAT_VERSION, error=FlowError)


def _problems(graph: FlowGraph) -> Iterator[str]:
    if not graph.stages:
        yield "it has no stages; add at least one"
        return
    names = [stage.name for stage in graph.stages]
    for name in _repeated(names):
        yield f"stage {name!r} is declared {names.count(name)} times; give each stage its own name"
    if _repeated(names):
        return  # with ambiguous names every further message would mislead
    for stage in graph.stages:
        yield from _stage_problems(stage)
    yield from _channel_problems(graph)
    for channel, num_bytes in graph.item_bytes.items():
        if channel not in graph.channels:
            yield f"item_bytes.{channel}: there is no such channel{did_you_mean(channel, graph.channels)}"
        if num_bytes < 0:
            yield f"item_bytes.{channel}={num_bytes} must not be negative"
    if not 0 <= graph.max_staleness <= MAX_STALENESS:
        yield f"max_staleness={graph.max_staleness} must be from 0, synchronous, to {MAX_STALENESS}"
    yield from _group_problems(graph)
    yield from _weight_problems(graph)
    for cycle in graph.cycles():
        for name in cycle:
            if graph.stage(name).whole_batch:
                yield (
                    f"stage {name!r} has whole_batch=True but is part of the cycle {' <-> '.join(cycle)}: it would "
                    "wait for the end of a channel that only ends after it; set whole_batch=False or break the cycle"
                )


def _stage_problems(stage: Stage) -> Iterator[str]:
    for key, word in (("name", stage.name), ("worker", stage.worker), ("role", stage.role)):
        if not word or word != word.strip():
            yield f"stage {stage.name!r}: {key}={word!r} is empty or has blanks around it; give it a plain name"
    for key, channels in (("reads", stage.reads), ("writes", stage.writes)):
        for channel in _repeated(channels):
            yield f"stage {stage.name!r}: {key} names channel {channel!r} twice; name it once"
    if not stage.reads and not stage.writes:
        yield f"stage {stage.name!r} reads and writes no channel, so nothing joins it to the flow; give it a channel"
    if stage.dispatch not in get_args(Dispatch):
        yield f"stage {stage.name!r}: dispatch={stage.dispatch!r}{did_you_mean(stage.dispatch, get_args(Dispatch))}"
    if stage.item_multiple < 1:
        yield f"stage {stage.name!r}: item_multiple={stage.item_multiple} must be at least 1"
    elif wrong := [size for size in stage.granularities if size < 0 or size % stage.item_multiple]:
        yield (
            f"stage {stage.name!r}: granularities: {wrong[0]} is no multiple of item_multiple={stage.item_multiple}; "
            "0 is the whole batch"
        )
    if stage.num_parts < 0:
        yield f"stage {stage.name!r}: num_parts={stage.num_parts} must not be negative"
    if stage.devices_per_rank < 0:
        yield f"stage {stage.name!r}: devices_per_rank={stage.devices_per_rank} must not be negative"


def _channel_problems(graph: FlowGraph) -> Iterator[str]:
    for key, channels in (("feeds", graph.feeds), ("collects", graph.collects)):
        for channel in _repeated(channels):
            yield f"{key} names channel {channel!r} twice; name it once"
    for channel in graph.channels:
        writers, readers = graph.writers(channel), graph.readers(channel)
        if not channel or channel != channel.strip():
            yield f"a channel is called {channel!r}, empty or with blanks around it; give it a plain name"
        if not writers and channel not in graph.feeds:
            by = " and ".join([*map(repr, readers), *(["the driver (collects)"] if channel in graph.collects else [])])
            yield (
                f"channel {channel!r} has no writer but is read by {by}; let a stage write it or add it to feeds"
                + _close_channel(channel, graph)
            )
        if not readers and channel not in graph.collects:
            by = " and ".join([*map(repr, writers), *(["the driver (feeds)"] if channel in graph.feeds else [])])
            yield (
                f"channel {channel!r} has no reader but is written by {by}; let a stage read it or add it to collects"
                + _close_channel(channel, graph)
            )
        if readers and channel in graph.collects:
            yield (
                f"channel {channel!r} is read by {' and '.join(map(repr, readers))} and collected by the driver, which "
                "would take each other's items; write the results to a channel of their own"
            )


def _close_channel(channel: str, graph: FlowGraph) -> str:
    """A hint at another channel with a similar name: most channels with only one end are misspelt."""
    hint = did_you_mean(channel, [other for other in graph.channels if other != channel])
    return hint if "did you mean" in hint else ""


def _group_problems(graph: FlowGraph) -> Iterator[str]:
    for worker, names in graph.workers.items():
        on_device = [name for name in names if graph.stage(name).needs_device]
        if on_device and len(on_device) < len(names):
            on_host = [name for name in names if name not in on_device]
            yield (
                f"worker group {worker!r} mixes stages with a device ({', '.join(on_device)}) and without one "
                f"({', '.join(on_host)}); give all the same needs_device, or move some to another group"
            )
        spans = {name: graph.stage(name).devices_per_rank for name in names if graph.stage(name).devices_per_rank}
        if len(set(spans.values())) > 1:
            settings = ", ".join(f"{name}.devices_per_rank={span}" for name, span in spans.items())
            yield f"worker group {worker!r}: {settings}, but its stages have the same ranks; give all one number, or 0"


def _weight_problems(graph: FlowGraph) -> Iterator[str]:
    workers = graph.workers
    seen = set()
    for edge in graph.weight_edges:
        text = f"weights {edge.source!r} -> {edge.target!r}"
        unknown = [group for group in (edge.source, edge.target) if group not in workers]
        for group in unknown:
            yield f"{text}: there is no worker group {group!r}{did_you_mean(group, workers)}"
        if unknown:
            continue
        if edge in seen:
            yield f"{text} is declared twice; declare it once"
        seen.add(edge)
        if edge.kept_bytes < 0:
            yield f"{text}: kept_bytes={edge.kept_bytes} must not be negative"
        if edge.source == edge.target:
            yield f"{text} leads from a worker group to itself; remove it"
        elif not any(graph.stage(name).trains for name in workers[edge.source]):
            swapped = any(graph.stage(name).trains for name in workers[edge.target])
            advice = "the two ends look swapped" if swapped else "set trains=True on the stage that trains it"
            yield f"{text}: no stage of {edge.source!r} trains, so it has no new weights to send; {advice}"


def _repeated(names: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]
