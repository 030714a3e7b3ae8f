"""The best plan by trying everything: no bounds, no fronts; the algebra of docs/scheduling.md in plain numbers.

Only for one pool of devices and flows without cycles or groups of several stages.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from rlinf_sched.problem import Problem
from rlinf_sched.stage_time import stage_time


@dataclass(frozen=True)
class Part:
    devices: int
    out: tuple[float, ...]
    tail: float
    sync: float
    resident: int
    peak: int
    edges: tuple[float, ...]
    offloads: bool


def least_step_s(problem: Problem) -> float | None:
    """Of all plans that fit; None when none does."""
    flow = problem.flow
    names = [stage.name for stage in flow.stages]
    feeding = {(a, b) for a, others in flow.successors().items() for b in others}
    total, memory = problem.cluster.num_devices, problem.cluster.devices[0].memory_bytes
    links = problem.cluster.links

    def leaves(name: str) -> set[Part]:
        profile, found = problem.profile(name), set()
        for instance in profile.instances:
            edges = tuple(
                problem.synced_bytes(edge) / instance.num_devices if flow.workers[edge.target][0] == name else 0.0
                for edge in flow.weight_edges
            )
            for count in range(1, total // instance.num_devices + 1):
                for granularity in problem.choices(name):
                    devices = count * instance.num_devices
                    time = stage_time(
                        instance,
                        profile.batching,
                        profile.costs,
                        num_items=problem.num_items,
                        num_instances=count,
                        granularity=granularity,
                    )
                    share = -(-problem.num_items // count)
                    if profile.batching != "continuous":
                        share = min(granularity, share)
                    state = instance.state_bytes + -(-instance.sharded_state_bytes // devices)
                    peak = state + instance.work_bytes + instance.item_work_bytes * share
                    found.add(Part(devices, time.out_s, time.tail_s, 0.0, state, peak, edges, False))
                    if problem.allow_offload:
                        move = state / links.host_bytes_per_s
                        out = (*(t + move for t in time.out_s[:-1]), time.out_s[-1] + 2 * move)
                        found.add(Part(devices, out, time.tail_s + move, 0.0, 0, peak, edges, True))
        return found

    @cache
    def parts(members: frozenset[str]) -> frozenset[Part]:
        if len(members) == 1:
            return frozenset(part for part in leaves(next(iter(members))) if part.peak <= memory)
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
            a.tail + b.out[-1],
            sync_s,
            a.resident + b.resident,
            max(a.peak + b.resident, a.resident + b.peak),
            edges,
            a.offloads or b.offloads,
        )

    def interleaved(a: Part, b: Part, before: frozenset[str], after: frozenset[str]) -> Part:
        whole = in_turn(a, b, before, after)
        return replace(whole, out=tuple(x + y for x, y in zip(a.out, b.out, strict=True)), tail=a.tail + b.tail)

    def side_by_side(a: Part, b: Part, before: frozenset[str], after: frozenset[str]) -> Part:
        if any((x, y) in feeding for x in before for y in after):
            crossing = [
                flow.item_bytes.get(channel, 0)
                for channel in flow.channels
                if set(flow.writers(channel)) & before and set(flow.readers(channel)) & after
            ]
            rate = links.node_bytes_per_s if problem.cluster.num_nodes == 1 else links.network_bytes_per_s
            moved = links.latency_s + max(crossing, default=0) / rate
            count = len(a.out)
            arrives = list(a.out)
            out = []
            for p in range(count):
                best = arrives[p] + (b.tail if p == count - 1 else b.out[0])
                for q in range(p):
                    best = max(best, arrives[q] + b.out[0] + (b.out[p] - b.out[0]) * (1 - q / p))
                out.append(best + moved)
            tail = a.tail + moved + b.tail
        else:
            out, tail = [max(x, y) for x, y in zip(a.out, b.out, strict=True)], max(a.tail, b.tail)
        sync_s, edges = sync(a, b, before, after, False)
        return Part(
            a.devices + b.devices,
            tuple(out),
            tail,
            sync_s,
            max(a.resident, b.resident),
            max(a.peak, b.peak),
            edges,
            a.offloads or b.offloads,
        )

    return min((part.out[-1] + part.sync for part in parts(frozenset(names))), default=None)
