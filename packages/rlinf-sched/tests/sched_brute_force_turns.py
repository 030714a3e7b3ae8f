"""Everything that one turn of a flow may be, in plain loops: a stage on some devices, or a cycle of two.

Only for one pool of devices, stages that need one, and worker groups of a single stage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rlinf_sched import InstanceProfile, Problem, StageProfile
from rlinf_sched.planner.arrivals import arriving_costs
from rlinf_sched.stage_time import stage_times


@dataclass(frozen=True)
class Option:
    """What a turn may be: the columns of docs/scheduling.md."""

    devices: int
    instances: int
    out: tuple[float, float, float]
    half: float
    tail: float
    period: float
    """Seconds of a step among others that follow it closely; alone, where none may."""
    further: float
    """Seconds that each further step adds to several begun together; of a step alone, where none may."""
    resident: int
    peak: int
    offloads: bool
    received: tuple[float, ...]
    """Bytes that a device of the target receives, for each weight edge."""
    sync_s: float = 0.0


@dataclass(frozen=True)
class _Place:
    """One stage in one place."""

    problem: Problem
    name: str
    instance: InstanceProfile
    count: int
    granularity: int
    offload: bool

    @property
    def profile(self) -> StageProfile:
        return self.problem.profile(self.name)

    @property
    def devices(self) -> int:
        return self.count * self.instance.num_devices

    @property
    def state(self) -> int:
        return self.instance.state_bytes + -(-self.instance.sharded_state_bytes // self.devices)

    @property
    def share(self) -> int:
        """Most items that an instance gets."""
        return -(-self.problem.num_items // self.count)

    @property
    def at_once(self) -> int:
        """Most items that an instance holds."""
        size = self.share if self.profile.batching == "continuous" else min(self.granularity, self.share)
        return min(size, self.instance.max_items or size)

    @property
    def peak(self) -> int:
        return self.state + self.instance.work_bytes + self.instance.item_work_bytes * self.at_once

    @property
    def switch_s(self) -> tuple[float, float]:
        """Seconds of an onload and of an offload."""
        if not self.offload:
            return 0.0, 0.0
        moved_s = self.state / self.problem.cluster.links.host_bytes_per_s
        profiled_s = self.instance.onload_s, self.instance.offload_s
        onload_s, offload_s = (moved_s if seconds is None else seconds for seconds in profiled_s)
        return onload_s, offload_s


def options_of(problem: Problem, names: Sequence[str]) -> list[Option]:
    """The options of the turn that consists of these stages, whether their memory fits or not."""
    if len(names) == 2:
        return list(_cycles(problem, *names))
    assert not any(names[0] in cycle for cycle in problem.flow.cycles()), "a cycle of one stage"
    return list(_alone(problem, names[0]))


def _places(problem: Problem, name: str) -> Iterator[_Place]:
    profile, stage = problem.profile(name), problem.flow.stage(name)
    pinned = problem.pinned_devices.get(stage.worker)
    for instance in profile.instances:
        for count in range(1, problem.cluster.num_devices // instance.num_devices + 1):
            if profile.max_instances and count > profile.max_instances:
                continue
            if stage.num_parts % count:
                continue
            if pinned and count * instance.num_devices != pinned:
                continue
            if instance is not _measured_nearest(profile, instance, count):
                continue
            for granularity in problem.choices(name):
                for offload in (False, True)[: 1 + problem.allow_offload]:
                    yield _Place(problem, name, instance, count, granularity, offload)


def _measured_nearest(profile: StageProfile, like: InstanceProfile, count: int) -> InstanceProfile:
    """The profile on the same devices whose number of instances is nearest by ratio; the lower of two equally near."""
    alike = sorted((i for i in profile.instances if i.num_devices == like.num_devices), key=lambda i: i.num_ranks)
    return min(alike, key=lambda i: Fraction(max(i.num_ranks, count), min(i.num_ranks, count)) if i.num_ranks else 1)


def _received(problem: Problem, places: Sequence[_Place]) -> tuple[float, ...]:
    targets = [(problem.flow.stage(place.name).worker, place.instance.num_devices) for place in places]
    return tuple(
        max((problem.synced_bytes(edge) / num for worker, num in targets if edge.target == worker), default=0.0)
        for edge in problem.flow.weight_edges
    )


def _alone(problem: Problem, name: str) -> Iterator[Option]:
    costs = arriving_costs(problem)[name]
    for place in _places(problem, name):
        times = stage_times(
            place.instance,
            place.profile.batching,
            costs,
            [place.count],
            [place.granularity],
            num_steps=problem.flow.max_staleness + 1,
        )
        first, middle, last, half, tail, period, further = times[0].tolist()
        onload_s, offload_s = place.switch_s
        switch_s = onload_s + offload_s
        if not problem.flow.max_staleness:
            period = further = last + switch_s
        yield Option(
            devices=place.devices,
            instances=place.count,
            out=(first + onload_s, middle + onload_s, last + switch_s),
            half=half + offload_s,
            tail=tail + offload_s,
            period=period,
            further=further,
            resident=0 if place.offload else place.state,
            peak=place.peak,
            offloads=place.offload,
            received=_received(problem, [place]),
        )


def _cycles(problem: Problem, one: str, other: str) -> Iterator[Option]:
    """Both on the same devices or each on its own; one granularity, both or neither offload."""
    for x in _places_worth_trying(problem, one):
        for y in _places_worth_trying(problem, other):
            if x.granularity != y.granularity or x.offload != y.offload:
                continue
            for together in (True, False):
                if not together or x.devices == y.devices:
                    yield _cycle(problem, x, y, together)


def _places_worth_trying(problem: Problem, name: str) -> Iterator[_Place]:
    """The even ones, and of the others those that shorten a round by a tenth, the first of the shortest round, the one
    with the least state, and one that has no other beside it."""
    alike: dict[object, list[_Place]] = {}
    for place in _places(problem, name):
        alike.setdefault((place.instance, place.granularity, place.offload), []).append(place)
    for places in alike.values():
        rounds_s = [_of_a_round(place)[1] for place in places]
        least_s = math.inf
        for place, round_s in zip(places, rounds_s, strict=True):
            shortest = round_s < least_s and round_s == min(rounds_s)
            leanest = place is places[-1] and (place.instance.sharded_state_bytes > 0 or len(places) == 1)
            gains = _is_even(place) or round_s < 0.9 * least_s or shortest
            if gains:
                least_s = min(least_s, round_s)
            if gains or leanest:
                yield place


def _is_even(place: _Place) -> bool:
    """Whether the items are shared out evenly over the instances, and each share in whole hand-overs."""
    return place.share * place.count == place.problem.num_items and (
        place.granularity >= place.share or place.share % place.granularity == 0
    )


def _cycle(problem: Problem, x: _Place, y: _Place, together: bool) -> Option:
    flow, links = problem.flow, problem.cluster.links
    (x_once, x_all, x_longer), (y_once, y_all, y_longer) = _of_a_round(x), _of_a_round(y)
    latency = x_once + y_once
    if together:
        busiest, following = x_all + y_all, x_all + y_all - latency
    else:
        for channel in (*flow.stage(x.name).reads, *flow.stage(y.name).reads):
            latency += links.latency_s + x.granularity * flow.item_bytes.get(channel, 0) / links.node_bytes_per_s
        busiest, following = max(x_all, y_all), max(x_all - x_once, y_all - y_once)
    only_one_chunk = x.granularity == problem.num_items
    of_one_chunk = latency * max(x_longer, y_longer)
    a_round = of_one_chunk if only_one_chunk else max(of_one_chunk, busiest)
    earlier = (x.profile.rounds - 1) * a_round
    first, last = earlier + latency, earlier + latency + following
    step_s = max(x.instance.step_s, y.instance.step_s)
    onload_s, offload_s = (max(times) for times in zip(x.switch_s, y.switch_s, strict=True))
    device_state = [0 if place.offload else place.state for place in (x, y)]
    fold = sum if together else max
    received, workers = _received(problem, [x, y]), {flow.stage(place.name).worker for place in (x, y)}
    within = [{edge.source, edge.target} <= workers for edge in flow.weight_edges]
    rate = links.node_bytes_per_s if together or problem.cluster.num_nodes == 1 else links.network_bytes_per_s
    period = earlier + busiest + step_s if flow.max_staleness else last + step_s + onload_s + offload_s
    return Option(
        devices=x.devices if together else x.devices + y.devices,
        instances=x.count + y.count,
        out=(first + onload_s, (first + last) / 2 + onload_s, last + step_s + onload_s + offload_s),
        half=(first + last) / 2 + step_s + offload_s,
        tail=x.profile.rounds * latency + step_s + offload_s,
        period=period,
        further=period,
        resident=fold(device_state),
        peak=fold([x.peak, y.peak]),
        offloads=x.offload,
        received=tuple(0.0 if inside else size for inside, size in zip(within, received, strict=True)),
        sync_s=sum(links.latency_s + size / rate for inside, size in zip(within, received, strict=True) if inside),
    )


def _of_a_round(place: _Place) -> tuple[float, float, float]:
    """Seconds of one hand-over of a round, and of all of the instance that has most; by what factor a round is longer
    since items that fill no hand-over wait for some of the next round."""
    once = place.instance.seconds(place.at_once)
    if place.profile.batching == "continuous":
        return once, once * -(-place.share // place.at_once), 1.0
    num_items, size = place.problem.num_items, place.at_once
    if place.profile.batching == "longest":
        costs = place.profile.costs.typical(num_items)
        once *= float(np.mean([max(costs[i : i + size]) for i in range(0, num_items - size + 1, size)]))
    if place.problem.flow.stage(place.name).dispatch == "key":
        return once, once * place.share / size, place.share / size / (place.share // size)
    full = num_items // size
    return once, once * num_items / size / min(full, place.count), num_items / size / full
