"""What a plan may become: plans that differ from it in one thing, or in two.

A hand-over, offload, the order of turns that need nothing of each other, the number of processes on the host, how many
devices an instance spans, and the devices of a worker group or of all groups that share them.
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
"""Worker groups on devices, of which all partitions are tried."""
_NUM_WIDTHS = 8
"""Choices of widths that are tried where groups come to other devices: those first that keep them."""


class Changes:
    """Changes of the plans of one problem. None is checked for whether it fits or goes round.

    Attributes:
        groups: worker group -> its stages, by their index in the flow.
        turns: the stages of each turn, in the order of the flow.
        cycles: those of each cycle.
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
        """The turns, in the order in which they come."""
        turns = [placements[turn[0]].turn for turn in self.turns]
        return tuple(sorted(range(len(turns)), key=turns.__getitem__))

    def single(self, placements: Placements) -> Iterator[Placements]:
        """Everything that differs in one thing."""
        yield from self._other_settings(placements)
        for kind in self.moves(placements):
            yield from kind

    def in_place(self, placements: Placements) -> Iterator[Placements]:
        """Everything that differs in one thing while all groups keep their devices."""
        yield from self._other_settings(placements)
        for group in self.groups.values():
            if placements[group[0]].devices:
                yield from self._moved(placements, [(group, placements[group[0]].devices)])

    def moves(self, placements: Placements) -> list[Iterator[Placements]]:
        """Each kind of change of devices; other widths on the same ones are among the first."""
        sides = self._sides(placements)
        places = (moved for side in sides for moved in self._other_places(placements, side))
        return [places, self._exchanges(placements, sides), self._between_two(placements), self._halves(placements)]

    def pairs_in_place(self, placements: Placements) -> Iterator[Placements]:
        """Two changes after which all groups have their devices still."""
        return (pair for one in self.in_place(placements) for pair in self.in_place(one))

    def with_hand_over(self, placements: Placements) -> Iterator[Placements]:
        """Other devices for groups, and there another hand-over, or offload or not; or devices that go from one to
        another, and another hand-over."""
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
        """Sizes of hand-overs and numbers of processes on the host between those that are tried first."""
        for turn in self.turns:
            others = self._other_sizes(placements, turn, self._sizes.between)
            yield from (_handing_over(placements, some, to) for some, to in others)
        for group in self.groups.values():
            if not placements[group[0]].devices:
                counts = self._sizes.between_on_host(group[0], placements[group[0]].num_ranks)
                yield from (_placed(placements, group, 0, count) for count in counts)

    def drawn(self, placements: Placements, draw: random.Random) -> Placements:
        """One change of a kind drawn at random; the plan itself where there is none of that kind."""
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
        """Each way in which the worker groups can share devices, or have their own, with as many for each as their work
        asks for (`area_s`: device-seconds of a stage), and all on each assignment to pools."""
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
        """Other granularities, offload or not, another number on the host, another order."""
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
        """Stages of a turn, and what all of them might hand over instead.

        Args:
            sizes: those of stages with so many ranks, which hand over so much now.
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
        """Two turns that need nothing of each other and share devices, one right after the other, change places."""
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
        """The worker groups on devices, each alone, and together all with the same devices, or those of a cycle."""
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
        """Other devices, or others for each instance, for these worker groups."""
        for devices in dict.fromkeys(self._device_sets(placements, side)):
            if devices:
                yield from self._some_moved(placements, [(group, devices) for group in side])

    def _device_sets(self, placements: Placements, side: Sequence[Sequence[int]]) -> Iterator[int]:
        """Where groups might be instead: some devices fewer or more, what nobody has, where another group is; and in
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
        """Numbers of ranks on so many devices that were profiled, those that span `first` devices before others."""
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
        """A few devices go from one set of them to another that has them not: for one group, or for all that are
        there."""
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
        """Two groups change places; they divide the devices of both between them, where they shared some; else both
        get all of them."""
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
        """A worker group of a cycle on half of its devices, and the others, where they are or on the other half, hand
        over half of what they have: so half of the items can be with one stage and half with another."""
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
        """The groups on these devices, which have to be of one pool that takes them, in every width that was
        profiled."""
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
        """What handed over an instance's whole share of a step before does so after the move too."""
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
    """Devices that an instance spans; 1 where ranks share them."""
    return max(1, placement.devices.bit_count() // placement.num_ranks)


def _large_spans(devices: int) -> set[int]:
    """Parts of many devices that are moved at once."""
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
