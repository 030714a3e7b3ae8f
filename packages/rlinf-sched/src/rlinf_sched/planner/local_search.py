"""Local search: what the simulator thinks of plans that differ from a good one in one thing, or in two.

The search over cuts (search.py) goes by estimates, and the plans that it proposes differ in more than one thing. Here
one thing at a time changes: what a stage hands over, whether it offloads, how many devices a worker group has and
whose, how many devices an instance spans. What gains is kept, at once; when nothing does, pairs of changes are tried.
Every plan that is kept fits in memory whatever its timing: all state that stays, and the fullest turn.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlinf_sched.errors import SchedError
from rlinf_sched.plan import Mode
from rlinf_sched.planner.judged import judging
from rlinf_sched.planner.places import partitions
from rlinf_sched.planner.plan_timer import PlanTimer
from rlinf_sched.planner.pools import Pool, host_instances
from rlinf_sched.planner.spots import Share, Spot, Spots, bits_of, first_of, last_of, shares_of, stage_plan
from rlinf_sched.problem import Problem
from rlinf_sched.stage_time import items_at_once

_GAINS = 1 - 1e-6
"""A change that shortens the step by less is none."""
_HOPELESS = 1.2
"""Multiple of the best step that a plan's busiest device may compute for."""
_MOST_REGROUPED = 6
"""Worker groups on devices, of which all partitions are tried."""
_NUM_WIDTHS = 8
"""Choices of widths that are tried where groups come to other devices: those first that keep them."""
_HOTTEST, _COLDEST = 0.03, 0.002
"""Parts of a step by which a walk lets it grow, at its beginning and at its end."""
_ANOTHER = 0.3
"""How often a walk makes one more change at once."""
_MOST_DRAWN = 20
"""Changes that a walk may draw for each plan that it times; most of the others are known or hopeless."""
_NUM_PAIRED = 64
"""Changes that are tried together with every other: those that lengthen the step least."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and what the simulator thinks of it."""

    spots: Spots
    mode: Mode
    step_s: float
    busy_s: tuple[float, ...]
    """Seconds that devices and host processes compute, the busiest first, each number once: of plans that take equally
    long, the one whose next bottleneck has more to spare is better."""
    estimate_s: float | None
    """Seconds of a step as the search over cuts estimates them; None for what local search found."""

    @property
    def rank(self) -> tuple[float, tuple[float, ...], int]:
        """Less is better; steps that differ by rounding are equal, and shares of a step that differ by less than 1 %.
        Then fewer processes on the host are better."""
        spare = tuple(round(busy_s / self.step_s, 2) if self.step_s else 0.0 for busy_s in self.busy_s)
        num_processes = sum(spot.num_ranks for spot in self.spots if not spot.devices)
        return float(f"{self.step_s:.9g}"), spare, num_processes

    @property
    def sharing(self) -> tuple[bool, ...]:
        """Of each pair of stages, whether they have devices in common."""
        return tuple(bool(a.devices & b.devices) for a, b in itertools.combinations(self.spots, 2))


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a stage takes of each of its devices."""

    busy_s: float
    """Seconds that each device computes, if items were alike."""
    state_bytes: int
    work_bytes: int
    """While it computes."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    spots: Spots
    shares: Sequence[Share]
    busy_s: tuple[float, ...]
    """As in `Found`."""


class _Members(dict[int, tuple[int, ...]]):
    """Set of bits -> its members."""

    def __missing__(self, bits: int) -> tuple[int, ...]:
        self[bits] = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
        return self[bits]


