"""Moves of local search: plans that differ from a given one in one thing, or in two.

A granularity, offload, the order of independent turns, the number of host processes, the devices per instance, and the
devices of a worker group or of all groups that share them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from rlinf_sched.planner.placements import Placements, StagePlacement, bits_of, first_of, last_of
from rlinf_sched.planner.places import partitions
from rlinf_sched.planner.pools import Pool
from rlinf_sched.planner.sizes import Sizes
from rlinf_sched.problem import Problem

_MOST_REGROUPED = 6
"""Maximum number of worker groups on devices for which all partitions are tried."""
_NUM_WIDTHS = 8
"""Combinations of widths that are tried when groups move to other devices, starting with unchanged widths."""


class Changes:
    """Moves for the plans of one problem. Whether a result fits or can be executed is not checked here.

    Attributes:
        groups: worker group -> its stages, by their index in the flow.
        turns: the stages of each turn, in the order of the flow.
        cycles: the stages of each cycle.
        turn_of: stage -> its turn.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool]) -> None:
        flow = problem.flow
        names = [stage.name for stage in flow.stages]
        self._problem = problem
        self.groups = {worker: [names.index(name) for name in of] for worker, of in flow.workers.items()}
        self.turns = [[names.index(name) for name in of] for of in flow.turns()]
        self.cycles = [[names.index(name) for name in of] for of in flow.cycles()]
        self.turn_of = {s: turn for turn, of in enumerate(self.turns) for s in of}
        self._feeding = {
            (self.turn_of[names.index(source)], self.turn_of[names.index(target)])
            for source, targets in flow.successors().items()
            for target in targets
        }
        self._pool_bits = [bits_of(pool.devices) for pool in pools]
        self._spans = [sorted({one.num_devices for one in problem.profile(name).instances}) for name in names]
        self._sizes = Sizes(problem)
        self._widths_of: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._homes = [
            [bits for pool, bits in zip(pools, self._pool_bits, strict=True) if any(map(pool.takes, products))]
            for products in ({choice.device_name for choice in problem.profile(name).instances} for name in names)
        ]

    def order(self, placements: Placements) -> tuple[int, ...]:
        """The turns, in their order of execution."""
        turns = [placements[turn[0]].turn for turn in self.turns]
        return tuple(sorted(range(len(turns)), key=turns.__getitem__))

    def single(self, placements: Placements) -> Iterator[Placements]:
        """All plans that differ in one thing."""
        yield from self._other_settings(placements)
        for kind in self.moves(placements):
            yield from kind

    def in_place(self, placements: Placements) -> Iterator[Placements]:
        """All plans that differ in one thing while all groups keep their devices."""
        yield from self._other_settings(placements)
        for group in self.groups.values():
            if placements[group[0]].devices:
                yield from self._moved(placements, [(group, placements[group[0]].devices)])

    def moves(self, placements: Placements) -> list[Iterator[Placements]]:
        """All changes of devices, by kind; other widths on the same devices are in the first kind."""
        sides = self._sides(placements)
        places = (moved for side in sides for moved in self._other_places(placements, side))
        return [places, self._exchanges(placements, sides), self._between_two(placements), self._halves(placements)]

    def pairs_in_place(self, placements: Placements) -> Iterator[Placements]:
        """Pairs of changes after which all groups still have their devices."""
        return (pair for one in self.in_place(placements) for pair in self.in_place(one))

    def with_hand_over(self, placements: Placements) -> Iterator[Placements]:
        """Other devices for groups, together with another granularity or offload there; or devices that move from one
        group to another, together with another granularity."""
        sides = self._sides(placements)
        for side in sides:
            turns = [turn for turn in self.turns if any(turn[0] in group for group in side)]
            for moved in self._other_places(placements, side):
                for turn in turns:
                    yield from self._other_granularities(moved, turn)
                    yield from self._other_offload(moved, turn)
        for moved in self._exchanges(placements, sides):
            for turn in self.turns:
                yield from self._other_granularities(moved, turn)

    def finer(self, placements: Placements) -> Iterator[Placements]:
        """Granularities and numbers of host processes between those that are tried first."""
        for turn in self.turns:
            others = self._other_sizes(placements, turn, self._sizes.between)
            yield from (_handing_over(placements, some, to) for some, to in others)
        for group in self.groups.values():
            if not placements[group[0]].devices:
                counts = self._sizes.between_on_host(group[0], placements[group[0]].num_ranks)
                yield from (_placed(placements, group, 0, count) for count in counts)

    def drawn(self, placements: Placements, draw: random.Random) -> Placements:
        """A random change of one kind; the plan itself if there is none of that kind."""
        turn = draw.choice(self.turns)
        kind = draw.randrange(8)
        if kind < 3:
            sizes = list(self._other_sizes(placements, turn, self._sizes.near_and_far))
            return _handing_over(placements, *draw.choice(sizes)) if sizes else placements
        changes: Iterable[Placements]
        if kind == 3:
            changes = itertools.chain(self._other_offload(placements, turn), self._other_orders(placements))
        else:
            group = draw.choice(list(self.groups.values()))
            devices = placements[group[0]].devices
            if not devices:
                changes = self._other_host_ranks(placements, group)
            elif kind == 4:
                changes = self._moved(placements, [(group, devices)])
            else:
                sides = self._sides(placements)
                side = draw.choice(sides)
                if kind == 5:
                    sets = [devices for devices in self._device_sets(placements, side) if devices]
                    to = draw.choice(sets)
                    changes = self._moved(placements, [(group, to) for group in side])
                elif kind == 6:
                    changes = self._exchanged(placements, side, draw.choice(sides))
                else:
                    others = [
                        other for other in self.groups.values() if placements[other[0]].devices and other != group
                    ]
                    changes = self._between(placements, group, draw.choice(others)) if others else ()
        choices = list(changes)
        return draw.choice(choices) if choices else placements

    def regroupings(
        self, placements: Placements, area_s: Callable[[int, StagePlacement], float]
    ) -> Iterator[Placements]:
        """Every way in which the worker groups can share devices or have their own, with devices in proportion to their
        work (`area_s`: device-seconds of a stage), on each assignment to pools."""
        groups = [group for group in self.groups.values() if placements[group[0]].devices]
        if not 1 <= len(groups) <= _MOST_REGROUPED or self._problem.pinned_devices:
            return
        pools = self._pool_bits
        for homes in itertools.product(pools, repeat=len(groups)) if len(pools) > 1 else ():
            yield from self._some_moved(placements, list(zip(groups, homes, strict=True)))
        areas = [sum(area_s(s, placements[s]) for s in group) for group in groups]
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
                yield from self._some_moved(placements, places)

    def _other_settings(self, placements: Placements) -> Iterator[Placements]:
        """Other granularities, offload, numbers of host processes, orders."""
        for turn in self.turns:
            yield from self._other_granularities(placements, turn)
            yield from self._other_offload(placements, turn)
        for group in self.groups.values():
            if not placements[group[0]].devices:
                yield from self._other_host_ranks(placements, group)
        yield from self._other_orders(placements)

    def _other_granularities(self, placements: Placements, turn: Sequence[int]) -> Iterator[Placements]:
        return (
            _handing_over(placements, some, to) for some, to in self._other_sizes(placements, turn, self._sizes.near)
        )

    def _other_sizes(
        self, placements: Placements, turn: Sequence[int], sizes: Callable[[Sequence[int], int, int], Iterable[int]]
    ) -> Iterator[tuple[Sequence[int], int]]:
        """The stages of a turn, and other granularities that all of them may have.

        Args:
            sizes: maps a number of ranks and the current granularity to the alternatives.
        """
        for some in _alone_and_together(turn):
            now, num_ranks = self._size(placements[some[0]]), min(placements[s].num_ranks for s in some)
            for size in dict.fromkeys(sizes(some, num_ranks, now)):
                granularity = self._sizes.granularity(some[0], size)
                if any(placements[s].granularity != granularity for s in some):
                    yield some, granularity

    def _size(self, placement: StagePlacement) -> int:
        return placement.granularity or self._problem.num_items

    def _other_offload(self, placements: Placements, turn: Sequence[int]) -> Iterator[Placements]:
        if self._problem.allow_offload and any(placements[s].devices for s in turn):
            changed = list(placements)
            for s in turn:
                changed[s] = placements[s]._replace(offload=not placements[s].offload and bool(placements[s].devices))
            yield tuple(changed)

    def _other_orders(self, placements: Placements) -> Iterator[Placements]:
        """Swaps two consecutive turns that are independent of each other and share devices."""
        order = self.order(placements)
        for place, (first, second) in enumerate(itertools.pairwise(order)):
            ends = itertools.product(self.turns[first], self.turns[second])
            if (first, second) not in self._feeding and any(
                placements[i].devices & placements[k].devices for i, k in ends
            ):
                changed = [*order[:place], second, first, *order[place + 2 :]]
                yield tuple(
                    placement._replace(turn=changed.index(self.turn_of[s])) for s, placement in enumerate(placements)
                )

    def _other_host_ranks(self, placements: Placements, group: Sequence[int]) -> Iterator[Placements]:
        for count in self._sizes.on_host(group[0]):
            if count != placements[group[0]].num_ranks:
                yield _placed(placements, group, 0, count)

    def _sides(self, placements: Placements) -> list[list[list[int]]]:
        """The worker groups on devices: each alone, groups with the same devices together, and those of a cycle
        together."""
        together: dict[int, list[list[int]]] = {}
        for group in self.groups.values():
            if placements[group[0]].devices:
                together.setdefault(placements[group[0]].devices, []).append(group)
        alone = [[group] for of in together.values() for group in of]
        cycles = [
            [group for group in of if set(group) & set(cycle)] for cycle in self.cycles for of in together.values()
        ]
        return alone + [of for of in [*together.values(), *cycles] if len(of) > 1]

    def _other_places(self, placements: Placements, side: Sequence[Sequence[int]]) -> Iterator[Placements]:
        """Other devices, or other devices per instance, for these worker groups."""
        for devices in dict.fromkeys(self._device_sets(placements, side)):
            if devices:
                yield from self._some_moved(placements, [(group, devices) for group in side])

    def _device_sets(self, placements: Placements, side: Sequence[Sequence[int]]) -> Iterator[int]:
        """Candidate devices for groups: some devices fewer or more, free devices, the devices of another group; also in
        other pools."""
        mine = placements[side[0][0]].devices
        home = next(bits for bits in self._pool_bits if bits & mine)
        elsewhere = [bits for bits in self._pool_bits if not bits & mine]
        yield mine
        for pool in [home, *elsewhere]:
            others = [
                devices for devices in dict.fromkeys(placement.devices for placement in placements) if devices & pool
            ]
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

    def _widths(self, s: int, num_devices: int, first: int) -> tuple[int, ...]:
        """Profiled numbers of ranks on this many devices, first those with `first` devices per instance."""
        key = s, num_devices, first
        if key not in self._widths_of:
            self._widths_of[key] = tuple(self._possible_widths(*key))
        return self._widths_of[key]

    def _possible_widths(self, s: int, num_devices: int, first: int) -> Iterator[int]:
        stage = self._problem.flow.stages[s]
        most = self._problem.profile(stage.name).max_instances
        pinned = self._problem.pinned_devices.get(stage.worker, num_devices)
        for span in sorted(self._spans[s], key=lambda span: (span != first, span)):
            num_ranks, left = divmod(num_devices, span)
            allowed = num_devices == pinned and num_ranks <= (most or num_ranks) and stage.devices_per_rank in (0, span)
            if num_ranks and not left and allowed and (not stage.num_parts or stage.num_parts % num_ranks == 0):
                yield num_ranks

    def _exchanges(self, placements: Placements, sides: Sequence[Sequence[Sequence[int]]]) -> Iterator[Placements]:
        for givers, takers in itertools.permutations(sides, 2):
            yield from self._exchanged(placements, givers, takers)

    def _exchanged(
        self, placements: Placements, givers: Sequence[Sequence[int]], takers: Sequence[Sequence[int]]
    ) -> Iterator[Placements]:
        """Moves a few devices from one set to another that does not have them: for one group, or for all groups on the
        set."""
        if any(group in givers for group in takers):
            return
        giving, taking = placements[givers[0][0]].devices, placements[takers[0][0]].devices
        widths = {_width(placements[group[0]]) for group in (*givers, *takers)}
        for span in sorted({1, *widths, *_large_spans(giving & ~taking)}):
            handed = last_of(giving & ~taking, span)
            if handed and giving != handed:
                places = [(group, giving & ~handed) for group in givers]
                yield from self._some_moved(placements, [*places, *((group, taking | handed) for group in takers)])

    def _between_two(self, placements: Placements) -> Iterator[Placements]:
        groups = [group for group in self.groups.values() if placements[group[0]].devices]
        for one, other in itertools.permutations(groups, 2):
            yield from self._between(placements, one, other)

    def _between(self, placements: Placements, one: Sequence[int], other: Sequence[int]) -> Iterator[Placements]:
        """Swaps two groups; if they shared devices, they divide them; otherwise both also get all devices of both."""
        mine, theirs = placements[one[0]].devices, placements[other[0]].devices
        both = mine | theirs
        if mine & theirs:
            widths = {_width(placements[group[0]]) for group in (one, other)}
            for span in sorted({1, both.bit_count() // 2, *widths, *_large_spans(both)}):
                part = first_of(both, span)
                if part and part != both:
                    yield from self._some_moved(placements, [(one, part), (other, both & ~part)])
        elif one[0] < other[0] and any(both & ~bits == 0 for bits in self._pool_bits):
            yield from self._some_moved(placements, [(one, both), (other, both)])
        if one[0] < other[0] and mine != theirs:
            yield from self._some_moved(placements, [(one, theirs), (other, mine)])

    def _halves(self, placements: Placements) -> Iterator[Placements]:
        """Halves the devices of a worker group of a cycle, and halves the granularity of the others in place or on the
        other half, so that half of the items can be in one stage and half in another."""
        for cycle in self.cycles:
            groups = [
                group for group in self.groups.values() if set(group) & set(cycle) and placements[group[0]].devices
            ]
            for group in groups if len(groups) > 1 else ():
                mine = placements[group[0]].devices
                half = first_of(mine, mine.bit_count() // 2)
                others = [other for other in groups if other != group]
                for places in ([], [(other, mine & ~half) for other in others]) if half else ():
                    for moved in self._some_moved(placements, [(group, half), *places]):
                        changed = list(moved)
                        for s in set(cycle) - set(group):
                            size = self._sizes.share(s, moved[s].num_ranks, num_parts=2)
                            changed[s] = moved[s]._replace(granularity=size)
                        yield tuple(changed)

    def _some_moved(self, placements: Placements, places: Sequence[tuple[Sequence[int], int]]) -> Iterator[Placements]:
        return itertools.islice(self._moved(placements, places), _NUM_WIDTHS)

    def _moved(self, placements: Placements, places: Sequence[tuple[Sequence[int], int]]) -> Iterator[Placements]:
        """Puts the groups on these devices, which must be in one pool that they support, with every profiled width."""
        (group, devices), *rest = places
        if not any(devices & ~bits == 0 for bits in self._homes[group[0]]):
            return
        for num_ranks in self._widths(group[0], devices.bit_count(), _width(placements[group[0]])):
            moved = _placed(placements, group, devices, num_ranks)
            whole = self._with_whole_shares(placements, moved, group)
            for sized in (moved,) if whole == moved else (moved, whole):
                if rest:
                    yield from self._moved(sized, rest)
                else:
                    yield sized

    def _with_whole_shares(self, before: Placements, after: Placements, group: Sequence[int]) -> Placements:
        """If a granularity was an instance's whole share of a step, it is so after the move too."""
        num_items, changed = self._problem.num_items, list(after)
        for s in group:
            size, num_ranks = after[s].granularity, after[s].num_ranks
            if size and size * before[s].num_ranks >= num_items and num_ranks != before[s].num_ranks:
                size = self._sizes.granularity(s, self._sizes.share(s, num_ranks))
                changed[s] = after[s]._replace(granularity=size)
        return tuple(changed)


def _alone_and_together(turn: Sequence[int]) -> list[Sequence[int]]:
    """The stages of a turn, and each of a cycle's."""
    return [turn, *([s] for s in turn)] if len(turn) > 1 else [turn]


def _width(placement: StagePlacement) -> int:
    """Devices per instance; 1 if ranks share them."""
    return max(1, placement.devices.bit_count() // placement.num_ranks)


def _large_spans(devices: int) -> set[int]:
    """Numbers of devices that are moved at once, as fractions of many."""
    return {devices.bit_count() // part for part in (2, 4, 16, 64)} - {0}


def _placed(placements: Placements, group: Sequence[int], devices: int, num_ranks: int) -> Placements:
    changed = list(placements)
    for s in group:
        _, _, granularity, offload, turn = placements[s]
        changed[s] = StagePlacement(devices, num_ranks, granularity, offload, turn)
    return tuple(changed)


def _handing_over(placements: Placements, stages: Sequence[int], granularity: int) -> Placements:
    changed = list(placements)
    for s in stages:
        devices, num_ranks, _, offload, turn = placements[s]
        changed[s] = StagePlacement(devices, num_ranks, granularity, offload, turn)
    return tuple(changed)


def _shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Integers with this sum, as close to the weights as possible, each at least 1 if possible."""
    counts = [max(1, int(total * weight / sum(weights))) for weight in weights]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        lacks = [total * weight / sum(weights) - count for weight, count in zip(weights, counts, strict=True)]
        choices = [i for i in range(len(counts)) if step > 0 or counts[i] > 1]
        if not choices:
            return [0] * len(counts)
        counts[max(choices, key=lambda i: step * lacks[i])] += step
    return counts
