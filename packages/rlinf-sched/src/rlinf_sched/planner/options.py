"""Everything a single turn of the flow may be: one stage on some devices, or a cycle's stages on theirs."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_sched.flow_graph import Stage
from rlinf_sched.planner.columns import Columns
from rlinf_sched.planner.pools import Pool, device_counts, host_instances
from rlinf_sched.planner.tree import Cycle, Leaf, Tree
from rlinf_sched.problem import Problem
from rlinf_sched.profile import InstanceProfile, ItemCosts
from rlinf_sched.stage_time import hand_over_size, items_at_once, stage_time

NO_SIGNATURE = -1


@dataclass(frozen=True, slots=True)
class Options:
    """Candidates for a part of the flow: rows of numbers, and what each stands for."""

    rows: np.ndarray
    """float64 [m, columns.width]."""
    signatures: np.ndarray
    """int64 [m, groups with several stages]: where and how the group runs, -1 where nobody outside has to agree."""
    trees: tuple[Tree, ...]


class StageOptions:
    """Makes the options of each turn.

    Worker groups with several stages must be in one place with all of them: `groups` numbers those groups, and options
    of their stages carry a signature that has to match.
    """

    def __init__(self, problem: Problem, pools: Sequence[Pool]) -> None:
        self._problem = problem
        self._pools = pools
        self._columns = Columns(len(pools), len(problem.flow.weight_edges))
        flow = problem.flow
        self.groups = [group for group, stages in flow.workers.items() if len(stages) > 1]
        self._first_of_group = {stages[0] for stages in flow.workers.values()}
        self._receives = {  # first stage of a group -> the weight edges that lead to it
            stages[0]: [(i, problem.synced_bytes(e)) for i, e in enumerate(flow.weight_edges) if e.target == worker]
            for worker, stages in flow.workers.items()
        }
        self._signatures: dict[tuple[int, ...], int] = {}

    def of_turn(self, names: Sequence[str]) -> Options:
        """Every option of one turn."""
        cycles = {name for cycle in self._problem.flow.cycles() for name in cycle}
        found = list(self._of_cycle(names) if names[0] in cycles else self._of_stage(names[0]))
        width = self._columns.width
        rows = np.array([row for row, _ in found]).reshape(len(found), width)
        trees = [tree for _, tree in found]
        signatures = np.array([self._signature(tree) for tree in trees], dtype=np.int64)
        signatures = signatures.reshape(len(found), len(self.groups))
        return Options(rows, signatures, tuple(trees))

    def _signature(self, tree: Tree) -> list[int]:
        result = [NO_SIGNATURE] * len(self.groups)
        for leaf in tree.leaves if isinstance(tree, Cycle) else [tree]:
            assert isinstance(leaf, Leaf)
            worker = self._problem.flow.stage(leaf.stage).worker
            if worker in self.groups:
                place = (leaf.pool, leaf.num_instances, leaf.num_devices, leaf.offload)
                result[self.groups.index(worker)] = self._signatures.setdefault(place, len(self._signatures))
        return result

    # -- one stage ---------------------------------------------------------------------------------------------------

    def _of_stage(self, name: str) -> Iterator[tuple[np.ndarray, Tree]]:
        problem, columns = self._problem, self._columns
        profile = problem.profile(name)
        for leaf, instance in self._places(name):
            time = stage_time(
                instance,
                profile.batching,
                profile.costs,
                num_items=problem.num_items,
                num_instances=leaf.num_instances,
                granularity=leaf.granularity,
            )
            row = np.zeros(columns.width)
            row[columns.out] = time.out_s
            row[columns.tail] = time.tail_s
            yield self._with_state(row, [(leaf, instance)]), leaf

    def _places(self, name: str) -> Iterator[tuple[Leaf, InstanceProfile]]:
        """Each parallel choice, pool, number of instances, granularity and, on devices, with and without offload."""
        problem = self._problem
        stage, profile = problem.flow.stage(name), problem.profile(name)
        sizes = problem.choices(name)
        for choice, instance in enumerate(profile.instances):
            for pool, num_devices, num_instances in self._counts(stage, instance, sizes):
                seen = set()
                for granularity in sizes:
                    size = hand_over_size(problem.num_items, num_instances, granularity, instance.max_items)
                    if size in seen:
                        continue  # the same hand-overs under another name
                    seen.add(size)
                    for offload in (False, True) if num_devices and problem.allow_offload else (False,):
                        leaf = Leaf(name, choice, pool, num_instances, num_devices, granularity, offload)
                        yield leaf, instance

    def _counts(
        self, stage: Stage, instance: InstanceProfile, sizes: tuple[int, ...]
    ) -> Iterator[tuple[int, int, int]]:
        """(pool, devices, instances)."""
        problem = self._problem
        profile = problem.profile(stage.name)
        if not stage.needs_device:
            for count in host_instances(profile.max_instances, problem.num_items):
                yield -1, 0, count
            return
        for index, pool in enumerate(self._pools):
            if not pool.takes(instance.device_name):
                continue
            for count in device_counts(
                pool.num_devices // instance.num_devices,
                num_items=problem.num_items,
                sizes=sizes,
                most=profile.max_instances,
                num_parts=profile.num_parts,
                exactly=problem.pinned_devices.get(stage.worker, 0) / instance.num_devices,
            ):
                yield index, count * instance.num_devices, count

    def _with_state(self, row: np.ndarray, placed: Sequence[tuple[Leaf, InstanceProfile]]) -> np.ndarray:
        """Adds to the row the devices, memory, weights to receive, onload and offload of stages that compute at the
        same time."""
        columns, problem = self._columns, self._problem
        onload_s = offload_s = 0.0
        for leaf, instance in placed:
            for i, num_bytes in self._receives.get(leaf.stage, ()):
                row[columns.edges.start + i] = num_bytes / max(instance.num_devices, 1)
            if not leaf.num_devices:
                continue
            resident, peak = self._bytes(leaf, instance)
            row[columns.devices.start + leaf.pool] += leaf.num_devices
            row[columns.resident.start + leaf.pool] += resident
            row[columns.peak.start + leaf.pool] += peak
            if leaf.offload:
                row[columns.switches] = 1.0
                onload, offload = problem.switch_s(leaf.stage, instance, leaf.num_devices)
                onload_s, offload_s = max(onload_s, onload), max(offload_s, offload)
        row[columns.out] += onload_s
        row[columns.last] += offload_s
        row[columns.tail] += offload_s
        return row

    # -- a cycle -----------------------------------------------------------------------------------------------------

    def _of_cycle(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, Tree]]:
        """One chunk goes round whole, so the stages share one granularity; all of them offload or none."""
        common = set.intersection(*(set(self._problem.choices(name)) for name in names))
        for granularity, offload in itertools.product(sorted(common), (False, True)):
            places = [
                [(leaf, instance) for leaf, instance in self._cycle_places(name, granularity, offload)]
                for name in names
            ]
            for placed in itertools.product(*places):
                for blocks in _blocks([leaf for leaf, _ in placed]):
                    row = self._cycle_row(placed, blocks, granularity)
                    if row is not None:
                        yield row, Cycle(tuple(leaf for leaf, _ in placed), blocks)

    def _cycle_places(self, name: str, granularity: int, offload: bool) -> Iterator[tuple[Leaf, InstanceProfile]]:
        profile, stage = self._problem.profile(name), self._problem.flow.stage(name)
        if offload and not (self._problem.allow_offload and stage.needs_device):
            if stage.needs_device:
                return
            offload = False
        for choice, instance in enumerate(profile.instances):
            for pool, num_devices, num_instances in self._counts(stage, instance, (granularity,)):
                share = self._problem.num_items // num_instances
                if share * num_instances < self._problem.num_items or share % min(granularity, share):
                    continue  # an instance would wait for items that are a round behind
                yield Leaf(name, choice, pool, num_instances, num_devices, granularity, offload), instance

    def _cycle_row(
        self,
        placed: Sequence[tuple[Leaf, InstanceProfile]],
        blocks: tuple[tuple[int, ...], ...],
        granularity: int,
    ) -> np.ndarray | None:
        """Asymptotic bounds of a closed network with deterministic times, exact for one block and for two stages.

        Source: P. J. Denning, J. P. Buzen, "The operational analysis of queueing network models", ACM Computing Surveys
        10(3), 1978.
        """
        columns, problem = self._columns, self._problem
        num_items, num_chunks = problem.num_items, -(-problem.num_items // granularity)
        links = problem.cluster.links
        rounds, once, step_s, each = 1, [], 0.0, []
        for leaf, instance in placed:
            profile = problem.profile(leaf.stage)
            share = -(-num_items // leaf.num_instances)
            if profile.batching == "continuous":
                seconds = instance.seconds(min(share, instance.max_items or share))
                work = seconds * -(-share // (instance.max_items or share))
            else:
                size = hand_over_size(num_items, leaf.num_instances, granularity, instance.max_items)
                seconds = instance.seconds(size)
                if profile.batching == "longest":
                    seconds *= _mean_longest(profile.costs, num_items, size)
                num_hand_overs = -(-num_items // size)
                work = seconds * -(-num_hand_overs // leaf.num_instances)
            rounds = max(rounds, profile.rounds)
            step_s = max(step_s, instance.step_s)
            once.append(seconds)
            each.append(work)
        moved = sum(
            links.latency_s + granularity * problem.flow.item_bytes.get(channel, 0) / links.node_bytes_per_s
            for leaf, _ in placed
            for channel in problem.flow.stage(leaf.stage).reads
        )
        latency = sum(once) + (moved if len(blocks) > 1 else 0.0)
        busiest = [(sum(each[i] for i in block), sum(once[i] for i in block)) for block in blocks]
        round_s = max(latency, *(work for work, _ in busiest)) if num_chunks > 1 else latency
        one_pass = latency + max(work - seconds for work, seconds in busiest)
        row = np.zeros(columns.width)
        last = (rounds - 1) * round_s + one_pass
        first = (rounds - 1) * round_s + latency
        row[columns.out] = np.linspace(first, last, columns.last - columns.first + 1)
        row[columns.last] += step_s
        row[columns.tail] = rounds * latency + step_s
        self._with_state(row, placed)
        for pool in range(len(self._pools)):  # stages of one block share its devices instead of adding to them
            counts = [[placed[i][0].num_devices for i in block if placed[i][0].pool == pool] for block in blocks]
            row[columns.devices.start + pool] = sum(max(count, default=0) for count in counts)
            for column, bytes_of in ((columns.resident, 0), (columns.peak, 1)):
                row[column.start + pool] = max(
                    (sum(self._bytes(*placed[i])[bytes_of] for i in block if placed[i][0].pool == pool))
                    for block in blocks
                )
        return row

    def _bytes(self, leaf: Leaf, instance: InstanceProfile) -> tuple[int, int]:
        """(between turns, at its fullest) on each device of the stage. A worker group's state counts with the first of
        its stages, and with the others where they bring it back themselves."""
        if not leaf.num_devices:
            return 0, 0
        problem = self._problem
        items = items_at_once(
            instance,
            problem.profile(leaf.stage).batching,
            num_items=problem.num_items,
            num_instances=leaf.num_instances,
            granularity=leaf.granularity,
        )
        state = problem.state_bytes(leaf.stage, instance, leaf.num_devices)
        counts_state = leaf.stage in self._first_of_group
        resident = state if counts_state and not leaf.offload else 0
        return resident, instance.extra_bytes(items) + (state if counts_state or leaf.offload else 0)


def _blocks(leaves: Sequence[Leaf]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to let the leaves share devices: stages share only equal numbers of devices of one pool."""

    def extend(i: int, blocks: list[list[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if i == len(leaves):
            yield tuple(tuple(block) for block in blocks)
            return
        for block in blocks:
            other = leaves[block[0]]
            if leaves[i].num_devices and (other.pool, other.num_devices) == (leaves[i].pool, leaves[i].num_devices):
                block.append(i)
                yield from extend(i + 1, blocks)
                block.pop()
        blocks.append([i])
        yield from extend(i + 1, blocks)
        blocks.pop()

    yield from extend(0, [])


def _mean_longest(costs: ItemCosts, num_items: int, size: int) -> float:
    """Mean over hand-overs of their largest cost."""
    typical = costs.typical(num_items)
    whole = typical[: num_items // size * size].reshape(-1, size)
    return float(whole.max(axis=1).mean())
