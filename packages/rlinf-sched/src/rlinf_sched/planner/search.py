"""The search: every way to decompose a flow, in time and in space, down to single turns.

A part of the flow is a set of turns. It is cut into a part that depends on nothing in the rest (a down-set) and the
rest; the two run one after the other on the same devices, interleaved on them, or side by side on separate devices.
Every cut of every part is tried, and for each part only Pareto-optimal candidates in devices, times and memory are
kept. Because a whole never gets better by a worse part, none of the best plans is lost.

The temporal and spatial composition is that of arXiv:2509.15965. Differences: cuts are all down-sets, not the prefixes
of one order; a part is described by when its items are finished and by its memory, not by one time; numbers of devices
are a column to minimize, not an axis of the table, so that the work does not grow with the cluster.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_sched import _C
from rlinf_sched.plan import Mode
from rlinf_sched.planner.columns import NUM_OUT, RowColumns
from rlinf_sched.planner.core_bound import least_step_s
from rlinf_sched.planner.options import Options, StageOptions
from rlinf_sched.planner.pools import Pool
from rlinf_sched.planner.tree import JOINS, Candidate, Join, JoinKind, Tree, leaves, mode_of, shape
from rlinf_sched.problem import Problem

_LEVELS = (0.1, 0.03, 0.01, 0.003)
_NUM_SHAPES = 4
_PAIRS = 4_000_000
"""Maximum number of row pairs per pass. It bounds the rows of a part; beyond it, times and numbers of devices in that
part count as equal at growing distances."""
_LEAST_ROWS, _MOST_ROWS = 40, 400
_SHARE_OF_DEVICES = 0.25
"""Numbers of devices count as equal within this fraction of the tolerance, which is for times."""
_RUNNER_UP = 1.5
"""Plans of another mode are searched up to this multiple of the best one's step."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The candidates to keep for a part of the flow, and the rows they were joined from."""

    front: _C.Front
    options: Options | None = None
    halves: dict[int, tuple["_Part", "_Part"]] = field(default_factory=dict)

    def was_thinned(self) -> bool:
        """Whether the part, or one that it was joined from, exceeds the limit of rows."""
        parts = (part for halves in self.halves.values() for part in halves)
        return self.front.was_thinned or any(part.was_thinned() for part in parts)

    def tree(self, row: int) -> Tree:
        return self.tree_of(self.front.origins[row])

    def tree_of(self, origin: Sequence[int]) -> Tree:
        kind, before_part, i, j = (int(x) for x in origin)
        if self.options is not None:
            return self.options.tree(i)
        before, after = self.halves[before_part]
        return Join(JOINS[kind], before.tree(i), after.tree(j))


