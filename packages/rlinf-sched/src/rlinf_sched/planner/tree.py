"""The structure of a candidate: stages on devices, one after the other or side by side."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.plan import Mode


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage and its place."""

    stage: str
    choice: int
    """Index of the parallelism in the `instances` of the stage's profile."""
    pool: int
    """Index of the pool of its devices; -1: it runs on the host."""
    num_instances: int
    num_devices: int
    granularity: int
    """Items per hand-over of one instance; the whole batch is the step's number of items, not 0."""
    offload: bool


@dataclass(frozen=True, slots=True)
class Cycle:
    """The placed stages of a cycle: those of one block share devices, different blocks share none."""

    leaves: tuple[Leaf, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Indices into `leaves`."""


JoinKind = Literal["in turn", "side by side", "interleaved"]
JOINS: tuple[JoinKind, ...] = get_args(JoinKind)
"""The kinds of join; the native code identifies each by its index here."""


@dataclass(frozen=True, slots=True)
class Join:
    """Two parts of a flow; `before` does not depend on `after`."""

    kind: JoinKind
    """in turn: on the same devices, one after the other. side by side: on separate devices, pipelined. interleaved: on
    the same devices, whichever has work; nothing offloads."""
    before: "Tree"
    after: "Tree"


Tree = Leaf | Cycle | Join


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete plan found by the search."""

    step_s: float
    sync_s: float
    mode: Mode
    tree: Tree


def leaves(tree: Tree) -> Iterator[Leaf]:
    """The leaves of a tree, in the order of the flow."""
    if isinstance(tree, Join):
        yield from leaves(tree.before)
        yield from leaves(tree.after)
    elif isinstance(tree, Cycle):
        yield from tree.leaves
    else:
        yield tree


def num_devices(tree: Tree, num_pools: int) -> tuple[int, ...]:
    """Number of devices of each pool in the tree."""
    if isinstance(tree, Leaf):
        return tuple(tree.num_devices if pool == tree.pool else 0 for pool in range(num_pools))
    if isinstance(tree, Cycle):
        counts = [0] * num_pools
        for block in tree.blocks:
            for pool in range(num_pools):
                counts[pool] += max(num_devices(tree.leaves[i], num_pools)[pool] for i in block)
        return tuple(counts)
    before, after = num_devices(tree.before, num_pools), num_devices(tree.after, num_pools)
    join = operator.add if tree.kind == "side by side" else max
    return tuple(join(a, b) for a, b in zip(before, after, strict=True))


def place(tree: Tree, pools: list[list[int]], workers: Mapping[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Assigns devices to stages, from the pools' device lists in order.

    Side-by-side parts get consecutive ranges, the part with the widest instances first, so that instances of 2, 4 or 8
    devices never straddle a node. The stages of a worker group go to the devices of the first of them; None: not
    possible for all of them.

    Args:
        workers: stage -> worker group.
    """
    placed: dict[str, tuple[int, ...]] = {}
    groups: dict[str, tuple[int, ...]] = {}
    return placed if _put(tree, pools, workers, groups, placed) else None


def _put(
    tree: Tree,
    pools: list[list[int]],
    workers: Mapping[str, str],
    groups: dict[str, tuple[int, ...]],
    placed: dict[str, tuple[int, ...]],
) -> bool:
    if isinstance(tree, Leaf):
        pool = pools[tree.pool] if tree.num_devices else []
        chosen = groups.setdefault(workers[tree.stage], tuple(pool[: tree.num_devices]))
        placed[tree.stage] = chosen
        return set(chosen) <= set(pool)
    if isinstance(tree, Join) and tree.kind != "side by side":
        return all(_put(part, pools, workers, groups, placed) for part in (tree.before, tree.after))
    parts = _side_by_side(tree)
    fixed = [{d for leaf in part for d in groups.get(workers[leaf.stage], ())} for _, part in parts]
    rest = [list(pool) for pool in pools]
    taken: list[list[list[int]]] = [[] for _ in parts]
    for i in sorted(range(len(parts)), key=lambda i: (not fixed[i], -max(map(_width, parts[i][1])))):
        others = set().union(*(fixed[k] for k in range(len(parts)) if k != i and not taken[k]))
        for pool, count in enumerate(_counts(parts[i][0], len(pools))):
            if not fixed[i] and not others:
                taken[i].append(rest[pool][:count])
                del rest[pool][:count]
                continue
            mine = [d for d in rest[pool] if d in fixed[i]]
            mine += [d for d in rest[pool] if d not in fixed[i] and d not in others]
            taken[i].append(mine[:count])
            gone = set(taken[i][pool])
            rest[pool] = [d for d in rest[pool] if d not in gone]
    return all(
        all(_put(tree, mine, workers, groups, placed) for tree in trees)
        for (trees, _), mine in zip(parts, taken, strict=True)
    )


def _side_by_side(tree: Cycle | Join) -> list[tuple[list[Tree], list[Leaf]]]:
    """The parts on separate devices: for each its trees, which share the devices, and their leaves."""
    if isinstance(tree, Join):
        return [([part], list(leaves(part))) for part in (tree.before, tree.after)]
    return [([tree.leaves[i] for i in block], [tree.leaves[i] for i in block]) for block in tree.blocks]


def _counts(trees: list[Tree], num_pools: int) -> list[int]:
    """Devices of each pool for trees that share them."""
    each = [num_devices(tree, num_pools) for tree in trees]
    return [max(counts) for counts in zip(*each, strict=True)]


def shares_everything(tree: Tree) -> bool:
    """Whether all stages with devices share them."""
    if isinstance(tree, Leaf):
        return True
    if isinstance(tree, Join):
        on_devices = [any(leaf.num_devices for leaf in leaves(part)) for part in (tree.before, tree.after)]
        apart = tree.kind == "side by side" and all(on_devices)
        return not apart and shares_everything(tree.before) and shares_everything(tree.after)
    return sum(any(tree.leaves[i].num_devices for i in block) for block in tree.blocks) <= 1


def mode_of(tree: Tree, flow: FlowGraph) -> Mode:
    """The mode of the plan."""
    places = {(leaf.pool, leaf.num_devices) for leaf in leaves(tree) if leaf.num_devices}
    if len(places) <= 1 and shares_everything(tree):
        return "collocated"
    return "hybrid" if _is_mixed(tree, set(flow.training_groups), flow) else "disaggregated"


def _is_mixed(tree: Tree, training: set[str], flow: FlowGraph) -> bool:
    """Whether a device may serve generation and training."""
    if isinstance(tree, Join):
        if _is_mixed(tree.before, training, flow) or _is_mixed(tree.after, training, flow):
            return True
        if tree.kind == "side by side":
            return False
    workers = [flow.stage(leaf.stage).worker for leaf in leaves(tree) if leaf.num_devices]
    return len({worker in training for worker in workers}) > 1


def shape(tree: Tree) -> object:
    """The sharing of devices, without numbers: equal for trees that differ in the order of cuts or in the places of
    host stages. None: nothing is on devices."""
    if not isinstance(tree, Join):
        return tuple(leaf.stage for leaf in leaves(tree)) if any(leaf.num_devices for leaf in leaves(tree)) else None
    parts: list[object] = []
    for part in (shape(tree.before), shape(tree.after)):
        if isinstance(part, tuple) and part[0] == tree.kind:
            parts += part[1]
        elif part is not None:
            parts.append(part)
    if len(parts) < 2:
        return parts[0] if parts else None
    return tree.kind, frozenset(parts) if tree.kind == "side by side" else tuple(parts)


def _width(leaf: Leaf) -> int:
    return leaf.num_devices // leaf.num_instances
