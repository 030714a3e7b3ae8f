"""What a candidate stands for: stages on devices, one after the other or side by side."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.plan import Mode


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage, placed."""

    stage: str
    choice: int
    """Which of the profile's instances."""
    pool: int
    """Which pool its devices come from; -1: it runs on the host."""
    num_instances: int
    num_devices: int
    granularity: int
    """Items per hand-over of one instance, as a number; the whole batch is the step's number of items."""
    offload: bool


@dataclass(frozen=True, slots=True)
class Cycle:
    """The stages of a cycle, each with its place: those of one block share its devices, blocks share none."""

    leaves: tuple[Leaf, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Indices into `leaves`."""


JoinKind = Literal["in turn", "side by side", "interleaved"]
JOINS: tuple[JoinKind, ...] = get_args(JoinKind)
"""By the number that the native part has for them."""


@dataclass(frozen=True, slots=True)
class Join:
    """Two parts of a flow; `before` needs nothing of `after`."""

    kind: JoinKind
    """in turn: on the same devices, one after the other. side by side: on devices of their own, pipelined. interleaved:
    on the same devices, whichever has work; nothing offloads."""
    before: "Tree"
    after: "Tree"


Tree = Leaf | Cycle | Join


def leaves(tree: Tree) -> Iterator[Leaf]:
    """In the order of the flow."""
    if isinstance(tree, Join):
        yield from leaves(tree.before)
        yield from leaves(tree.after)
    elif isinstance(tree, Cycle):
        yield from tree.leaves
    else:
        yield tree


def num_devices(tree: Tree, num_pools: int) -> tuple[int, ...]:
    """Devices that the tree takes of each pool."""
    if isinstance(tree, Leaf):
        return tuple(tree.num_devices if pool == tree.pool else 0 for pool in range(num_pools))
    if isinstance(tree, Cycle):
        counts = [0] * num_pools
        for block in tree.blocks:
            for pool in range(num_pools):
                counts[pool] += max(num_devices(tree.leaves[i], num_pools)[pool] for i in block)
        return tuple(counts)
    before, after = num_devices(tree.before, num_pools), num_devices(tree.after, num_pools)
    join = (lambda a, b: a + b) if tree.kind == "side by side" else max
    return tuple(join(a, b) for a, b in zip(before, after, strict=True))


def place(tree: Tree, pools: list[list[int]]) -> dict[str, tuple[int, ...]]:
    """Stage -> devices, from the pools' lists of devices in order.

    Parts side by side get consecutive ranges, the part with the widest instances first, so that instances of 2, 4 or 8
    devices never straddle a node.
    """
    if isinstance(tree, Leaf):
        return {tree.stage: tuple(pools[tree.pool][: tree.num_devices]) if tree.num_devices else ()}
    if isinstance(tree, Cycle):
        result: dict[str, tuple[int, ...]] = {}
        rest = [list(pool) for pool in pools]
        for block in sorted(tree.blocks, key=lambda block: -max(_width(tree.leaves[i]) for i in block)):
            taken = [0] * len(pools)
            for i in block:
                leaf = tree.leaves[i]
                result |= place(leaf, rest)
                if leaf.num_devices:
                    taken[leaf.pool] = max(taken[leaf.pool], leaf.num_devices)
            rest = [pool[count:] for pool, count in zip(rest, taken, strict=True)]
        return result
    if tree.kind != "side by side":
        return place(tree.before, pools) | place(tree.after, pools)
    first, second = sorted((tree.before, tree.after), key=lambda part: -max(map(_width, leaves(part))))
    counts = num_devices(first, len(pools))
    return place(first, pools) | place(second, [pool[n:] for pool, n in zip(pools, counts, strict=True)])


def shares_everything(tree: Tree) -> bool:
    """No two stages with devices lie side by side."""
    if isinstance(tree, Leaf):
        return True
    if isinstance(tree, Join):
        on_devices = [any(leaf.num_devices for leaf in leaves(part)) for part in (tree.before, tree.after)]
        apart = tree.kind == "side by side" and all(on_devices)
        return not apart and shares_everything(tree.before) and shares_everything(tree.after)
    return sum(any(tree.leaves[i].num_devices for i in block) for block in tree.blocks) <= 1


def mode_of(tree: Tree, flow: FlowGraph) -> Mode:
    """Which of the three names is true of the plan."""
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
    """How the tree is cut, whatever its leaves: equal for trees of equal cuts."""
    if not isinstance(tree, Join):
        return tuple(leaf.stage for leaf in leaves(tree))
    return tree.kind, shape(tree.before), shape(tree.after)


def _width(leaf: Leaf) -> int:
    return leaf.num_devices // leaf.num_instances