class LocalSearch:
    """Times plans of one problem and looks around them.

    Args:
        num_draws: as in `plan`.

    Attributes:
        best: the best plan of each mode that was timed.
        num_left: plans that may yet be timed.
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
        self._groups = {worker: [names.index(name) for name in of] for worker, of in flow.workers.items()}
        self._turns = [[names.index(name) for name in of] for of in flow.turns()]
        self._cycles = [[names.index(name) for name in of] for of in flow.cycles()]
        self._turn_of = {s: turn for turn, of in enumerate(self._turns) for s in of}
        self._feeding = {
            (self._turn_of[names.index(source)], self._turn_of[names.index(target)])
            for source, targets in flow.successors().items()
            for target in targets
        }
        self._keeps_state = [name == flow.workers[flow.stage(name).worker][0] for name in names]
        self._members = _Members()
        self._trains = sum(1 << s for group in flow.training_groups for s in self._groups[group])
        self._spans = [sorted({one.num_devices for one in problem.profile(name).instances}) for name in names]
        self._sizes = [problem.choices(name) for name in names]
        self._homes = [
            [bits for pool, bits in zip(pools, self._pool_bits, strict=True) if any(map(pool.takes, products))]
            for products in ({choice.device_name for choice in problem.profile(name).instances} for name in names)
        ]

    def time(self, spots: Spots, estimate_s: float | None = None) -> Found | None:
        """The plan with its step; None for one that does not fit or stands still, or where no more may be timed."""
        shares = self._shares(spots)
        return self._time(_Candidate(spots, shares, self._busy_s(spots, shares)), estimate_s)

    def _time(self, one: _Candidate, estimate_s: float | None = None, most_s: float = math.inf) -> Found | None:
        """As `time`; None too where the step takes more than `most_s`, unless it is the shortest of its mode."""
        key = self._key(one)
        if key in self._timed:
            return self._timed[key]
        mode = self._mode(one.spots)
        known = self.best.get(mode)
        most_s = math.inf if known is None else max(most_s, known.step_s)
        if self.num_left <= 0 or self._longer_than_s.get(key, 0.0) >= most_s:
            return None
        found = None
        if self._goes_round(one.spots) and self._fits(one):
            order = self._order(one.spots)
            if order not in self._timers:
                self._timers[order] = PlanTimer(self._problem, one.spots, **judging(self._num_draws))
            self.num_left -= 1
            step_s = self._timers[order].step_s(one.spots, most_s)
            if math.isfinite(step_s):
                found = Found(one.spots, mode, step_s, one.busy_s, estimate_s)
                if known is None or found.rank < known.rank:
                    self.best[mode] = found
            elif math.isfinite(most_s):
                self._longer_than_s[key] = most_s
                return None
        self._timed[key] = found
        return found

    def descend(self, first: Found, *, in_turn: bool) -> Found:
        """The best plan that single changes lead to.

        Args:
            in_turn: changes in place before moves, and one move of each kind after the other, which gets further with
                few plans; else all those first whose busiest device computes least.
        """
        best = first
        while self.num_left > 0:
            if in_turn:
                best = self.settle(best)
                better = self._first_timed_better(best, self._moves_in_turn(best))
            else:
                better = self._first_better(best, self._changes(best.spots))
            if better is None:
                return best
            best = better
        return best

    def settle(self, first: Found) -> Found:
        """The best plan that single changes lead to while all groups keep their devices."""
        best: Found | None = first
        while best is not None:
            first, best = best, self._first_better(best, self._in_place(best.spots))
        return first

    def improve(self, first: Found) -> Found:
        """The best plan that single changes lead to, then pairs of them that move nobody, or one group, and then
        pairs of any."""
        best = first
        while self.num_left > 0:
            tried: list[Found] = []
            better = self._first_better(best, self._changes(best.spots), tried)
            if better is None:
                better = self._first_better(best, self._pairs_in_place(best.spots), tried)
            if better is None:
                better = self._first_better(best, self._changes_of_one(best.spots), tried)
            if better is None:
                tried.sort(key=lambda found: found.rank)
                pairs = (pair for one in tried[:_NUM_PAIRED] for pair in self._changes(one.spots))
                better = self._first_better(best, pairs, tried)
            if better is None:
                return best
            best = better
        return best

    def elite(self, count: int) -> list[Found]:
        """The best plans that were timed, one of each way to share devices, the best first."""
        of_sharing: dict[object, Found] = {}
        for found in sorted((found for found in self._timed.values() if found), key=lambda found: found.rank):
            of_sharing.setdefault(found.sharing, found)
            if len(of_sharing) == count:
                break
        return list(of_sharing.values())

    def regrouped(self, first: Found) -> list[Found]:
        """A plan for each way in which the worker groups can share devices, or have their own, with as many for each as
        their work in the first one asks for."""
        candidates = self._promising(self._regroupings(first.spots), math.inf)[: self.num_left // 3]
        return [found for one in candidates if (found := self._time(one)) is not None]

    def _first_better(self, best: Found, candidates: Iterable[Spots], tried: list[Found] | None = None) -> Found | None:
        """The first that is better, those first whose busiest device computes least."""
        return self._first_timed_better(best, self._promising(candidates, _HOPELESS * best.step_s), tried)

    def _first_timed_better(
        self, best: Found, candidates: Iterable[_Candidate], tried: list[Found] | None = None
    ) -> Found | None:
        """The first that is better; where the others are not asked for, they are not executed to the end."""
        for one in candidates:
            found = self._time(one, most_s=best.step_s if tried is None else math.inf)
            if found is None:
                continue
            if tried is not None:
                tried.append(found)
            if found.step_s < _GAINS * best.step_s:
                return found
        return None

    def _promising(self, candidates: Iterable[Spots], hopeless_s: float) -> list[_Candidate]:
        """Those whose busiest device computes for no longer than that, the least busy first."""
        result = []
        for spots in dict.fromkeys(candidates):
            shares = self._shares(spots)
            busy_s = self._busy_s(spots, shares)
            if busy_s[0] < hopeless_s:
                result.append(_Candidate(spots, shares, busy_s))
        result.sort(key=lambda one: one.busy_s[0])
        return result

    # -- what a plan is ----------------------------------------------------------------------------------------------

    def _shares(self, spots: Spots) -> Sequence[Share]:
        """As `shares_of`; many plans differ in other things than devices."""
        devices = tuple([spot.devices for spot in spots])
        if devices not in self._shares_of:
            self._shares_of[devices] = shares_of(spots, self._pool_bits)
        return self._shares_of[devices]

    def _key(self, one: _Candidate) -> object:
        """Equal for plans that differ in the names of devices only."""
        order = self._order(one.spots)
        if self._has_network:
            return tuple(spot[:4] for spot in one.spots), order
        counts = frozenset((share.stages, share.pool, share.devices.bit_count()) for share in one.shares)
        return tuple(spot[1:4] for spot in one.spots), counts, order

    def _order(self, spots: Spots) -> tuple[int, ...]:
        """The turns, in the order in which they come."""
        turns = [spots[turn[0]].turn for turn in self._turns]
        return tuple(sorted(range(len(turns)), key=turns.__getitem__))

    def _mode(self, spots: Spots) -> Mode:
        if len({spot.devices for spot in spots if spot.devices}) <= 1:
            return "collocated"
        trains = others = 0
        for s, spot in enumerate(spots):
            if self._trains >> s & 1:
                trains |= spot.devices
            else:
                others |= spot.devices
        return "hybrid" if trains & others else "disaggregated"

    def _needs(self, s: int, spot: Spot) -> _Needs:
        """Without end where nothing was profiled for its devices."""
        known = self._needs_of.get((s, spot))
        if known is None:
            pool = next((i for i, bits in enumerate(self._pool_bits) if bits & spot.devices), -1)
            alike = s, pool, spot.devices.bit_count(), spot.num_ranks, spot.granularity
            if alike not in self._needs_of:
                self._needs_of[alike] = self._computed_needs(s, spot)
            known = self._needs_of[s, spot] = self._needs_of[alike]
        return known

    def _computed_needs(self, s: int, spot: Spot) -> _Needs:
        problem, name = self._problem, self._problem.flow.stages[s].name
        num_devices = spot.devices.bit_count()
        profile = problem.profile(name)
        try:
            instance = problem.instance(stage_plan(name, spot))
        except SchedError:
            return _Needs(math.inf, 0, 0)
        items = items_at_once(
            instance,
            profile.batching,
            num_items=problem.num_items,
            num_instances=spot.num_ranks,
            granularity=spot.granularity,
        )
        num_hand_overs = profile.rounds * max(1.0, problem.num_items / (items * spot.num_ranks))
        sharing = max(1.0, spot.num_ranks / num_devices) if num_devices else 1.0
        return _Needs(
            busy_s=instance.seconds(items) * num_hand_overs * sharing,
            state_bytes=problem.state_bytes(name, instance, num_devices),
            work_bytes=instance.extra_bytes(items),
        )

    def _fits(self, one: _Candidate) -> bool:
        """Whether memory holds all state that stays, and beside it the fullest turn."""
        spots = one.spots
        for share in one.shares:
            stays, works = 0, {}
            for s in self._members[share.stages]:
                needs, turn = self._needs(s, spots[s]), self._turn_of[s]
                if self._keeps_state[s] and not spots[s].offload:
                    stays += needs.state_bytes
                works[turn] = works.get(turn, 0) + needs.work_bytes + needs.state_bytes * spots[s].offload
            if stays + max(works.values(), default=0) > self._pools[share.pool].memory_bytes:
                return False
        return True

    def _goes_round(self, spots: Spots) -> bool:
        """Whether the stages of each cycle share all their devices or none."""
        return all(
            spots[i].devices == spots[k].devices or not spots[i].devices & spots[k].devices
            for cycle in self._cycles
            for i, k in itertools.combinations(cycle, 2)
        )

    def _busy_s(self, spots: Spots, shares: Sequence[Share]) -> tuple[float, ...]:
        """Seconds that devices and host processes compute, if items were alike: no step is shorter than the first."""
        of_stages = [self._needs(s, spot).busy_s for s, spot in enumerate(spots)]
        busy_s = {sum([of_stages[s] for s in self._members[stages]]) for _, stages, _ in shares if stages}
        busy_s.update([of_stages[s] for s, spot in enumerate(spots) if not spot.devices])
        return tuple(sorted(busy_s, reverse=True))

    # -- what a plan may become --------------------------------------------------------------------------------------

    def _changes(self, spots: Spots) -> Iterator[Spots]:
        """Everything that differs in one thing."""
        yield from self._other_hand_overs(spots)
        yield from self._other_numbers_on_host(spots)
        yield from self._other_orders(spots)
        for kind in self._moves(spots):
            yield from kind

    def _moves(self, spots: Spots) -> list[Iterator[Spots]]:
        """Each kind of change of devices; other widths on the same ones are among the first."""
        sides = self._sides(spots)
        places = (moved for side in sides for moved in self._other_places(spots, side))
        return [places, self._exchanges(spots, sides), self._between_two(spots)]

    def _drawn_change(self, spots: Spots, draw: random.Random) -> Spots:
        """One change of a kind drawn at random; the plan itself where there is none of that kind."""
        turn = draw.choice(self._turns)
        kind = draw.randrange(8)
        found: Iterable[Spots]
        if kind < 3:
            found = self._other_granularities(spots, turn, far=True)
        elif kind == 3:
            found = itertools.chain(self._other_offload(spots, turn), self._other_orders(spots))
        else:
            group = draw.choice(list(self._groups.values()))
            devices = spots[group[0]].devices
            if not devices:
                found = self._other_host_ranks(spots, group)
            elif kind == 4:
                found = self._moved(spots, [(group, devices)])
            else:
                sides = self._sides(spots)
                side = draw.choice(sides)
                if kind == 5:
                    sets = [devices for devices in self._device_sets(spots, side) if devices]
                    to = draw.choice(sets)
                    found = self._moved(spots, [(group, to) for group in side])
                elif kind == 6:
                    found = self._exchanged(spots, side, draw.choice(sides))
                else:
                    others = [other for other in self._groups.values() if spots[other[0]].devices and other != group]
                    found = self._between(spots, group, draw.choice(others)) if others else ()
        choices = list(found)
        return draw.choice(choices) if choices else spots

    def anneal(self, first: Found, num_plans: int) -> Found:
        """The best plan of a walk that also takes longer steps, at first by some 3 %, at last by 0.2 % (simulated
        annealing: Kirkpatrick, Gelatt and Vecchi, Science 220, 1983). The same each time."""
        draw = random.Random(0)
        now, best, until = first, first, max(0, self.num_left - num_plans)
        for _ in range(_MOST_DRAWN * num_plans):
            left = self.num_left - until
            if left <= 0:
                break
            heat = _COLDEST * (_HOTTEST / _COLDEST) ** (left / num_plans)
            most_s = now.step_s * (1 - heat * math.log(1 - draw.random()))
            spots = self._drawn_change(now.spots, draw)
            while draw.random() < _ANOTHER:
                spots = self._drawn_change(spots, draw)
            shares = self._shares(spots)
            busy_s = self._busy_s(spots, shares)
            found = self._time(_Candidate(spots, shares, busy_s), most_s=most_s) if busy_s[0] < most_s else None
            if found is not None and found.step_s <= most_s:
                now = found
                best = min(best, now, key=lambda found: found.rank)
        return best

    def _moves_in_turn(self, best: Found) -> Iterator[_Candidate]:
        """One move of each kind after the other, of each kind those first whose busiest device computes least: in large
        clusters there are hundreds of the kind that would be tried first, and nearly as good ones."""
        lists = [self._promising(kind, _HOPELESS * best.step_s) for kind in reversed(self._moves(best.spots))]
        return (one for row in itertools.zip_longest(*lists) for one in row if one is not None)

    def _pairs_in_place(self, spots: Spots) -> Iterator[Spots]:
        """Two changes after which all groups have their devices still."""
        return (pair for one in self._in_place(spots) for pair in self._in_place(one))

    def _in_place(self, spots: Spots) -> Iterator[Spots]:
        """Everything that differs in one thing while all groups keep their devices."""
        yield from self._other_hand_overs(spots)
        yield from self._other_numbers_on_host(spots)
        yield from self._other_orders(spots)
        for group in self._groups.values():
            if spots[group[0]].devices:
                yield from self._moved(spots, [(group, spots[group[0]].devices)])

    def _changes_of_one(self, spots: Spots) -> Iterator[Spots]:
        """Other devices for groups, and there another hand-over, or offload or not; or devices that go from one to
        another, and another hand-over."""
        sides = self._sides(spots)
        for side in sides:
            turns = [turn for turn in self._turns if any(turn[0] in group for group in side)]
            for moved in self._other_places(spots, side):
                for turn in turns:
                    yield from self._other_granularities(moved, turn)
                    yield from self._other_offload(moved, turn)
        for moved in self._exchanges(spots, sides):
            for turn in self._turns:
                yield from self._other_granularities(moved, turn)

    def _other_hand_overs(self, spots: Spots) -> Iterator[Spots]:
        """Other granularities, or offload or not, of each turn."""
        for turn in self._turns:
            yield from self._other_granularities(spots, turn)
            yield from self._other_offload(spots, turn)

    def _other_orders(self, spots: Spots) -> Iterator[Spots]:
        """Two turns that need nothing of each other and share devices, one right after the other, change places."""
        order = self._order(spots)
        for place, (first, second) in enumerate(itertools.pairwise(order)):
            ends = itertools.product(self._turns[first], self._turns[second])
            if (first, second) not in self._feeding and any(spots[i].devices & spots[k].devices for i, k in ends):
                changed = [*order[:place], second, first, *order[place + 2 :]]
                yield tuple(spot._replace(turn=changed.index(self._turn_of[s])) for s, spot in enumerate(spots))

    def _other_numbers_on_host(self, spots: Spots) -> Iterator[Spots]:
        for group in self._groups.values():
            if not spots[group[0]].devices:
                yield from self._other_host_ranks(spots, group)

    def _other_granularities(self, spots: Spots, turn: Sequence[int], *, far: bool = False) -> Iterator[Spots]:
        num_items, is_cycle = self._problem.num_items, turn in self._cycles
        sizes = sorted(set.intersection(*(set(self._sizes[s]) for s in turn)))
        now = spots[turn[0]].granularity or num_items
        near = [size for size in sizes if size < now][-2:] + [size for size in sizes if size > now][:2] + sizes[-1:]
        for size in sizes if far else dict.fromkeys(near):
            if size != now:
                granularity = size if size < num_items or is_cycle else 0
                yield _changed(spots, turn, lambda spot, to=granularity: spot._replace(granularity=to))

    def _other_offload(self, spots: Spots, turn: Sequence[int]) -> Iterator[Spots]:
        if self._problem.allow_offload and any(spots[s].devices for s in turn):
            yield _changed(spots, turn, lambda spot: spot._replace(offload=not spot.offload and bool(spot.devices)))

    def _sides(self, spots: Spots) -> list[list[list[int]]]:
        """The worker groups on devices, each alone, and together all with the same devices, or those of a cycle."""
        together: dict[int, list[list[int]]] = {}
        for group in self._groups.values():
            if spots[group[0]].devices:
                together.setdefault(spots[group[0]].devices, []).append(group)
        alone = [[group] for of in together.values() for group in of]
        cycles = [
            [group for group in of if set(group) & set(cycle)] for cycle in self._cycles for of in together.values()
        ]
        return alone + [of for of in [*together.values(), *cycles] if len(of) > 1]

    def _other_places(self, spots: Spots, side: Sequence[Sequence[int]]) -> Iterator[Spots]:
        """Other devices, or others for each instance, for these worker groups."""
        for devices in dict.fromkeys(self._device_sets(spots, side)):
            if devices:
                yield from self._some_moved(spots, [(group, devices) for group in side])

    def _other_host_ranks(self, spots: Spots, group: Sequence[int]) -> Iterator[Spots]:
        problem, stage = self._problem, self._problem.flow.stages[group[0]]
        for count in host_instances(problem.most_on_host(stage.name), problem.num_items, stage.num_parts):
            if count != spots[group[0]].num_ranks:
                yield _changed(spots, group, _placed(0, count))

    def _device_sets(self, spots: Spots, side: Sequence[Sequence[int]]) -> Iterator[int]:
        """Where groups might be instead: some devices fewer or more, what nobody has, where another group is; and in
        other pools."""
        mine = spots[side[0][0]].devices
        home = next(bits for bits in self._pool_bits if bits & mine)
        elsewhere = [bits for bits in self._pool_bits if not bits & mine]
        yield mine
        for pool in [home, *elsewhere]:
            others = [devices for devices in dict.fromkeys(spot.devices for spot in spots) if devices & pool]
            free = pool
            for devices in others:
                free &= ~devices
            yield pool
            yield free
            for devices in others:
                yield devices
                yield devices | free
                yield pool & ~devices
            if pool == home:
                yield mine | free
                for devices in others:
                    yield mine | devices
                    yield mine & ~devices
                yield from self._some_more_or_fewer(side, mine, free, pool & ~mine & ~free)

    def _some_more_or_fewer(self, side: Sequence[Sequence[int]], mine: int, free: int, taken: int) -> Iterator[int]:
        widths = {width for group in side for width in self._spans[group[0]]}
        for span in sorted({1, 2, *widths, *_large_spans(mine)}):
            yield mine & ~first_of(mine, span)
            yield mine & ~last_of(mine, span)
            more = mine | first_of(free, span)
            missing = span - min(span, free.bit_count())
            yield more | first_of(taken, missing)
            yield more | last_of(taken, missing)

    def _widths(self, s: int, num_devices: int, first: int) -> Iterator[int]:
        """Numbers of ranks on so many devices that were profiled, those that span `first` devices before others."""
        stage = self._problem.flow.stages[s]
        most = self._problem.profile(stage.name).max_instances
        pinned = self._problem.pinned_devices.get(stage.worker, num_devices)
        for span in sorted(self._spans[s], key=lambda span: (span != first, span)):
            num_ranks, left = divmod(num_devices, span)
            allowed = num_devices == pinned and num_ranks <= (most or num_ranks) and stage.devices_per_rank in (0, span)
            if num_ranks and not left and allowed and (not stage.num_parts or stage.num_parts % num_ranks == 0):
                yield num_ranks

    def _exchanges(self, spots: Spots, sides: Sequence[Sequence[Sequence[int]]]) -> Iterator[Spots]:
        for givers, takers in itertools.permutations(sides, 2):
            yield from self._exchanged(spots, givers, takers)

    def _exchanged(
        self, spots: Spots, givers: Sequence[Sequence[int]], takers: Sequence[Sequence[int]]
    ) -> Iterator[Spots]:
        """A few devices go from one set of them to another that has them not: for one group, or for all that are
        there."""
        if any(group in givers for group in takers):
            return
        giving, taking = spots[givers[0][0]].devices, spots[takers[0][0]].devices
        widths = {_width(spots[group[0]]) for group in (*givers, *takers)}
        for span in sorted({1, *widths, *_large_spans(giving & ~taking)}):
            handed = last_of(giving & ~taking, span)
            if handed and giving != handed:
                places = [(group, giving & ~handed) for group in givers]
                yield from self._some_moved(spots, [*places, *((group, taking | handed) for group in takers)])

    def _between_two(self, spots: Spots) -> Iterator[Spots]:
        groups = [group for group in self._groups.values() if spots[group[0]].devices]
        for one, other in itertools.permutations(groups, 2):
            yield from self._between(spots, one, other)

    def _between(self, spots: Spots, one: Sequence[int], other: Sequence[int]) -> Iterator[Spots]:
        """Two groups change places; they divide the devices of both between them, where they shared some; else both
        get all of them."""
        mine, theirs = spots[one[0]].devices, spots[other[0]].devices
        both = mine | theirs
        if mine & theirs:
            widths = {_width(spots[group[0]]) for group in (one, other)}
            for span in sorted({1, both.bit_count() // 2, *widths, *_large_spans(both)}):
                part = first_of(both, span)
                if part and part != both:
                    yield from self._some_moved(spots, [(one, part), (other, both & ~part)])
        elif one[0] < other[0] and any(both & ~bits == 0 for bits in self._pool_bits):
            yield from self._some_moved(spots, [(one, both), (other, both)])
        if one[0] < other[0] and mine != theirs:
            yield from self._some_moved(spots, [(one, theirs), (other, mine)])

    def _some_moved(self, spots: Spots, places: Sequence[tuple[Sequence[int], int]]) -> Iterator[Spots]:
        return itertools.islice(self._moved(spots, places), _NUM_WIDTHS)

    def _moved(self, spots: Spots, places: Sequence[tuple[Sequence[int], int]]) -> Iterator[Spots]:
        """The groups on these devices, which have to be of one pool that takes them, in every width that was
        profiled."""
        if not places:
            yield spots
            return
        (group, devices), *rest = places
        if not any(devices & ~bits == 0 for bits in self._homes[group[0]]):
            return
        for num_ranks in self._widths(group[0], devices.bit_count(), _width(spots[group[0]])):
            yield from self._moved(_changed(spots, group, _placed(devices, num_ranks)), rest)

    def _regroupings(self, spots: Spots) -> Iterator[Spots]:
        groups = [group for group in self._groups.values() if spots[group[0]].devices]
        if not 1 <= len(groups) <= _MOST_REGROUPED or self._problem.pinned_devices:
            return
        pools = self._pool_bits
        for homes in itertools.product(pools, repeat=len(groups)) if len(pools) > 1 else ():
            yield from self._some_moved(spots, list(zip(groups, homes, strict=True)))
        areas = [sum(self._area_s(s, spots[s]) for s in group) for group in groups]
        for pool in pools:
            for blocks in partitions(len(groups)):
                counts = _shared_out(pool.bit_count(), [sum(areas[i] for i in block) for block in blocks])
                if min(counts) <= 0:
                    continue
                places, left = [], pool
                for block, count in zip(blocks, counts, strict=True):
                    mine = first_of(left, count)
                    left &= ~mine
                    places += [(groups[i], mine) for i in block]
                yield from self._some_moved(spots, places)

    def _area_s(self, s: int, spot: Spot) -> float:
        """Device-seconds."""
        return spot.devices.bit_count() * self._needs(s, spot).busy_s


def _width(spot: Spot) -> int:
    """Devices that an instance spans; 1 where ranks share them."""
    return max(1, spot.devices.bit_count() // spot.num_ranks)


def _large_spans(devices: int) -> set[int]:
    """Parts of many devices that are moved at once."""
    return {devices.bit_count() // part for part in (4, 16, 64)} - {0}


def _placed(devices: int, num_ranks: int) -> Callable[[Spot], Spot]:
    return lambda spot: spot._replace(devices=devices, num_ranks=num_ranks)


def _changed(spots: Spots, which: Sequence[int], change: Callable[[Spot], Spot]) -> Spots:
    changed = list(spots)
    for s in which:
        changed[s] = change(spots[s])
    return tuple(changed)


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
