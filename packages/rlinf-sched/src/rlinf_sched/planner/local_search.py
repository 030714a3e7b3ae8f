"""Local search: simulates plans that differ from a good one in one thing, or in two.

The search over cuts (search.py) uses estimates, and the plans that it proposes differ in more than one thing. Here one
thing changes at a time (changes.py). An improvement is kept at once; if there is none, pairs of changes are tried, or
random walks that also accept longer steps. Every kept plan fits in memory whatever its timing: all state that stays,
plus the largest turn.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlinf_sched.errors import SchedError
from rlinf_sched.plan import Mode
from rlinf_sched.planner.changes import Changes
from rlinf_sched.planner.judged import judging
from rlinf_sched.planner.placements import Placements, Share, StagePlacement, bits_of, shares_of, stage_plan
from rlinf_sched.planner.plan_timer import PlanTimer
from rlinf_sched.planner.pools import Pool
from rlinf_sched.problem import Problem
from rlinf_sched.stage_time import items_at_once

_GAINS = 1 - 1e-6
"""Smaller improvements of the step time do not count."""
_HOPELESS = 1.2
"""Plans whose busiest device computes longer than this multiple of the best step are skipped."""
_HOTTEST, _COLDEST = 0.03, 0.002
"""Accepted growth of the step in a walk, as a fraction, at its beginning and at its end."""
_ANOTHER = 0.3
"""Probability that a walk makes one more change at once."""
_MOST_DRAWN = 8
"""Maximum number of random changes per timed plan in a walk; most others are known or hopeless."""
_NUM_PAIRED = 64
"""Number of changes that are paired with every other: those that lengthen the step least."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and its simulated result."""

    placements: Placements
    mode: Mode
    step_s: float
    busy_s: tuple[float, ...]
    """Seconds that devices and host processes compute, the busiest first, without duplicates: of plans with equal
    steps, the one whose next bottleneck has more slack is better."""
    estimate_s: float | None
    """Seconds of a step as the search over cuts estimates them; None for what local search found."""

    @property
    def rank(self) -> tuple[float, tuple[float, ...], int]:
        """Sort key, smaller is better; steps that differ by rounding are equal, and so are shares of a step that differ
        by less than 1 %. Then fewer host processes are better."""
        spare = tuple(round(busy_s / self.step_s, 2) if self.step_s else 0.0 for busy_s in self.busy_s)
        num_processes = sum(placement.num_ranks for placement in self.placements if not placement.devices)
        return float(f"{self.step_s:.9g}"), spare, num_processes

    @property
    def sharing(self) -> tuple[bool, ...]:
        """Of each pair of stages, whether they have devices in common."""
        return tuple(bool(a.devices & b.devices) for a, b in itertools.combinations(self.placements, 2))


