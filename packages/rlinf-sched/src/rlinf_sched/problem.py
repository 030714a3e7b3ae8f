"""A planning problem: a flow, its profiles, a cluster and the size of a step. One JSON document, usable on its own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf_sched import strict_json
from rlinf_sched.cluster import Cluster
from rlinf_sched.errors import PlanError, ProblemError, did_you_mean, raise_problems
from rlinf_sched.flow_graph import FlowGraph, WeightEdge
from rlinf_sched.plan import StagePlan
from rlinf_sched.profile import InstanceProfile, Profiles, StageProfile

FORMAT_VERSION = 1
MAX_ITEMS = 10_000_000
"""Maximum number of items of one stage in one step, including its rounds: what a simulation can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The input of the planner."""

    flow: FlowGraph
    profiles: Profiles
    cluster: Cluster
    num_items: int
    """Items fed into a step (prompt groups, environment slots); every stage processes each of them."""
    pinned_devices: Mapping[str, int] = field(default_factory=dict)
    """Worker group -> its required number of devices. Other groups are free."""
    allow_offload: bool = True

    def with_staleness(self, max_staleness: int) -> "Problem":
        """The same problem with generation that may run ahead of training by so many steps."""
        return replace(self, flow=replace(self.flow, max_staleness=max_staleness))

    def profile(self, stage: str) -> StageProfile:
        """Raises: ProblemError that says which stages have profiles."""
        try:
            return self.profiles.stages[stage]
        except KeyError:
            suggestion = did_you_mean(stage, self.profiles.stages)
            raise ProblemError(f"profiles.stages has no {stage!r}{suggestion}") from None

    def synced_bytes(self, edge: WeightEdge) -> int:
        """Bytes of weights that a sync over the edge moves: the largest value given by a stage of either end."""
        names = self.flow.workers[edge.source] + self.flow.workers[edge.target]
        return max(self.profile(name).weights_bytes for name in names)

    def sync_latency_s(self, edge: WeightEdge) -> float:
        """Seconds of a sync over the edge besides its links: latency, and packing and loading a whole model."""
        links = self.cluster.links
        return links.latency_s + self.synced_bytes(edge) / (links.sync_bytes_per_s or math.inf)

    def state_bytes(self, stage: str, instance: InstanceProfile, num_devices: int) -> int:
        """Bytes of state on each of `num_devices` devices for the whole worker group of the stage.

        A group keeps one state for all its stages, so this is the largest value given by one of them for this many
        instances of this size; and the versions of its weights, if steps overlap.
        """
        return self._moved_bytes(stage, instance, num_devices) + self.versions_bytes(stage, num_devices)

    def versions_bytes(self, stage: str, num_devices: int) -> int:
        """Bytes of published weights on each of `num_devices` devices of the stage's worker group, if steps overlap: up
        to `max_staleness` + 1 versions that have yet to be received."""
        if not self.flow.max_staleness:
            return 0
        worker = self.flow.stage(stage).worker
        of_version = sum(edge.kept_bytes for edge in self.flow.weight_edges if edge.source == worker)
        return -(-(self.flow.max_staleness + 1) * of_version // max(num_devices, 1))

    def _moved_bytes(self, stage: str, instance: InstanceProfile, num_devices: int) -> int:
        """Bytes of the state that offload moves."""
        names = self.flow.workers[self.flow.stage(stage).worker]
        num_ranks = num_devices // instance.num_devices if instance.num_devices else instance.num_ranks or 1
        serving = (self.profile(name).serving(instance, num_ranks) for name in names)
        return max((other.resident_bytes(num_devices) for other in serving if other), default=0)

    def switch_s(self, stage: str, instance: InstanceProfile, num_devices: int) -> tuple[float, float]:
        """Onload and offload time of the state: from the profile, or its bytes over the host link."""
        moved_s = self._moved_bytes(stage, instance, num_devices) / self.cluster.links.host_bytes_per_s
        return (
            moved_s if instance.onload_s is None else instance.onload_s,
            moved_s if instance.offload_s is None else instance.offload_s,
        )

    def instance(self, placed: StagePlan) -> InstanceProfile:
        """The profile of the stage for the devices of its instances: that of their product, or the one without a
        product, the only one valid for devices of several products; among several numbers of instances, the nearest.

        Raises:
            PlanError: there is no such profile; names the existing ones.
        """
        if placed.num_ranks_per_replica > 1:
            raise PlanError(
                f"plan.{placed.stage}.num_ranks_per_replica={placed.num_ranks_per_replica}: nothing is predicted for "
                "replicas of several ranks; use 1"
            )
        span = max(1, len(placed.devices) // placed.num_ranks) if placed.devices else 0
        width = self.flow.devices_per_rank(self.flow.stage(placed.stage).worker)
        if width and span not in (0, width):
            raise PlanError(
                f"plan.{placed.stage}.num_ranks={placed.num_ranks}: an instance spans {span} of its "
                f"{len(placed.devices)} devices, but flow.stages.{placed.stage}.devices_per_rank={width}; use that"
            )
        profile = self.profile(placed.stage)
        products: set[str] = set()
        if any(choice.device_name for choice in profile.instances):
            products = {self.cluster.devices[index].product for index in placed.devices}
        serving = {"", *products} if len(products) == 1 else {""}
        choices = [choice for choice in profile.instances if choice.device_name in serving]
        of_products = {choice.device_name: choice for choice in choices if choice.num_devices == span}
        fitting = [choice for one in of_products.values() if (choice := profile.serving(one, placed.num_ranks))]
        if not fitting and len(products) > 1:
            named = ", ".join(dict.fromkeys(choice.device_name for choice in profile.instances if choice.device_name))
            raise PlanError(
                f"plan.{placed.stage}.devices are of several products ({', '.join(sorted(products))}), but "
                f"profiles.stages.{placed.stage}.instances hold for one each ({named}); use devices of one product, or "
                f"give an instance without device_name and with num_devices={span}, whose times hold for all"
            )
        if not fitting:
            spans = ", ".join(str(choice.num_devices) for choice in choices) or "nothing for these devices"
            raise PlanError(
                f"plan.{placed.stage}.num_ranks={placed.num_ranks}: an instance spans {span} of its "
                f"{len(placed.devices)} devices, but profiles.stages.{placed.stage}.instances have num_devices "
                f"{spans}; use one of those"
            )
        return max(fitting, key=lambda choice: choice.device_name != "")

    def cores(self, stage: str, devices: Sequence[int]) -> float:
        """Cores that an instance of the stage keeps busy per device; for an instance without devices: on the host."""
        cores = self.profile(stage).cores
        if cores is None:
            return float(not devices or self.cluster.devices[devices[0]].kind == "cpu")
        return cores

    def most_on_host(self, stage: str) -> int:
        """Maximum useful number of instances of a host stage: the profile's limit, and at most the node's cores. 0: no
        limit."""
        most, cores = self.profile(stage).max_instances, self.cores(stage, ())
        if not (self.cluster.cpu_cores and cores):
            return most
        at_once = max(1, int(self.cluster.cpu_cores / cores))
        return min(most or at_once, at_once)

    def choices(self, stage: str) -> tuple[int, ...]:
        """Items per hand-over that the stage may have, ascending; `num_items` is the whole batch."""
        record = self.flow.stage(stage)
        if record.whole_batch:
            return (self.num_items,)
        if record.granularities:
            return tuple(sorted({min(size or self.num_items, self.num_items) for size in record.granularities}))
        sizes, size = {self.num_items}, record.item_multiple
        while size < self.num_items:
            sizes.add(size)
            size *= 2
        return tuple(sorted(sizes))

    def validate(self) -> None:
        """Checks the whole problem.

        Raises:
            ProblemError: with every mistake found, each naming its key.
            FlowError, ClusterError: the flow or the cluster itself is invalid.
        """
        self.flow.validate()
        raise_problems(ProblemError, f"problem of flow {self.flow.name!r}", _problems(self))

    def to_json(self) -> str:
        """The problem as versioned JSON text with sorted keys; equal problems give equal text."""
        return strict_json.dump(self, format_version=FORMAT_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Problem":
        """Reads what `to_json` wrote, or a person; does not call `validate`.

        Raises:
            ProblemError: malformed JSON, unknown or missing keys, wrong types; names the place.
        """
        return strict_json.load(text, cls, root="problem", format_version=FORMAT_VERSION, error=ProblemError)

    @classmethod
    def from_tree(cls, tree: Any) -> "Problem":
        """Like `from_json`, from the output of a YAML parser."""
        return strict_json.load_tree(tree, cls, root="problem", format_version=FORMAT_VERSION, error=ProblemError)


def _problems(problem: Problem) -> Iterator[str]:
    names = [stage.name for stage in problem.flow.stages]
    if not 1 <= problem.num_items <= MAX_ITEMS:
        yield f"num_items={problem.num_items} must be from 1 to {MAX_ITEMS:,}"
    for name in names:
        if name not in problem.profiles.stages:
            yield f"profiles.stages.{name} is missing{did_you_mean(name, problem.profiles.stages)}"
    for name in problem.profiles.stages:
        if name not in names:
            yield f"profiles.stages.{name}: the flow has no such stage{did_you_mean(name, names)}"
    yield from problem.profiles.problems()
    for group, count in problem.pinned_devices.items():
        if group not in problem.flow.workers:
            yield f"pinned_devices.{group}: there is no such worker group{did_you_mean(group, problem.flow.workers)}"
        available = len(problem.cluster.compute_devices)
        if not 1 <= count <= available:
            yield f"pinned_devices.{group}={count}: the cluster has {available} devices to place stages on"
    for cycle in problem.flow.cycles():
        rounds = {name: problem.profiles.stages[name].rounds for name in cycle if name in problem.profiles.stages}
        if len(set(rounds.values())) > 1:
            settings = ", ".join(f"{name}.rounds={count}" for name, count in rounds.items())
            yield (
                f"profiles.stages: {settings}, but the stages of the cycle {' <-> '.join(cycle)} go round together; "
                "give them the same"
            )
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}
    for stage in problem.flow.stages:
        profile = problem.profiles.stages.get(stage.name)
        if profile is None:
            continue
        on_host = [i for i, instance in enumerate(profile.instances) if instance.num_devices == 0]
        if stage.needs_device and on_host:
            yield f"profiles.stages.{stage.name}.instances[{on_host[0]}].num_devices=0, but the stage needs a device"
        if not stage.needs_device and len(on_host) < len(profile.instances):
            yield f"profiles.stages.{stage.name}: the stage needs no device, so its instances have num_devices=0"
        width = problem.flow.devices_per_rank(stage.worker) if stage.needs_device else 0
        spans = sorted({instance.num_devices for instance in profile.instances})
        if width and spans and width not in spans:
            allowed = " or ".join(str(span) for span in spans if span)
            yield (
                f"flow.stages.{stage.name}.devices_per_rank={width}, but profiles.stages.{stage.name}.instances have "
                f"num_devices {', '.join(map(str, spans))}; use {allowed}, or 0 for any of them"
            )
        if profile.rounds > 1 and stage.name not in in_cycle:
            yield f"profiles.stages.{stage.name}.rounds={profile.rounds}, but the stage is in no cycle; use 1"
        if profile.rounds * problem.num_items > MAX_ITEMS >= problem.num_items:
            most = MAX_ITEMS // max(problem.num_items, 1)
            yield f"profiles.stages.{stage.name}.rounds={profile.rounds} must be at most {most:,} at this num_items"
    yield from _cycle_problems(problem.flow)


def _cycle_problems(flow: FlowGraph) -> Iterator[str]:
    """A cycle needs an initial item: one that enters from outside, or an environment's reset."""
    for cycle in flow.cycles():
        stages = [flow.stage(name) for name in cycle]
        inner = {channel for stage in stages for channel in stage.writes} - set(flow.feeds)
        outer_writes = {channel for stage in flow.stages if stage.name not in cycle for channel in stage.writes}
        enters = any(channel not in inner or channel in outer_writes for stage in stages for channel in stage.reads)
        if not enters and all(stage.role != "env" for stage in stages):
            channel = next(channel for stage in stages for channel in stage.reads)
            yield (
                f"flow.feeds: the cycle {' <-> '.join(cycle)} has no initial item, as nothing enters it from outside; "
                f"add one of its channels, for example feeds: [{channel}], or give the stage that begins role: env"
            )
