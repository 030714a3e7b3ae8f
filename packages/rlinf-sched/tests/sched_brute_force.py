"""The best plan by trying everything: no bounds, no fronts; the algebra of docs/scheduling.md in plain numbers.

Only for one pool of devices and flows without cycles or groups of several stages.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import exp, inf

from rlinf_sched.planner.arrivals import arriving_costs
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, StageProfile
from rlinf_sched.stage_time import stage_times


@dataclass(frozen=True)
class Part:
    devices: int
    out: tuple[float, ...]
    half: float
    tail: float
    sync: float
    resident: int
    peak: int
    edges: tuple[float, ...]
    offloads: bool


def _measured_nearest(profile: StageProfile, like: InstanceProfile, count: int) -> InstanceProfile:
    """Of those on the same devices, the one whose number of instances is nearest by ratio, the lower first."""
    alike = sorted((i for i in profile.instances if i.num_devices == like.num_devices), key=lambda i: i.num_ranks)
    return min(alike, key=lambda i: Fraction(max(i.num_ranks, count), min(i.num_ranks, count)) if i.num_ranks else 1)


def least_step_s(problem: Problem) -> float | None:
    """Of all plans that fit; None when none does."""
    flow = problem.flow
    names = [stage.name for stage in flow.stages]
    feeding = {(a, b) for a, others in flow.successors().items() for b in others}
    total, memory = problem.cluster.num_devices, problem.cluster.devices[0].memory_bytes
    links = problem.cluster.links

    costs = arriving_costs(problem)

    def leaves(name: str) -> set[Part]:
        profile, found = problem.profile(name), set()
        for instance in profile.instances:
            edges = tuple(
                problem.synced_bytes(edge) / instance.num_devices if flow.workers[edge.target][0] == name else 0.0
                for edge in flow.weight_edges
            )
            for count in range(1, total // instance.num_devices + 1):
                if instance is not _measured_nearest(profile, instance, count):
                    continue
                for granularity in problem.choices(name):
                    devices = count * instance.num_devices
                    times = stage_times(instance, profile.batching, costs[name], [count], [granularity])
                    first, middle, last, half, tail = times[0].tolist()
                    share = -(-problem.num_items // count)
                    if profile.batching != "continuous":
                        share = min(granularity, share)
                    state = instance.state_bytes + -(-instance.sharded_state_bytes // devices)
                    peak = state + instance.work_bytes + instance.item_work_bytes * share
                    found.add(Part(devices, (first, middle, last), half, tail, 0.0, state, peak, edges, False))
                    if problem.allow_offload:
                        move = state / links.host_bytes_per_s
                        out = (first + move, middle + move, last + 2 * move)
                        found.add(Part(devices, out, half + move, tail + move, 0.0, 0, peak, edges, True))
        return found

    options = {name: leaves(name) for name in names}
    least_s = sum(min((p.devices * p.out[-1] for p in found), default=inf) for found in options.values()) / total
    load = {  # instances that compute at a time if the step took that long
        name: min((p.devices // problem.profile(name).instances[0].num_devices * p.out[-1] for p in found), default=inf)
        / least_s
        for name, found in options.items()
    }

    @cache
    def parts(members: frozenset[str]) -> frozenset[Part]:
        if len(members) == 1:
            return frozenset(part for part in options[next(iter(members))] if part.peak <= memory)
        found = set()
        for size in range(1, len(members)):
            for chosen in combinations(sorted(members), size):
                before, after = frozenset(chosen), members - frozenset(chosen)
                if any((b, a) in feeding for a in before for b in after):
                    continue
                for a in parts(before):
                    for b in parts(after):
                        found |= {in_turn(a, b, before, after), side_by_side(a, b, before, after)}
                        feeds = any((x, y) in feeding for x in before for y in after)
                        if (
                            feeds
                            and all(flow.stage(x).reads != ("feed",) for x in before)
                            and not a.offloads
                            and not b.offloads
                        ):
                            found.add(interleaved(a, b, before, after))
        return frozenset(p for p in found if p.devices <= total and p.peak <= memory)

    def sync(a: Part, b: Part, before: frozenset[str], after: frozenset[str], near: bool) -> tuple[float, tuple]:
        """Of the syncs on the way, and what is left to send of each edge."""
        seconds, left = a.sync + b.sync, []
        rate = links.node_bytes_per_s if near or problem.cluster.num_nodes == 1 else links.network_bytes_per_s
        for edge, x, y in zip(flow.weight_edges, a.edges, b.edges, strict=True):
            ends = {flow.workers[edge.source][0], flow.workers[edge.target][0]}
            if ends & before and ends & after:
                seconds += links.latency_s + max(x, y) / rate
                left.append(0.0)
            else:
                left.append(max(x, y))
        return seconds, tuple(left)

    def in_turn(a: Part, b: Part, before: frozenset[str], after: frozenset[str]) -> Part:
        sync_s, edges = sync(a, b, before, after, True)
        return Part(
            max(a.devices, b.devices),
            tuple(a.out[-1] + t for t in b.out),
            a.half + b.out[-1],
            a.tail + b.out[-1],
            sync_s,
            a.resident + b.resident,
            max(a.peak + b.resident, a.resident + b.peak),
            edges,
            a.offloads or b.offloads,
        )

    def interleaved(a: Part, b: Part, before: frozenset[str], after: frozenset[str]) -> Part:
        whole = in_turn(a, b, before, after)
        out = tuple(x + y for x, y in zip(a.out, b.out, strict=True))

        starved = min(1.0, (exp(sum(load[name] for name in before)) - 1) / problem.num_items)

        def waits(seconds: float) -> float:
            """The part after gets the devices when all of the part before are idle at once."""
            return max(seconds, seconds * (1 - starved) + b.out[-1] * starved)

        return replace(whole, out=out, half=a.half + waits(b.half), tail=a.tail + waits(b.tail))

    def side_by_side(a: Part, b: Part, before: frozenset[str], after: frozenset[str]) -> Part:
        if any((x, y) in feeding for x in before for y in after):
            crossing = [
                flow.item_bytes.get(channel, 0)
                for channel in flow.channels
                if set(flow.writers(channel)) & before and set(flow.readers(channel)) & after
            ]
            rate = links.node_bytes_per_s if problem.cluster.num_nodes == 1 else links.network_bytes_per_s
            moved = links.latency_s + max(crossing, default=0) / rate
            (first, middle, last), served = a.out, b.out
            out = (
                first + served[0],
                max(middle + served[0], first + served[1]),
                max(last + b.tail, middle + b.half, first + served[2]),
            )
            out = tuple(t + moved for t in out)
            half = max(a.half + b.tail, first + b.half) + moved
            tail = a.tail + moved + b.tail
        else:
            out = tuple(max(x, y) for x, y in zip(a.out, b.out, strict=True))
            half, tail = max(a.half, b.half), max(a.tail, b.tail)
        sync_s, edges = sync(a, b, before, after, False)
        return Part(
            a.devices + b.devices,
            out,
            half,
            tail,
            sync_s,
            max(a.resident, b.resident),
            max(a.peak, b.peak),
            edges,
            a.offloads or b.offloads,
        )

    return min((part.out[-1] + part.sync for part in parts(frozenset(names))), default=None)
