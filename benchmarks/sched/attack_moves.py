"""Random plans, and the changes by which attack.py goes from one plan to another."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from benchmarks.sched.attack_space import Blocks, Space, State, shift

Move = Callable[[Space, State, random.Random], object]
"""Changes the state in place; what comes of it may not be a plan."""


def random_state(space: Space, draw: random.Random) -> State | None:
    """None: what was drawn has no devices for a worker group."""
    blocks: list[Blocks] = [{frozenset(): len(pool)} for pool in space.pools]
    state = State(blocks, {}, {}, {}, {}, dict(space.most_hosts), list(range(len(space.successors))))
    for group in space.groups:
        state.pool[group] = draw.choice(space.pools_for(group))
        state.width[group] = draw.choice(space.widths[group][state.pool[group]])
    for group in space.groups:
        _set_offload(space, state, group, draw.random() < 0.4)
    for stage in space.problem.flow.stages:
        state.items[stage.name] = draw.choice(space.problem.choices(stage.name))
    _deal_out(space, state, draw, list(space.groups))
    return state if _repair(space, state, draw) else None


def mutated(space: Space, state: State, draw: random.Random) -> State:
    """A neighbour of the state, which is left as it is; itself where the change came to nothing."""
    changed = state.copy()
    draw.choices(list(MOVES), weights=list(MOVES.values()))[0](space, changed, draw)
    return changed if _repair(space, changed, draw) else state


# -- how a stage runs --------------------------------------------------------------------------------------------------


def _other_items(space: Space, state: State, draw: random.Random) -> None:
    """Of a stage or, half of the time, of all stages of its cycle."""
    name = draw.choice(list(state.items))
    names = space.together.get(name, (name,)) if draw.random() < 0.5 else (name,)
    size = draw.choice(space.problem.choices(name))
    if space.is_free(name) and draw.random() < 0.5:
        size = _any_size(space, state, name, draw)
    state.items |= {name: size for name in names if space.is_free(name) or size in space.problem.choices(name)}


def _any_size(space: Space, state: State, name: str, draw: random.Random) -> int:
    """A part of what an instance has in a step, or up to twice or half as many items as now."""
    record, num_items = space.problem.flow.stage(name), space.problem.num_items
    if draw.random() < 0.5:
        group = record.worker
        ranks = state.num_devices(group) // state.width[group] if group in space.groups else state.hosts[group]
        size = math.ceil(num_items / max(1, ranks) / draw.randint(1, 8))
    else:
        size = draw.randint(max(1, state.items[name] // 2), state.items[name] * 2)
    size = math.ceil(size / record.item_multiple) * record.item_multiple
    return min(size, num_items)


def _other_offload(space: Space, state: State, draw: random.Random) -> None:
    group = draw.choice(list(space.groups))
    _set_offload(space, state, group, not state.offload[group])


def _set_offload(space: Space, state: State, group: str, offload: bool) -> None:
    """A cycle has one turn, so it leaves the devices as one."""
    state.offload |= dict.fromkeys((group, *space.partners[group]), offload)


def _other_width(space: Space, state: State, draw: random.Random) -> None:
    group = draw.choice(list(space.groups))
    state.width[group] = draw.choice(space.widths[group][state.pool[group]])


def _other_hosts(space: Space, state: State, draw: random.Random) -> None:
    if state.hosts:
        group = draw.choice(list(state.hosts))
        count, most = state.hosts[group], space.most_hosts[group]
        state.hosts[group] = draw.choice((max(1, count // 2), min(most, count * 2), draw.randint(1, most), most))


def _other_order(space: Space, state: State, draw: random.Random) -> None:
    """Any legal order of turns."""
    left, order = set(range(len(space.successors))), []
    while left:
        waiting = {after for turn in left for after in space.successors[turn]}
        order.append(draw.choice(sorted(left - waiting)))
        left.remove(order[-1])
    state.order = order


# -- on which devices --------------------------------------------------------------------------------------------------


def _other_groups(space: Space, state: State, draw: random.Random) -> None:
    """Some devices with the same worker groups get others."""
    pool = draw.randrange(len(space.pools))
    blocks, here = state.blocks[pool], _groups_on(state, pool)
    if not here:
        return
    source = draw.choice(list(blocks))
    kind = draw.random()
    if kind < 0.4:
        target = draw.choice(list(blocks))
    elif kind < 0.6:
        target = source ^ {draw.choice(here)}
    elif kind < 0.8 and source:
        target = source - {draw.choice(sorted(source))} | {draw.choice(here)}
    else:
        target = draw.choice((frozenset(), frozenset(here), frozenset(draw.sample(here, draw.randint(1, len(here))))))
    shift(blocks, source, target, _some(draw, blocks[source]))


def _follow(space: Space, state: State, draw: random.Random) -> None:
    """A worker group goes where another is, everywhere, where the other is not, or where nobody is."""
    group = draw.choice(list(space.groups))
    if draw.random() < 0.3:
        pool = draw.choice(space.pools_for(group))
        if pool != state.pool[group]:
            state.clear(group)
            state.pool[group] = pool
    other = draw.choice(_groups_on(state, state.pool[group]))
    kind, moved = draw.random(), Blocks()
    for groups, count in state.blocks[state.pool[group]].items():
        was, others = group in groups, groups - {group}
        if kind < 0.35:
            stays = other in others
        elif kind < 0.5:
            stays = True
        elif kind < 0.65:
            stays = was or other in others
        elif kind < 0.8:
            stays = was and other not in others
        else:
            stays = was or not others
        target = others | {group} if stays else others
        moved[target] = moved.get(target, 0) + count
    state.blocks[state.pool[group]] = moved


def _balance(space: Space, state: State, draw: random.Random) -> None:
    """Some of the devices with the least work join those with the most."""
    blocks, areas = draw.choice(state.blocks), space.areas(state)
    if len(blocks) > 1:
        shares = {group: area / max(1, state.num_devices(group)) for group, area in areas.items()}
        load = {groups: sum(map(shares.__getitem__, groups)) * math.exp(draw.gauss(0, 0.1)) for groups in blocks}
        least = min(load, key=load.__getitem__)
        shift(blocks, least, max(load, key=load.__getitem__), _some(draw, blocks[least]))


def _regroup(space: Space, state: State, draw: random.Random) -> None:
    groups = list(space.groups)
    _deal_out(space, state, draw, draw.sample(groups, draw.randint(1, len(groups))))


def _other_layout(space: Space, state: State, draw: random.Random) -> None:
    """The same on other devices of the pool."""
    pool = draw.randrange(len(space.pools))
    blocks = list(state.blocks[pool].items())
    draw.shuffle(blocks)
    state.blocks[pool] = dict(blocks)


def _deal_out(space: Space, state: State, draw: random.Random, groups: Sequence[str]) -> None:
    """Devices for some worker groups anew: those that are dealt out together share theirs, in parts by their work."""
    for group in groups:
        state.clear(group)
        if draw.random() < 0.15:
            state.pool[group] = draw.choice(space.pools_for(group))
    areas = _areas(space, state, draw)
    for pool in sorted({state.pool[group] for group in groups}):
        parts: dict[int, list[str]] = {}
        mine = [group for group in groups if state.pool[group] == pool]
        num_parts = draw.randint(1, len(mine))
        for group in mine:
            parts.setdefault(draw.randrange(num_parts), []).append(group)
        blocks = state.blocks[pool]
        region = [frozenset[str]()] if draw.random() < 0.4 and frozenset() in blocks else list(blocks)
        draw.shuffle(region)
        total = sum(blocks[key] for key in region)
        weights = [sum(map(areas.__getitem__, part)) * math.exp(draw.gauss(0, 0.4)) for part in parts.values()]
        _hand_out(blocks, region, list(parts.values()), _shares(draw, weights, total))


def _areas(space: Space, state: State, draw: random.Random) -> dict[str, float]:
    for group in space.groups:
        if state.width[group] not in space.widths[group][state.pool[group]]:
            state.width[group] = draw.choice(space.widths[group][state.pool[group]])
    return space.areas(state)


def _shares(draw: random.Random, weights: Sequence[float], total: int) -> list[int]:
    """Whole parts of about these weights, which add up unless there are too few for all."""
    counts = [max(1, int(total * weight / sum(weights))) for weight in weights]
    while sum(counts) > max(total, len(counts)):
        counts[counts.index(max(counts))] -= 1
    counts[draw.randrange(len(counts))] += max(0, total - sum(counts))
    return counts


def _hand_out(
    blocks: Blocks, region: Sequence[frozenset[str]], parts: Sequence[Sequence[str]], counts: Sequence[int]
) -> None:
    """So many devices of the region, one block of it after another, for each part."""
    left = {key: blocks[key] for key in region}
    for part, count in zip(parts, counts, strict=True):
        for key in region:
            moved = min(count, left[key])
            left[key] -= moved
            count -= moved
            if moved:
                shift(blocks, key, key | set(part), moved)


# -- what makes a plan of it -------------------------------------------------------------------------------------------


def _repair(space: Space, state: State, draw: random.Random) -> bool:
    """Gives each worker group a multiple of the devices that an instance spans: by another width, more or fewer.
    False: it cannot, or it has none."""
    for group in space.groups:
        widths, count = space.widths[group][state.pool[group]], state.num_devices(group)
        if not count:
            return False
        if state.width[group] not in widths:
            state.width[group] = draw.choice(widths)
        width = state.width[group]
        if not count % width:
            continue
        fitting = [other for other in widths if not count % other]
        if fitting and draw.random() < 0.4:
            state.width[group] = draw.choice(fitting)
        elif count < width or draw.random() < 0.25:
            if not _resize(state, draw, group, width - count % width, more=True):
                return False
        else:
            _resize(state, draw, group, count % width, more=False)
    return True


def _resize(state: State, draw: random.Random, group: str, count: int, *, more: bool) -> bool:
    """So many devices more, those with the fewest groups first, or fewer; False where there are none left."""
    blocks = state.blocks[state.pool[group]]
    sources = [groups for groups in blocks if (group in groups) != more]
    sources.sort(key=lambda groups: (len(groups) if more else -len(groups), draw.random()))
    for groups in sources:
        moved = min(count, blocks[groups])
        shift(blocks, groups, groups ^ {group}, moved)
        count -= moved
        if not count:
            return True
    return False


def _groups_on(state: State, pool: int) -> list[str]:
    return [group for group, mine in state.pool.items() if mine == pool]


def _some(draw: random.Random, count: int) -> int:
    """A number of devices, of so many: few, any, all or a part."""
    kind = draw.random()
    if kind < 0.4:
        return draw.choice([few for few in (1, 2, 4, 8) if few <= count])
    if kind < 0.7:
        return draw.randint(1, count)
    return count if kind < 0.9 else max(1, count // draw.choice((2, 3, 4)))


MOVES: dict[Move, float] = {
    _other_items: 16,
    _other_offload: 8,
    _other_width: 9,
    _other_hosts: 5,
    _other_order: 4,
    _other_groups: 28,
    _follow: 12,
    _balance: 8,
    _regroup: 7,
    _other_layout: 3,
}
"""How often each is tried."""