@dataclass(frozen=True, slots=True)
class _Needs:
    """The load of a stage on each of its devices."""

    busy_s: float
    """Seconds that each device computes, for equal items."""
    state_bytes: int
    work_bytes: int
    """While it computes."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    placements: Placements
    shares: Sequence[Share]
    busy_s: tuple[float, ...]
    """As in `Found`."""


class _Members(dict[int, tuple[int, ...]]):
    """Set of bits -> its members."""

    def __missing__(self, bits: int) -> tuple[int, ...]:
        self[bits] = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
        return self[bits]


class LocalSearch:
    """Times plans of one problem and searches around them.

    Args:
        num_draws: as in `best_plan`.

    Attributes:
        best: the best timed plan of each mode.
        num_left: number of plans that may still be timed.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool], *, num_plans: int, num_draws: int = 0) -> None:
        flow = problem.flow
        self._problem, self._pools, self._num_draws = problem, pools, num_draws
        self.best: dict[Mode, Found] = {}
        self.num_left = num_plans
        self._timers: dict[object, PlanTimer] = {}
        self._timed: dict[object, Found | None] = {}
        self._longer_than_s: dict[object, float] = {}
        self._needs_of: dict[object, _Needs] = {}
        self._shares_of: dict[tuple[int, ...], Sequence[Share]] = {}
        self._has_network = problem.cluster.num_nodes > 1
        self._pool_bits = [bits_of(pool.devices) for pool in pools]
        names = [stage.name for stage in flow.stages]
        self._changes = Changes(problem, pools)
        self._keeps_state = [name == flow.workers[flow.stage(name).worker][0] for name in names]
        self._members = _Members()
        self._in_parts = [s for cycle in self._changes.cycles for s in cycle if flow.stages[s].num_parts]
        self._trains = sum(1 << s for group in flow.training_groups for s in self._changes.groups[group])

    @contextlib.contextmanager
    def spending(self, num_plans: int) -> Generator[None]:
        """Context that may time at most this many of the remaining plans."""
        reserve = max(0, self.num_left - num_plans)
        self.num_left -= reserve
        yield
        self.num_left += reserve

    def time(self, placements: Placements, estimate_s: float | None = None) -> Found | None:
        """The plan with its step time; None if it does not fit or deadlocks, or no more plans may be timed."""
        shares = self._shares(placements)
        return self._time(_Candidate(placements, shares, self._busy_s(placements, shares)), estimate_s)

    def _time(self, one: _Candidate, estimate_s: float | None = None, most_s: float = math.inf) -> Found | None:
        """Like `time`; also None if the step takes longer than `most_s`, unless it is the shortest of its mode."""
        key = self._key(one)
        if key in self._timed:
            return self._timed[key]
        mode = self._mode(one.placements)
        best = self.best.get(mode)
        most_s = math.inf if best is None else max(most_s, best.step_s)
        if self.num_left <= 0 or self._longer_than_s.get(key, 0.0) >= most_s:
            return None
        plan = None
        if self._goes_round(one.placements) and self._fits(one):
            order = self._changes.order(one.placements)
            if order not in self._timers:
                self._timers[order] = PlanTimer(self._problem, one.placements, **judging(self._num_draws))
            self.num_left -= 1
            step_s = self._timers[order].step_s(one.placements, most_s)
            if math.isfinite(step_s):
                plan = Found(one.placements, mode, step_s, one.busy_s, estimate_s)
                if best is None or plan.rank < best.rank:
                    self.best[mode] = plan
            elif math.isfinite(most_s):
                self._longer_than_s[key] = most_s
                return None
        self._timed[key] = plan
        return plan

    def descend(self, first: Found, *, in_turn: bool) -> Found:
        """The best plan that single changes lead to.

        Args:
            in_turn: try changes in place before moves, and one move of each kind in turn, which gets further with few
                plans; otherwise try the plans whose busiest device computes least first.
        """
        best = first
        while self.num_left > 0:
            if in_turn:
                best = self.settle(best)
                better = self._first_timed_better(best, self._moves_in_turn(best))
            else:
                better = self._first_better(best, self._changes.single(best.placements))
            if better is None:
                return best
            best = better
        return best

    def settle(self, first: Found) -> Found:
        """The best plan that single changes lead to while all groups keep their devices."""
        best: Found | None = first
        while best is not None:
            first, best = best, self._first_better(best, self._changes.in_place(best.placements))
        return first

    def improve(self, first: Found) -> Found:
        """The best plan that single changes lead to, then finer ones, then pairs that move at most one group, then any
        pairs."""
        best = first
        while self.num_left > 0:
            tried: list[Found] = []
            better = self._first_better(best, self._changes.single(best.placements), tried)
            if better is None:
                better = self._first_better(best, self._changes.finer(best.placements), tried)
            if better is None:
                better = self._first_better(best, self._changes.with_hand_over(best.placements), tried)
            if better is None:
                better = self._first_better(best, self._changes.pairs_in_place(best.placements), tried)
            if better is None:
                tried.sort(key=lambda plan: plan.rank)
                pairs = (pair for one in tried[:_NUM_PAIRED] for pair in self._changes.single(one.placements))
                better = self._first_better(best, pairs, tried)
            if better is None:
                return best
            best = better
        return best

    def anneal(self, first: Found) -> Found:
        """The best plan of a random walk over all remaining plans, which also accepts longer steps, at first by some 3
        %, finally by 0.2 % (simulated annealing: Kirkpatrick, Gelatt and Vecchi, Science 220, 1983). Deterministic."""
        draw = random.Random(0)
        now, best, num_plans = first, first, self.num_left
        for _ in range(_MOST_DRAWN * num_plans):
            if self.num_left <= 0:
                break
            heat = _COLDEST * (_HOTTEST / _COLDEST) ** (self.num_left / num_plans)
            most_s = now.step_s * (1 - heat * math.log(1 - draw.random()))
            placements = self._changes.drawn(now.placements, draw)
            while draw.random() < _ANOTHER:
                placements = self._changes.drawn(placements, draw)
            shares = self._shares(placements)
            busy_s = self._busy_s(placements, shares)
            plan = self._time(_Candidate(placements, shares, busy_s), most_s=most_s) if busy_s[0] < most_s else None
            if plan is not None and plan.step_s <= most_s:
                now = plan
                best = min(best, now, key=lambda plan: plan.rank)
        return best

    def elite(self, count: int) -> list[Found]:
        """The best timed plans, one for each way to share devices, the best first."""
        of_sharing: dict[object, Found] = {}
        for plan in sorted((plan for plan in self._timed.values() if plan), key=lambda plan: plan.rank):
            of_sharing.setdefault(plan.sharing, plan)
            if len(of_sharing) == count:
                break
        return list(of_sharing.values())

    def regrouped(self, first: Found) -> list[Found]:
        """A plan for each way in which the worker groups can share devices or have their own, with devices in
        proportion to their work in the first plan."""
        candidates = self._promising(self._changes.regroupings(first.placements, self._area_s), math.inf)[
            : self.num_left // 3
        ]
        return [plan for one in candidates if (plan := self._time(one)) is not None]

    def _first_better(
        self, best: Found, candidates: Iterable[Placements], tried: list[Found] | None = None
    ) -> Found | None:
        """The first improvement, in order of the busiest device's computing time."""
        return self._first_timed_better(best, self._promising(candidates, _HOPELESS * best.step_s), tried)

    def _first_timed_better(
        self, best: Found, candidates: Iterable[_Candidate], tried: list[Found] | None = None
    ) -> Found | None:
        """The first improvement; plans that cannot be better are not simulated to the end."""
        for one in candidates:
            plan = self._time(one, most_s=best.step_s if tried is None else math.inf)
            if plan is None:
                continue
            if tried is not None:
                tried.append(plan)
            if plan.step_s < _GAINS * best.step_s:
                return plan
        return None

    def _moves_in_turn(self, best: Found) -> Iterator[_Candidate]:
        """One move of each kind in turn, within each kind in order of the busiest device's computing time: large
        clusters have hundreds of moves of the first kind, which are nearly equally good."""
        lists = [
            self._promising(kind, _HOPELESS * best.step_s) for kind in reversed(self._changes.moves(best.placements))
        ]
        return (one for row in itertools.zip_longest(*lists) for one in row if one is not None)

    def _promising(self, candidates: Iterable[Placements], hopeless_s: float) -> list[_Candidate]:
        """The plans whose busiest device computes at most this long, the least busy first."""
        result: list[_Candidate] = []
        for placements in dict.fromkeys(candidates):
            shares = self._shares(placements)
            busy_s = self._busy_s(placements, shares)
            if busy_s[0] < hopeless_s:
                result.append(_Candidate(placements, shares, busy_s))
        result.sort(key=lambda one: one.busy_s[0])
        return result

    # -- what a plan is ----------------------------------------------------------------------------------------------

    def _shares(self, placements: Placements) -> Sequence[Share]:
        """Like `shares_of`, cached, because many plans differ in other things than devices."""
        devices = tuple([placement.devices for placement in placements])
        if devices not in self._shares_of:
            self._shares_of[devices] = shares_of(placements, self._pool_bits)
        return self._shares_of[devices]

    def _key(self, one: _Candidate) -> object:
        """Equal for plans that differ only in which equal devices they use."""
        order = self._changes.order(one.placements)
        if self._has_network:
            return tuple(placement[:4] for placement in one.placements), order
        counts = frozenset((share.stages, share.pool, share.devices.bit_count()) for share in one.shares)
        return tuple(placement[1:4] for placement in one.placements), counts, order

    def _mode(self, placements: Placements) -> Mode:
        if len({placement.devices for placement in placements if placement.devices}) <= 1:
            return "collocated"
        trains = others = 0
        for s, placement in enumerate(placements):
            if self._trains >> s & 1:
                trains |= placement.devices
            else:
                others |= placement.devices
        return "hybrid" if trains & others else "disaggregated"

    def _needs(self, s: int, placement: StagePlacement) -> _Needs:
        """Infinite if nothing was profiled for its devices."""
        needs = self._needs_of.get((s, placement))
        if needs is None:
            pools = sum(1 << i for i, bits in enumerate(self._pool_bits) if bits & placement.devices)
            alike = s, pools, placement.devices.bit_count(), placement.num_ranks, placement.granularity
            if alike not in self._needs_of:
                self._needs_of[alike] = self._computed_needs(s, placement)
            needs = self._needs_of[s, placement] = self._needs_of[alike]
        return needs

    def _computed_needs(self, s: int, placement: StagePlacement) -> _Needs:
        problem, name = self._problem, self._problem.flow.stages[s].name
        num_devices = placement.devices.bit_count()
        profile = problem.profile(name)
        try:
            instance = problem.instance(stage_plan(name, placement))
        except SchedError:
            return _Needs(math.inf, 0, 0)
        items = items_at_once(
            instance,
            profile.batching,
            num_items=problem.num_items,
            num_instances=placement.num_ranks,
            granularity=placement.granularity,
        )
        num_hand_overs = profile.rounds * max(1.0, problem.num_items / (items * placement.num_ranks))
        sharing = max(1.0, placement.num_ranks / num_devices) if num_devices else 1.0
        return _Needs(
            busy_s=instance.seconds(items) * num_hand_overs * sharing,
            state_bytes=problem.state_bytes(name, instance, num_devices),
            work_bytes=instance.extra_bytes(items),
        )

    def _fits(self, one: _Candidate) -> bool:
        """Whether all state that stays fits in memory together with the largest turn."""
        placements = one.placements
        for share in one.shares:
            stays, works = 0, {}
            for s in self._members[share.stages]:
                needs, turn = self._needs(s, placements[s]), self._changes.turn_of[s]
                if self._keeps_state[s] and not placements[s].offload:
                    stays += needs.state_bytes
                works[turn] = works.get(turn, 0) + needs.work_bytes + needs.state_bytes * placements[s].offload
            if stays + max(works.values(), default=0) > self._pools[share.pool].memory_bytes:
                return False
        return True

    def _goes_round(self, placements: Placements) -> bool:
        """Whether no items are left over by the hand-overs of a cycle whose items are divided; they would wait
        forever."""
        of_instances = ((placements[s], self._problem.num_items // placements[s].num_ranks) for s in self._in_parts)
        return all(share % min(placement.granularity, share) == 0 for placement, share in of_instances)

    def _busy_s(self, placements: Placements, shares: Sequence[Share]) -> tuple[float, ...]:
        """Seconds that devices and host processes compute, for equal items: the first is a lower bound of the step."""
        of_stages = [self._needs(s, placement).busy_s for s, placement in enumerate(placements)]
        busy_s = {sum([of_stages[s] for s in self._members[stages]]) for _, stages, _ in shares if stages}
        busy_s.update([of_stages[s] for s, placement in enumerate(placements) if not placement.devices])
        return tuple(sorted(busy_s, reverse=True))

    def _area_s(self, s: int, placement: StagePlacement) -> float:
        """Device-seconds."""
        return placement.devices.bit_count() * self._needs(s, placement).busy_s