class Search:
    """One search over one problem.

    Args:
        pools: the cluster's devices.
        tolerance: times that differ by less than this fraction of a step count as equal. With 0 the result is exact.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool], *, tolerance: float = 1e-3) -> None:
        flow = problem.flow
        self._problem, self._tolerance = problem, tolerance
        self._has_network = problem.cluster.num_nodes > 1
        self._columns = RowColumns(len(pools), len(flow.weight_edges))
        self._makes = StageOptions(problem, pools)
        self._least_step_s = least_step_s(problem)
        self._turns = flow.turns()
        self._num_devices = [float(pool.num_devices) for pool in pools]
        self._memory = [float(pool.memory_bytes) for pool in pools]
        turn_of = self._turn_of = {name: i for i, names in enumerate(self._turns) for name in names}
        self._needs = [0] * len(self._turns)  # bit set of the turns that feed each turn
        for name, others in flow.successors().items():
            for other in others:
                if turn_of[name] != turn_of[other]:
                    self._needs[turn_of[other]] |= 1 << turn_of[name]
        self._all = (1 << len(self._turns)) - 1

        def mask_of(groups: Sequence[str]) -> int:
            return sum({1 << turn_of[name] for group in groups for name in flow.workers[group]})

        self._training, self._generation = mask_of(flow.training_groups), mask_of(flow.generation_groups)
        self._group_masks = [mask_of([group]) for group in self._makes.groups]
        self._edges = [(mask_of([edge.source]), mask_of([edge.target])) for edge in flow.weight_edges]
        self._channels = [
            (1 << turn_of[writer], 1 << turn_of[reader], flow.item_bytes.get(channel, 0))
            for channel in flow.channels
            for writer in flow.writers(channel)
            for reader in flow.readers(channel)
        ]
        self.turn_options = [self._makes.of_turn(names) for names in self._turns]
        """The options of each turn, whether they fit in memory or not."""
        c = self._columns
        self._most_resident, self._most_peak = [], []
        for options in self.turn_options:
            self._most_resident.append(options.rows[:, c.resident].max(axis=0, initial=0.0))
            self._most_peak.append(options.rows[:, c.peak].max(axis=0, initial=0.0))
        areas = [self._least_area_of(options.rows, np.inf) for options in self.turn_options if len(options.rows)]
        least_s = max(1e-9, sum(areas) / sum(self._num_devices))
        self._load = [float(options.instance_s.min(initial=np.inf)) / least_s for options in self.turn_options]
        """Average number of instances of each turn that compute on devices at once, if the step is short."""
        self._parts: dict[int, _Part] = {}
        self._joins_of: dict[int, list[tuple[int, list[_C.Join]]]] = {}
        self.most_rows = self._affordable_rows() if tolerance else 0
        """Maximum rows of a part; 0: no limit."""
        self.was_thinned = False
        """Whether a part exceeded that limit in a pass."""
        self._least_area = [0.0] * len(self._turns)
        self._bound_s, self._tolerance_s, self._tolerance_share, self._may_mix = np.inf, 0.0, 0.0, True

    def best(self, modes: Sequence[Mode], num_each: int = 1) -> list[Candidate]:
        """The best candidates of each mode, at most `num_each` per mode, best first."""
        if not all(len(options.rows) for options in self.turn_options):
            return []
        chain = self._collocated
        guess_s = min((candidate.step_s for candidate in chain), default=np.inf)
        plans = list(chain) if "collocated" in modes else []
        if "hybrid" in modes:
            plans += self._refined(modes, plans, guess_s, True, num_each)
        plans.sort(key=lambda candidate: candidate.step_s)
        is_best = bool(plans) and "hybrid" in modes and plans[0].mode == "disaggregated"  # of a search that allows both
        if "disaggregated" in modes and self._generation and self._training and not is_best:
            disaggregated = [candidate for candidate in plans if candidate.mode == "disaggregated"]
            plans += self._refined(modes, disaggregated, guess_s, False, num_each)
        plans.sort(key=lambda candidate: candidate.step_s)
        result: list[Candidate] = []
        for mode in modes:
            of_mode = [candidate for candidate in plans if candidate.mode == mode]
            distinct = [c for i, c in enumerate(of_mode) if c.tree not in [other.tree for other in of_mode[:i]]]
            result += [replace(c, step_s=max(c.step_s, self._least_step_s)) for c in distinct[:num_each]]
        return sorted(result, key=lambda candidate: candidate.step_s)

    def _refined(
        self, modes: Sequence[Mode], rivals: Sequence[Candidate], guess_s: float, may_mix: bool, num_each: int
    ) -> list[Candidate]:
        """Passes of decreasing tolerance, each bounded by the best plan so far, down to the requested one. If a pass
        exceeds the limit of rows, the search continues only from the best tree shapes found.

        Args:
            modes: only plans of these modes serve as bounds.
            guess_s: initial bound, used if a plan of the sought mode satisfies it.
        """
        sought: Mode = "hybrid" if may_mix else "disaggregated"
        plans: list[Candidate] = []
        for tolerance in [*(level for level in _LEVELS if level > self._tolerance), self._tolerance]:
            best_s = min((one.step_s for one in [*rivals, *plans] if one.mode in modes), default=np.inf)
            bounds_s = [best_s]
            if not plans and not any(one.mode == sought for one in rivals):  # there must be one to compare others with
                bounds_s = [min(best_s, guess_s), _RUNNER_UP * min(best_s, guess_s), _RUNNER_UP * best_s]
            for bound_s in dict.fromkeys(bounds_s):
                plans += self._roots(bound_s, tolerance, may_mix, max(num_each, _NUM_SHAPES))
                if any(one.mode == sought for one in [*rivals, *plans]):
                    break
            if any(part.front.was_thinned for part in self._parts.values()):
                self.was_thinned = True
                eligible = [candidate for candidate in plans if candidate.mode in modes]
                return plans + self._improved(eligible, tolerance, may_mix, num_each)
        return plans

    def _improved(self, plans: Sequence[Candidate], passed: float, may_mix: bool, num_each: int) -> list[Candidate]:
        """Better candidates with the tree shapes of the best ones; all candidates were found with the tolerance
        `passed`."""
        shapes: dict[object, Candidate] = {}
        for candidate in sorted(plans, key=lambda candidate: candidate.step_s):
            shapes.setdefault(shape(candidate.tree), candidate)
        best_s = min((candidate.step_s for candidate in plans), default=np.inf)
        result: list[Candidate] = []
        for first in list(shapes.values())[:_NUM_SHAPES]:
            if first.step_s > best_s * (1 + 2 * passed):
                break
            for tolerance in [level for level in _LEVELS[2:] if level > self._tolerance]:
                self._set_bound(best_s, tolerance, may_mix)
                part = self._shaped(first.tree)
                result += self._best_rows(part, num_each)
                best_s = min([best_s, *(candidate.step_s for candidate in result)])
                if not len(part.front) or part.was_thinned():
                    break
        return result

    def _shaped(self, tree: Tree) -> _Part:
        """The candidates of a part that is cut like the tree."""
        mask = sum({1 << self._turn_of[leaf.stage] for leaf in leaves(tree)})
        front = self._new_front(mask)
        if not isinstance(tree, Join):
            return self._single(front, mask)
        before, after = self._shaped(tree.before), self._shaped(tree.after)
        before_mask = sum({1 << self._turn_of[leaf.stage] for leaf in leaves(tree.before)})
        join = self._join(before_mask, mask & ~before_mask, tree.kind)
        front.offer_joins(before.front, after.front, join, self._complete(mask))
        return _Part(front, halves={before_mask: (before, after)})

    def _set_bound(self, bound_s: float, tolerance: float, may_mix: bool) -> None:
        self._bound_s, self._may_mix = bound_s, may_mix
        self._least_area = [self._least_area_of(options.rows, bound_s) for options in self.turn_options]
        least_s = sum(self._least_area) / sum(self._num_devices)
        self._tolerance_s = tolerance * (bound_s if np.isfinite(bound_s) else least_s)
        self._tolerance_share = tolerance * _SHARE_OF_DEVICES

    def _roots(self, bound_s: float, tolerance: float, may_mix: bool, num_each: int) -> list[Candidate]:
        self._parts.clear()
        self._set_bound(bound_s, tolerance, may_mix)
        if self._all & (self._all - 1) == 0:
            return self._best_rows(self._part(self._all), num_each)
        root = _Part(self._new_front(self._all))
        wholes = []
        for before, joins in self._cut_joins(self._all):
            halves = self._part(before), self._part(self._all & ~before)
            root.halves[before] = halves
            for join in joins:
                wholes += root.front.best_joins(halves[0].front, halves[1].front, join, count=2 * num_each)
        result = []
        for mixed in (False, True):
            for step_s, sync_s, _, origin in sorted(w for w in wholes if w[2] == mixed)[: 2 * num_each]:
                tree = root.tree_of(origin)
                result.append(Candidate(step_s, sync_s, mode_of(tree, self._problem.flow), tree))
        return result

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _part(self, mask: int) -> _Part:
        part = self._parts.get(mask)
        if part is None:
            front = self._new_front(mask)
            part = self._parts[mask] = _Part(front)
            if mask & (mask - 1) == 0:
                part = self._parts[mask] = self._single(front, mask)
            else:
                for before, joins in self._cut_joins(mask):
                    left, right = part.halves[before] = self._part(before), self._part(mask & ~before)
                    for join in joins:
                        front.offer_joins(left.front, right.front, join, self._complete(mask))
        return part

    def _single(self, front: _C.Front, mask: int) -> _Part:
        options = self.turn_options[mask.bit_length() - 1]
        mixes = bool(mask & self._training) and bool(mask & self._generation)
        self._offer(front, mask, np.arange(len(options.rows)), mixes)
        return _Part(front, options)

    def _offer(self, front: _C.Front, mask: int, members: np.ndarray, mixes: bool) -> None:
        options = self.turn_options[mask.bit_length() - 1]
        signatures = options.signatures[members]
        signatures[:, self._complete(mask)] = -1
        front.offer(options.rows[members], signatures, np.full(len(members), mixes), members)

    def _cut_joins(self, mask: int) -> list[tuple[int, list[_C.Join]]]:
        """Every cut of a part with every kind of join."""
        if mask not in self._joins_of:
            self._joins_of[mask] = [(before, list(self._joins(before, mask & ~before))) for before in self._cuts(mask)]
        return self._joins_of[mask]

    def _affordable_rows(self) -> int:
        """The limit of rows per part, so that a pass ends soon."""
        masks, num_joins = [self._all], 1
        seen = set(masks)
        for mask in masks:  # which grows
            for before, joins in self._cut_joins(mask):
                num_joins += len(joins)
                new = {before, mask & ~before} - seen
                seen |= new
                masks += sorted(new)
        return int(min(max((_PAIRS / num_joins) ** 0.5, _LEAST_ROWS), _MOST_ROWS))

    def _cuts(self, mask: int) -> Iterator[int]:
        """The down-sets of a part, except the empty one and the part itself."""
        sub = (mask - 1) & mask
        while sub:
            rest = mask & ~sub
            if all(not (self._needs[i] & rest) for i in _bits(sub)):
                yield sub
            sub = (sub - 1) & mask

    def _feeds(self, before: int, after: int) -> bool:
        return any(self._needs[i] & before for i in _bits(after))

    def _complete(self, mask: int) -> list[bool]:
        """For each group with several stages: whether all of them are in the part, so that none outside must match."""
        return [group & mask == group for group in self._group_masks]

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _joins(self, before: int, after: int) -> Iterator[_C.Join]:
        """All kinds of join of two parts.

        A stage whose items are ready keeps its devices until it is done, so it cannot be interleaved. Two independent
        parts are tried side by side once, and a side-by-side join must not separate a worker group.
        """
        yield self._join(before, after, "in turn")
        if self._feeds(before, after) and all(self._needs[i] for i in _bits(before)):
            yield self._join(before, after, "interleaved")
        torn = any(group & before and group & after for group in self._group_masks)
        if not torn and (self._feeds(before, after) or before > after):
            yield self._join(before, after, "side by side")

    def _join(self, before: int, after: int, kind: JoinKind) -> _C.Join:
        """Weight edges across the cut cost a sync, in which each device of the target receives its shard; items that
        cross it wait for the latency of one hand-over."""
        links = self._problem.cluster.links
        far = kind == "side by side" and self._has_network
        rate = links.network_bytes_per_s if far else links.node_bytes_per_s
        crossing = [num_bytes for writer, reader, num_bytes in self._channels if writer & before and reader & after]
        trains, generates = self._training, self._generation
        syncs = [
            bool((source & before and target & after) or (source & after and target & before))
            for source, target in self._edges
        ]
        latencies = [
            self._problem.sync_latency_s(edge)
            for edge, is_synced in zip(self._problem.flow.weight_edges, syncs, strict=True)
            if is_synced
        ]
        return _C.Join(
            kind=JOINS.index(kind),
            before_part=before,
            feeds=self._feeds(before, after),
            moved_s=links.latency_s + max(crossing, default=0) / rate,
            waits=self._waits(before, after),
            syncs=syncs,
            sync_latency_s=sum(latencies) / max(1, len(latencies)),  # each of them has it added
            sync_bytes_per_s=rate,
            mixes=bool((before & trains and after & generates) or (before & generates and after & trains)),
        )

    def _waits(self, before: int, after: int) -> float:
        """The fraction of the second part's work that is left when the first part, which feeds it gradually, is done:
        what arrived in its last busy period, because it releases the devices when all of its instances are idle at
        once. The mean busy period of a queue, in arrivals: L. Takacs, "Introduction to the theory of queues", 1962."""
        if not any(self._load[i] for i in _bits(after)):
            return 0.0
        load = min(sum(self._load[i] for i in _bits(before)), np.log(self._problem.num_items + 1))
        return float(np.expm1(load)) / self._problem.num_items

    def _limits(self, mask: int) -> _C.Limits:
        num_pools = len(self._num_devices)
        rest = list(_bits(self._all & ~mask))
        resident = sum((self._most_resident[i] for i in rest), np.zeros(num_pools))
        peak = np.max([np.zeros(num_pools), *(self._most_peak[i] for i in rest)], axis=0)
        return _C.Limits(
            devices=self._num_devices,
            memory=self._memory,
            rest_resident=resident.tolist(),
            rest_peak=peak.tolist(),
            steps_under_way=self._problem.flow.max_staleness + 1,
            bound_s=self._bound_s,
            rest_area=sum(self._least_area[i] for i in rest),
            tolerance_s=self._tolerance_s,
            tolerance_share=self._tolerance_share,
            may_mix=self._may_mix,
            most_rows=self.most_rows,
        )

    def _least_area_of(self, rows: np.ndarray, bound_s: float) -> float:
        """Minimum device-seconds of a turn in a plan that satisfies the bound."""
        c = self._columns
        quick = rows[rows[:, c.period] <= bound_s * (1 + 1e-9)]
        return float((quick[:, c.devices].sum(axis=1) * quick[:, c.period]).min(initial=np.inf))

    def _new_front(self, mask: int) -> _C.Front:
        c = self._columns
        columns = _C.Columns(num_pools=c.num_pools, num_out=NUM_OUT, num_edges=c.num_edges)
        return _C.Front(columns, self._limits(mask), num_groups=len(self._group_masks))

    # -- whole plans -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _collocated(self) -> list[Candidate]:
        """The best plan in which every stage has the same devices, if any: for each possible number of devices, all
        turns one after the other, with host stages beside them if that is better."""
        c = self._columns
        self._set_bound(np.inf, 0.0, True)
        counts = [
            {tuple(row) for row in np.unique(options.rows[options.shares_everything, c.devices], axis=0) if row.any()}
            for options in self.turn_options
        ]
        common = set.intersection(*(count for count in counts if count)) if any(counts) else {(0.0,) * c.num_pools}
        best: Candidate | None = None
        for least_s, devices in sorted((self._least_chain_s(np.array(devices)), devices) for devices in common):
            if best is None or least_s < best.step_s:
                chain = self._chain(np.array(devices))
                best = min((one for one in (best, chain) if one), key=lambda candidate: candidate.step_s, default=None)
        return [best] if best else []

    def _least_chain_s(self, devices: np.ndarray) -> float:
        """Lower bound for all turns on this many devices of each pool: the sum of the minimum times of its turns with
        devices."""
        c, total = self._columns, 0.0
        for options in self.turn_options:
            rows = options.rows[np.all(options.rows[:, c.devices] == devices, axis=1) & options.shares_everything]
            total += rows[:, c.period].min(initial=np.inf) if len(rows) else 0.0
        return total

    def _chain(self, devices: np.ndarray) -> Candidate | None:
        """All turns one after the other on this many devices of each pool."""
        c = self._columns
        chain, done, beside = None, 0, True
        for turn, options in enumerate(self.turn_options):
            mask, counts = 1 << turn, options.rows[:, c.devices]
            on_host = not counts.any()
            members = np.flatnonzero((np.all(counts == devices, axis=1) | on_host) & options.shares_everything)
            part = _Part(self._new_front(mask), options)
            self._offer(part.front, mask, members, False)
            if chain is not None:
                joined = _Part(self._new_front(done | mask), halves={done: (chain, part)})
                kinds: tuple[JoinKind, ...] = ("in turn", "side by side") if on_host or beside else ("in turn",)
                for kind in kinds:
                    join = self._join(done, mask, kind)
                    joined.front.offer_joins(chain.front, part.front, join, self._complete(done | mask))
                part = joined
            chain, done, beside = part, done | mask, beside and on_host
        assert chain is not None
        return next(iter(self._best_rows(chain, 1)), None)

    def _best_rows(self, part: _Part, count: int) -> list[Candidate]:
        """The best rows of a part that is the whole flow."""
        rows = part.front.rows
        sync_s = rows[:, self._columns.sync]
        step_s = part.front.steps_s
        return [
            Candidate(float(step_s[i]), float(sync_s[i]), mode_of(tree := part.tree(int(i)), self._problem.flow), tree)
            for i in np.argsort(step_s, kind="stable")[:count]
        ]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
