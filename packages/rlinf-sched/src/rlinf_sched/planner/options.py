"""All candidates for a single turn of the flow: one stage on some devices, or a cycle's stages on theirs.

Stored as arrays with a row per candidate; the tree of a row is built on request.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_sched.planner.arrivals import arriving_costs
from rlinf_sched.planner.columns import RowColumns
from rlinf_sched.planner.cycle_time import cycle_times, of_busiest
from rlinf_sched.planner.places import Blocks, ChosenPlaces, Places, combinations, may_share, partitions
from rlinf_sched.planner.pools import Pool, device_counts, host_instances
from rlinf_sched.planner.tree import Cycle, Tree
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile
from rlinf_sched.stage_time import items_at_once, stage_times

NO_SIGNATURE = -1
_GAINS = 0.1
"""Fraction by which uneven instances must shorten a round of a cycle, so that not every number is tried; local search
moves single devices later."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Options that differ only in numbers."""

    rows: np.ndarray
    chosen: tuple[ChosenPlaces, ...]
    """The place of each stage of the turn."""
    shares_everything: bool
    """Whether all of its stages with devices share them."""
    instance_s: np.ndarray
    blocks: Blocks = ()
    """The stages of a cycle that share devices; empty for a single stage."""

    def tree(self, row: int) -> Tree:
        leaves = tuple(stage.places.leaf(stage.index[row]) for stage in self.chosen)
        return Cycle(leaves, self.blocks) if self.blocks else leaves[0]


class Options:
    """Candidates for a turn: rows of numbers, and what each represents.

    Attributes:
        rows: float64 [m, columns.width].
        signatures: int64 [m, groups with several stages]: placement of the group, -1 if no stage outside must match.
        shares_everything: bool [m]: all stages with devices share them.
        instance_s: float64 [m]: seconds times instances on devices.
    """

    def __init__(self, chunks: Sequence[_Chunk], signatures: np.ndarray, width: int) -> None:
        counts = [len(chunk.rows) for chunk in chunks]
        self.rows = np.concatenate([np.zeros((0, width)), *(chunk.rows for chunk in chunks)])
        self.signatures = signatures
        self.shares_everything = np.repeat(np.array([c.shares_everything for c in chunks], dtype=bool), counts)
        self.instance_s = np.concatenate([np.zeros(0), *(chunk.instance_s for chunk in chunks)])
        self._chunks, self._starts = chunks, [0, *itertools.accumulate(counts)]

    def tree(self, row: int) -> Tree:
        chunk = bisect_right(self._starts, row) - 1
        return self._chunks[chunk].tree(row - self._starts[chunk])


