"""Local search: what the simulator thinks of plans that differ from a good one in one thing, or in two.

The search over cuts (search.py) goes by estimates, and the plans that it proposes differ in more than one thing. Here
one thing at a time changes: what a stage hands over, whether it offloads, how many devices a worker group has and
whose, how many devices an instance spans. The best change is kept until none gains; then pairs of changes are tried.
Every plan that is kept fits in memory whatever its timing: all state that stays, and the fullest turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlinf_sched.errors import SchedError
from rlinf_sched.plan import Mode, Plan, StagePlan
from rlinf_sched.planner.judged import Judged
from rlinf_sched.planner.places import partitions
from rlinf_sched.planner.pools import Pool, host_instances
from rlinf_sched.problem import Problem
from rlinf_sched.simulator.simulation import execute
from rlinf_sched.stage_time import items_at_once

_GAINS = 1 - 1e-6
"""A change that shortens the step by less is none."""
_HOPELESS = 1.2
"""Multiple of the best step that a plan's busiest device may compute for."""
_MOST_REGROUPED = 5
"""Worker groups on devices, of which all partitions are tried."""
_NUM_WIDTHS = 8
"""Choices of widths that are tried of a partition."""
_NUM_PAIRED = 6
"""Changes that are tried together with every other: those that lengthen the step least."""

Stages = tuple[StagePlan, ...]
"""A plan's stages, in the order of the flow."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a stage takes of each of its devices."""

    busy_s: float
    """Seconds that each instance computes, if items were alike."""
    state_bytes: int
    work_bytes: int
    """While it computes."""