class StageOptions:
    """Makes the options of each turn.

    All stages of a worker group must have one placement: `groups` numbers the groups with several stages, and options
    of their stages carry a signature that must match.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool]) -> None:
        self._problem = problem
        self._pools = pools
        self._columns = RowColumns(len(pools), len(problem.flow.weight_edges))
        flow = problem.flow
        self.groups = [group for group, stages in flow.workers.items() if len(stages) > 1]
        self._cycles = flow.cycles()
        self._costs = arriving_costs(problem)
        self._first_of_group = {stages[0] for stages in flow.workers.values()}
        self._receives = {  # first stage of a group -> the weight edges that lead to it
            stages[0]: [(i, problem.synced_bytes(e)) for i, e in enumerate(flow.weight_edges) if e.target == worker]
            for worker, stages in flow.workers.items()
        }
        self._signatures: dict[tuple[int, ...], int] = {}

    def of_turn(self, names: Sequence[str]) -> Options:
        """Every option of one turn."""
        chunks = list(self._of_cycle(names) if tuple(names) in self._cycles else self._of_stage(names[0]))
        signatures = [self._signatures_of(chunk) for chunk in chunks]
        nothing = np.zeros((0, len(self.groups)), dtype=np.int64)
        return Options(chunks, np.concatenate([nothing, *signatures]), self._columns.width)

    def _signatures_of(self, chunk: _Chunk) -> np.ndarray:
        result = np.full((len(chunk.rows), len(self.groups)), NO_SIGNATURE, dtype=np.int64)
        for stage in chunk.chosen:
            places = stage.places
            worker = self._problem.flow.stage(places.stage).worker
            if worker not in self.groups:
                continue
            keys = [
                (places.pool, count, count * places.instance.num_devices, places.offload)
                for count in places.num_instances[stage.index].tolist()
            ]
            numbers = [self._signatures.setdefault(key, len(self._signatures)) for key in keys]
            result[:, self.groups.index(worker)] = numbers
        return result

    # -- one stage ---------------------------------------------------------------------------------------------------

    def _of_stage(self, name: str) -> Iterator[_Chunk]:
        """For each parallelism, pool and, on devices, with and without offload: every number of instances and
        granularity."""
        problem, profile = self._problem, self._problem.profile(name)
        sizes = np.array(problem.choices(name))
        for choice, instance in enumerate(profile.instances):
            for pool, counts in self._counts(name, instance, problem.choices(name)):
                hand_overs = np.minimum(sizes[:, None], -(-problem.num_items // counts))
                if instance.max_items:
                    hand_overs = np.minimum(hand_overs, instance.max_items)
                differs = np.ones(hand_overs.shape, dtype=bool)  # from equal hand-overs with another granularity
                differs[1:] = np.diff(hand_overs, axis=0) != 0
                size, count = np.nonzero(differs)
                if profile.batching == "continuous":
                    count, size = np.nonzero(differs.T)
                times = stage_times(
                    instance,
                    profile.batching,
                    self._costs[name],
                    counts[count],
                    sizes[size],
                    num_steps=problem.flow.max_staleness + 1,
                )
                for offload in (False, True) if instance.num_devices and problem.allow_offload else (False,):
                    places = self._places(name, choice, pool, counts[count], sizes[size], offload)
                    chosen = (ChosenPlaces(places, np.arange(len(count))),)
                    yield self._chunk(chosen, ((0,),), times)

    def _counts(self, name: str, instance: InstanceProfile, sizes: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """(pool, numbers of instances); only pools that can hold at least one."""
        problem, stage, profile = self._problem, self._problem.flow.stage(name), self._problem.profile(name)
        if not stage.needs_device:
            counts = np.array(list(host_instances(problem.most_on_host(name), problem.num_items, stage.num_parts)))
            counts = counts[profile.serves(instance, counts)]
            if len(counts):
                yield -1, counts
            return
        if instance.num_devices != (problem.flow.devices_per_rank(stage.worker) or instance.num_devices):
            return
        for index, pool in enumerate(self._pools):
            if pool.takes(instance.device_name):
                counts = device_counts(
                    pool.num_devices // instance.num_devices,
                    num_items=problem.num_items,
                    sizes=sizes,
                    most=profile.max_instances,
                    num_parts=stage.num_parts,
                    listed=(choice.num_ranks for choice in profile.instances if choice.num_ranks),
                    exactly=problem.pinned_devices.get(stage.worker, 0) / instance.num_devices,
                )
                counts = np.array(list(counts), dtype=np.int64)
                counts = counts[profile.serves(instance, counts)]
                if len(counts):
                    yield index, counts

    def _places(
        self, name: str, choice: int, pool: int, counts: np.ndarray, granularity: np.ndarray, offload: bool
    ) -> Places:
        """The places of a stage in one pool, one per number of instances, with the bytes on each device.

        A worker group's state counts for the first of its stages, and for others if they onload it themselves.
        """
        problem, profile = self._problem, self._problem.profile(name)
        instance = profile.instances[choice]
        distinct, which = np.unique(counts, return_inverse=True)
        on = (distinct * instance.num_devices).tolist()
        nothing = np.zeros(len(counts))
        resident, peak, onload_s, offload_s = nothing, nothing, nothing, nothing
        if instance.num_devices:
            items = np.array(
                [
                    items_at_once(
                        instance, profile.batching, num_items=problem.num_items, num_instances=n, granularity=g
                    )
                    for n, g in zip(counts.tolist(), granularity.tolist(), strict=True)
                ],
                dtype=np.float64,
            )
            state = np.array([problem.state_bytes(name, instance, num) for num in on], dtype=np.float64)[which]
            counts_state = name in self._first_of_group
            resident = state if counts_state and not offload else nothing
            peak = (state if counts_state or offload else 0.0) + instance.work_bytes + instance.item_work_bytes * items
            if offload:
                switches = np.array([problem.switch_s(name, instance, num) for num in on]).reshape(-1, 2)
                onload_s, offload_s = switches[which].T
        return Places(
            stage=name,
            choice=choice,
            instance=instance,
            pool=pool,
            offload=offload,
            num_instances=counts,
            granularity=granularity,
            resident_bytes=resident,
            peak_bytes=peak,
            onload_s=onload_s,
            offload_s=offload_s,
        )

    def _chunk(self, chosen: tuple[ChosenPlaces, ...], blocks: Blocks, times: np.ndarray) -> _Chunk:
        rows = self._rows(chosen, blocks, times)
        on_devices = [stage for stage in chosen if stage.places.pool >= 0]
        num_instances = sum(stage.places.num_instances[stage.index] for stage in on_devices)
        num_blocks = sum(any(chosen[i] in on_devices for i in block) for block in blocks)
        return _Chunk(
            rows=rows,
            chosen=chosen,
            shares_everything=num_blocks <= 1,
            instance_s=num_instances * rows[:, self._columns.period],
            blocks=blocks if len(chosen) > 1 else (),
        )

    def _rows(self, chosen: Sequence[ChosenPlaces], blocks: Blocks, times: np.ndarray) -> np.ndarray:
        """Rows of stages that compute concurrently, from their times without onload and offload."""
        problem, columns = self._problem, self._columns
        rows = np.zeros((len(times), columns.width))
        rows[:, columns.first : columns.further + 1] = times
        for stage in chosen:
            for i, num_bytes in self._receives.get(stage.places.stage, ()):
                rows[:, columns.edges.start + i] = num_bytes / max(stage.places.instance.num_devices, 1)
            if stage.places.offload:
                rows[:, columns.switches] = 1.0
        self._sync_within(rows, chosen, blocks)
        for block in blocks:
            for pool in {chosen[i].places.pool for i in block} - {-1}:
                here = [chosen[i] for i in block if chosen[i].places.pool == pool]
                resident = sum(stage.places.resident_bytes[stage.index] for stage in here)
                peak = sum(stage.places.peak_bytes[stage.index] for stage in here)
                rows[:, columns.devices.start + pool] += np.max([stage.num_devices for stage in here], axis=0)
                for column, num_bytes in ((columns.resident.start + pool, resident), (columns.peak.start + pool, peak)):
                    rows[:, column] = np.maximum(rows[:, column], num_bytes)
        onload_s = np.max([stage.places.onload_s[stage.index] for stage in chosen], axis=0)
        offload_s = np.max([stage.places.offload_s[stage.index] for stage in chosen], axis=0)
        rows[:, columns.out] += onload_s[:, None]
        rows[:, columns.last : columns.tail + 1] += offload_s[:, None]
        if not problem.flow.max_staleness:
            rows[:, columns.period] = rows[:, columns.further] = rows[:, columns.last]
        return rows

    def _sync_within(self, rows: np.ndarray, chosen: Sequence[ChosenPlaces], blocks: Blocks) -> None:
        """Adds the weight syncs with both ends in this part."""
        problem, columns, links = self._problem, self._columns, self._problem.cluster.links
        far = len(blocks) > 1 and problem.cluster.num_nodes > 1
        workers = {problem.flow.stage(stage.places.stage).worker for stage in chosen}
        for i, edge in enumerate(problem.flow.weight_edges, columns.edges.start):
            if {edge.source, edge.target} <= workers:
                rows[:, columns.sync] += problem.sync_latency_s(edge)
                rows[:, columns.sync] += rows[:, i] / (links.network_bytes_per_s if far else links.node_bytes_per_s)
                rows[:, i] = 0.0

    # -- a cycle -----------------------------------------------------------------------------------------------------

    def _of_cycle(self, names: Sequence[str]) -> Iterator[_Chunk]:
        """One chunk goes round whole, so the stages share one granularity; all or none of them offload."""
        problem = self._problem
        common = set.intersection(*(set(problem.choices(name)) for name in names))
        sizes = sorted(common)
        for (finer, granularity), offload in itertools.product(itertools.pairwise([0, *sizes]), (False, True)):
            of_stages = [list(self._cycle_places(name, granularity, offload)) for name in names]
            for options in itertools.product(*of_stages):
                everywhere = combinations(options)
                fewest = np.min([stage.places.num_instances[stage.index] for stage in everywhere], axis=0)
                differs = -(-problem.num_items // fewest) > finer  # otherwise equal to the finer chunks
                for blocks in partitions(len(names)):
                    fits = np.flatnonzero(may_share(everywhere, blocks) & differs)
                    chosen = tuple(stage.keep(fits) for stage in everywhere)
                    yield self._chunk(chosen, blocks, cycle_times(problem, chosen, blocks, granularity))

    def _cycle_places(self, name: str, granularity: int, offload: bool) -> Iterator[Places]:
        """Yields the places worth trying."""
        problem = self._problem
        if offload and problem.flow.stage(name).needs_device and not problem.allow_offload:
            return
        for choice, instance in enumerate(problem.profile(name).instances):
            for pool, counts in self._counts(name, instance, (granularity,)):
                counts = counts[_worth_going_round(problem, name, instance, counts, granularity)]
                sizes = np.full(len(counts), granularity)
                yield self._places(name, choice, pool, counts, sizes, offload and pool >= 0)


def _worth_going_round(
    problem: Problem, name: str, instance: InstanceProfile, counts: np.ndarray, granularity: int
) -> np.ndarray:
    """bool [counts]: which numbers of instances (ascending) a stage of a cycle may have with chunks of this size.

    Accepts numbers with equally many whole chunks per instance, so that none waits for items that are a round behind.
    Of the others, accepts those whose busiest instance has less to do by `_GAINS` than with any smaller number, the
    smallest number that minimizes its work, the largest if more devices hold less state each, and a number that is the
    only one.
    """
    share = -(-problem.num_items // counts)
    is_even = (problem.num_items % counts == 0) & (share % np.minimum(granularity, share) == 0)
    if is_even.all():
        return is_even
    busy_s = of_busiest(problem, name, instance, counts, granularity)[:, 1]
    result, least_s = is_even.copy(), np.inf
    best = int(busy_s.argmin())
    for i, (mine_s, is_kept) in enumerate(zip(busy_s.tolist(), is_even.tolist(), strict=True)):
        if is_kept or mine_s < (1 - _GAINS) * least_s or (i == best and mine_s < least_s):
            result[i] = True
            least_s = min(least_s, mine_s)
    result[-1] |= bool(instance.sharded_state_bytes) or len(counts) == 1
    return result