class LocalSearch:
    """Looks around plans of one problem.

    Args:
        modes: plans of others are passed over.
        most_simulated: plans that the simulator may execute, all calls of `improve` together.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool], modes: Sequence[Mode], *, most_simulated: int) -> None:
        self._problem, self._pools, self._modes = problem, pools, tuple(modes)
        self._left = most_simulated
        self._seen: set[Stages] = set()
        self._needs_of: dict[object, _Needs | None] = {}
        self._memory = {index: pool.memory_bytes for pool in pools for index in pool.devices}
        self._worker = {stage.name: stage.worker for stage in problem.flow.stages}
        self._in_cycle = {name for names in problem.flow.cycles() for name in names}

    def improve(self, first: Judged) -> Judged:
        """The best plan that single changes lead to, and then pairs of them."""
        best = first
        while True:
            tried = sorted(self._tried(best, self._changes(best.plan.stages)), key=lambda found: found.step_s)
            if not tried or tried[0].step_s >= _GAINS * best.step_s:
                pairs = (pair for one in tried[:_NUM_PAIRED] for pair in self._changes(one.plan.stages))
                better = self._first_better(best, pairs)
                if better is None:
                    return best
                tried = [better]
            best = tried[0]

    def regrouped(self, first: Judged) -> list[Judged]:
        """A plan for each way in which the worker groups can share devices, or have their own, with as many for each as
        their work in the first one asks for."""
        candidates = sorted(self._regroupings(first.plan.stages), key=self._least_s)
        return list(self._tried(first, candidates[: self._left // 3], hopeless=math.inf))

    def _first_better(self, best: Judged, candidates: Iterable[Stages]) -> Judged | None:
        return next((found for found in self._tried(best, candidates) if found.step_s < _GAINS * best.step_s), None)

    def _tried(self, best: Judged, candidates: Iterable[Stages], *, hopeless: float = _HOPELESS) -> Iterator[Judged]:
        """The candidates that fit and may be as good as the best, executed.

        Args:
            hopeless: those whose busiest device computes for this multiple of the best step are not executed.
        """
        for stages in candidates:
            if self._left <= 0:
                return
            if stages in self._seen:
                continue
            self._seen.add(stages)
            if not self._goes_round(stages) or not self._fits(stages) or self._least_s(stages) > hopeless * best.step_s:
                continue
            found = self._execute(stages, best.estimate_s)
            if found is not None:
                yield found

    def _execute(self, stages: Stages, estimate_s: float) -> Judged | None:
        """None for what is no plan, which validation finds, or a plan of another mode."""
        mode = self._mode(stages)
        if mode not in self._modes:
            return None
        by_turn = tuple(sorted(stages, key=lambda stage: stage.turn))
        made = Plan(flow=self._problem.flow.name, mode=mode, stages=by_turn, reason="found by local search")
        try:
            made.validate(self._problem.flow, self._problem.cluster)
            self._left -= 1
            return Judged(made, execute(self._problem, made), estimate_s)
        except SchedError:
            return None

    # -- what a plan is ----------------------------------------------------------------------------------------------

    def _mode(self, stages: Stages) -> Mode:
        training = set(self._problem.flow.training_groups)
        if len({stage.devices for stage in stages if stage.devices}) <= 1:
            return "collocated"
        trains = {device for stage in stages if self._worker[stage.stage] in training for device in stage.devices}
        others = {device for stage in stages if self._worker[stage.stage] not in training for device in stage.devices}
        return "hybrid" if trains & others else "disaggregated"

    def _needs(self, stage: StagePlan) -> _Needs | None:
        """None where nothing was profiled for its devices."""
        key = stage.stage, stage.devices[:1], len(stage.devices), stage.num_ranks, stage.granularity
        if key not in self._needs_of:
            try:
                self._needs_of[key] = self._computed_needs(stage)
            except SchedError:
                self._needs_of[key] = None
        return self._needs_of[key]

    def _computed_needs(self, stage: StagePlan) -> _Needs:
        problem = self._problem
        profile, instance = problem.profile(stage.stage), problem.instance(stage)
        items = items_at_once(
            instance,
            profile.batching,
            num_items=problem.num_items,
            num_instances=stage.num_ranks,
            granularity=stage.granularity,
        )
        num_hand_overs = problem.num_items * profile.rounds / (items * stage.num_ranks)
        return _Needs(
            busy_s=instance.seconds(items) * num_hand_overs,
            state_bytes=problem.state_bytes(stage.stage, instance, len(stage.devices)),
            work_bytes=instance.extra_bytes(items),
        )

    def _fits(self, stages: Stages) -> bool:
        """Whether memory holds all state that stays, and beside it the fullest turn."""
        first = {names[0] for names in self._problem.flow.workers.values()}
        stays, fullest = dict.fromkeys(self._memory, 0), dict.fromkeys(self._memory, 0)
        works: dict[tuple[int, int], int] = {}
        for stage in stages:
            needs = self._needs(stage)
            if needs is None:
                return False
            for device in stage.devices:
                if stage.stage in first and not stage.offload:
                    stays[device] += needs.state_bytes
                key = device, stage.turn
                works[key] = works.get(key, 0) + needs.work_bytes + (needs.state_bytes if stage.offload else 0)
        for (device, _), work in works.items():
            fullest[device] = max(fullest[device], work)
        return all(stays[device] + fullest[device] <= self._memory[device] for device in self._memory)

    def _busy_s(self, stage: StagePlan) -> float:
        needs = self._needs(stage)
        return math.inf if needs is None else needs.busy_s

    def _goes_round(self, stages: Stages) -> bool:
        """Whether the stages of a cycle share all their devices or none, and no instance would wait for items that are
        a round behind."""
        num_items = self._problem.num_items
        for names in self._problem.flow.cycles():
            members = [stage for stage in stages if stage.stage in names]
            for i, one in enumerate(members):
                share = num_items // one.num_ranks
                if num_items % one.num_ranks or share % min(one.granularity or num_items, share):
                    return False
                if any(other.devices != one.devices and set(other.devices) & set(one.devices) for other in members[:i]):
                    return False
        return True

    def _least_s(self, stages: Stages) -> float:
        """No step is shorter than what the busiest device or host process computes, if items were alike."""
        busy = dict.fromkeys(self._memory, 0.0)
        for stage in stages:
            seconds = self._busy_s(stage) * max(1.0, stage.num_ranks / max(1, len(stage.devices)))
            for device in stage.devices:
                busy[device] += seconds
        return max([*busy.values(), *(self._busy_s(stage) for stage in stages if not stage.devices)])

    # -- what a plan may become --------------------------------------------------------------------------------------

    def _changes(self, stages: Stages) -> Iterator[Stages]:
        """Everything that differs in one thing."""
        for names in self._problem.flow.turns():
            yield from self._other_granularities(stages, names)
            yield from self._other_offload(stages, names)
        for worker, names in self._problem.flow.workers.items():
            yield from self._other_places(stages, worker, names)
        yield from self._exchanges(stages)

    def _other_granularities(self, stages: Stages, names: Sequence[str]) -> Iterator[Stages]:
        problem = self._problem
        sizes = sorted(set.intersection(*(set(problem.choices(name)) for name in names)))
        now = self._first(stages, names).granularity or problem.num_items
        near = [size for size in sizes if size < now][-2:] + [size for size in sizes if size > now][:2] + sizes[-1:]
        for size in dict.fromkeys(near):
            if size != now:
                is_whole = size >= problem.num_items and names[0] not in self._in_cycle
                yield _changed(stages, names, lambda stage, g=0 if is_whole else size: replace(stage, granularity=g))

    def _other_offload(self, stages: Stages, names: Sequence[str]) -> Iterator[Stages]:
        if self._problem.allow_offload and any(stage.devices for stage in stages if stage.stage in names):
            yield _changed(
                stages, names, lambda stage: replace(stage, offload=not stage.offload and bool(stage.devices))
            )

    def _other_places(self, stages: Stages, worker: str, names: Sequence[str]) -> Iterator[Stages]:
        """Other devices, or others for each instance, for a worker group."""
        now = self._first(stages, names)
        if not now.devices:
            yield from self._other_host_ranks(stages, now, names)
            return
        pinned = self._problem.pinned_devices.get(worker, 0)
        for devices in dict.fromkeys(self._device_sets(stages, now)):
            if not devices or (pinned and len(devices) != pinned):
                continue
            for num_ranks in self._widths(names[0], devices):
                if (devices, num_ranks) != (now.devices, now.num_ranks):
                    yield _changed(stages, names, _placed(devices, num_ranks))

    def _other_host_ranks(self, stages: Stages, now: StagePlan, names: Sequence[str]) -> Iterator[Stages]:
        problem, flow = self._problem, self._problem.flow
        most = problem.profile(names[0]).max_instances
        for count in host_instances(most, problem.num_items, flow.stage(names[0]).num_parts):
            if count != now.num_ranks:
                yield _changed(stages, names, _placed((), count))

    def _device_sets(self, stages: Stages, now: StagePlan) -> Iterator[tuple[int, ...]]:
        """Where a group might be instead: some devices fewer or more, what nobody has, where another group is."""
        pool = next(pool for pool in self._pools if now.devices[0] in pool.devices)
        mine, others = set(now.devices), {stage.devices for stage in stages if set(stage.devices) <= set(pool.devices)}
        taken = {device for devices in others for device in devices}
        free = [device for device in pool.devices if device not in taken]
        spans = {1, 2, *(choice.num_devices for choice in self._problem.profile(now.stage).instances)}
        yield now.devices
        yield pool.devices
        yield tuple(sorted(mine | set(free)))
        for devices in others:
            yield devices
            yield tuple(sorted(mine | set(devices)))
            yield tuple(sorted(mine - set(devices)))
            yield tuple(sorted(set(devices) | set(free)))
        for span in sorted(spans):
            yield now.devices[:-span]
            yield now.devices[span:]
            more = [*free, *(device for device in pool.devices if device not in mine and device not in free)]
            yield tuple(sorted(mine | set(more[:span])))
            yield tuple(sorted(mine | set(more[-span:])))

    def _widths(self, name: str, devices: Sequence[int], first: int = 0) -> Iterator[int]:
        """Numbers of ranks on these devices that were profiled, those that span `first` devices before others."""
        profile, stage = self._problem.profile(name), self._problem.flow.stage(name)
        for span in sorted(
            {choice.num_devices for choice in profile.instances}, key=lambda span: (span != first, span)
        ):
            num_ranks = len(devices) // span
            within = num_ranks <= (profile.max_instances or num_ranks)
            if len(devices) % span == 0 and within and (not stage.num_parts or stage.num_parts % num_ranks == 0):
                yield num_ranks

    def _exchanges(self, stages: Stages) -> Iterator[Stages]:
        """A few devices go from one set of them to another that has them not: for one group, or for all that are
        there."""
        groups = [(names, self._first(stages, names)) for names in self._problem.flow.workers.values()]
        movable = [
            one for one in groups if one[1].devices and self._worker[one[0][0]] not in self._problem.pinned_devices
        ]
        together: dict[tuple[int, ...], list[Sequence[str]]] = {}
        for names, place in movable:
            together.setdefault(place.devices, []).append(names)
        sides = [(place.devices, [names]) for names, place in movable]
        sides += [(devices, of) for devices, of in together.items() if len(of) > 1]
        for (giving, givers), (taking, takers) in itertools.permutations(sides, 2):
            spans = {
                1,
                *(len(p.devices) // p.num_ranks for p in (self._first(stages, of) for of in (*givers, *takers))),
            }
            for span in sorted(spans - {0}):
                handed = [device for device in giving if device not in taking][-span:]
                left = tuple(device for device in giving if device not in handed)
                if handed and left and not any(of in givers for of in takers):
                    yield from self._moved(
                        stages, [*((of, left) for of in givers), *((of, (*taking, *handed)) for of in takers)]
                    )

    def _moved(self, stages: Stages, places: Sequence[tuple[Sequence[str], Sequence[int]]]) -> Iterator[Stages]:
        """The groups on these devices, in every width that was profiled."""
        if not places:
            yield stages
            return
        (names, found), *rest = places
        devices = tuple(sorted(found))
        now = self._first(stages, names)
        for num_ranks in self._widths(names[0], devices, len(now.devices) // now.num_ranks):
            yield from self._moved(_changed(stages, names, _placed(devices, num_ranks)), rest)

    def _regroupings(self, stages: Stages) -> Iterator[Stages]:
        groups = [names for names in self._problem.flow.workers.values() if self._first(stages, names).devices]
        pools = {
            pool for pool in self._pools for names in groups if self._first(stages, names).devices[0] in pool.devices
        }
        if len(groups) > _MOST_REGROUPED or len(pools) != 1 or self._problem.pinned_devices:
            return
        devices = next(iter(pools)).devices
        areas = [sum(self._busy_s(s) * len(s.devices) for s in stages if s.stage in names) for names in groups]
        for blocks in partitions(len(groups)):
            counts = _shared_out(len(devices), [sum(areas[i] for i in block) for block in blocks])
            ends = list(itertools.accumulate(counts))
            places = [
                (groups[i], devices[end - count : end])
                for block, count, end in zip(blocks, counts, ends, strict=True)
                for i in block
            ]
            if min(counts) > 0:
                yield from itertools.islice(self._moved(stages, places), _NUM_WIDTHS)

    @staticmethod
    def _first(stages: Stages, names: Sequence[str]) -> StagePlan:
        return next(stage for stage in stages if stage.stage == names[0])


def _placed(devices: tuple[int, ...], num_ranks: int) -> Callable[[StagePlan], StagePlan]:
    return lambda stage: replace(stage, devices=devices, num_ranks=num_ranks)


def _changed(stages: Stages, names: Sequence[str], change: Callable[[StagePlan], StagePlan]) -> Stages:
    return tuple(change(stage) if stage.stage in names else stage for stage in stages)


def _shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to the total, as near to the weights as they get, each at least 1 where that is
    possible."""
    counts = [max(1, int(total * weight / sum(weights))) for weight in weights]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        lacks = [total * weight / sum(weights) - count for weight, count in zip(weights, counts, strict=True)]
        choices = [i for i in range(len(counts)) if step > 0 or counts[i] > 1]
        if not choices:
            return [0] * len(counts)
        counts[max(choices, key=lambda i: step * lacks[i])] += step
    return counts
