"""Transitions between plans while earlier ones may still be under way: one global order, releases before acquires.

A transition is a list of actions of worker groups: ranks leave, their state is offloaded, their devices are released;
then devices are acquired, state is onloaded, ranks join. Every group works off its own actions in that order, group by
group at its own pace, and transitions may overlap. A device is handed over by transition number: transition n acquires
it once every release of transitions up to n and every acquire of those before n has happened there.

No waiting can close a circle: an acquire of transition n waits for releases of transitions up to n, a release waits for
nothing but its group's earlier actions, and those that can wait belong to transitions before n. Where each group
acquires before it releases, two groups that swap devices wait for each other for ever (`Order` "component", which is
here to be compared with).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlinf_sched.errors import PlanError, raise_problems
from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.plan import Plan, StagePlan
from rlinf_sched.problem import Problem

ActionKind = Literal["leave", "offload", "release", "acquire", "onload", "join"]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
"""The kinds of actions, in the order in which a transition has them."""
Order = Literal["global", "component"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What one worker group does.

    Example: rollout gives up two devices: `Action(kind="release", worker="rollout", devices=(6, 7))`
    """

    kind: ActionKind
    worker: str
    devices: tuple[int, ...]
    """Indices of the devices, ascending."""
    ranks: tuple[int, ...] = ()
    """Ranks that leave or join; empty for the other kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """All actions between two plans, by kind in the order of `ACTION_KINDS`, then by worker group."""

    number: int
    """Its place in the global order; the next transition of a run has a larger one."""
    actions: tuple[Action, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a trial of overlapping transitions ended."""

    finished: bool
    num_actions: int
    """Actions done; a release or an acquire counts once for each device."""
    waiting: tuple[str, ...] = ()
    """Who waits for which device, in words, where the trial did not finish."""


def make_transition(graph: FlowGraph, before: Plan, after: Plan, *, number: int) -> Transition:
    """What turns `before` into `after`; without actions where both place every worker group alike.

    Ranks whose devices stay theirs keep running; all others leave, and join in their new place.
    """
    changes = [
        _GroupChange(worker, before.stage(names[0]), after.stage(names[0])) for worker, names in graph.workers.items()
    ]
    actions = sorted(
        (action for change in changes for action in change.actions()), key=lambda a: ACTION_KINDS.index(a.kind)
    )
    transition = Transition(number=number, actions=tuple(actions))
    check_transitions([transition])
    return transition


@dataclass(frozen=True, slots=True)
class _GroupChange:
    worker: str
    before: StagePlan
    after: StagePlan

    def actions(self) -> Iterator[Action]:
        old, new = ([stage.devices_of(rank) for rank in range(stage.num_ranks)] for stage in (self.before, self.after))
        leaving = tuple(rank for rank, place in enumerate(old) if rank >= len(new) or new[rank] != place)
        joining = tuple(rank for rank, place in enumerate(new) if rank >= len(old) or old[rank] != place)
        left = tuple(sorted({device for rank in leaving for device in old[rank]}))
        entered = tuple(sorted({device for rank in joining for device in new[rank]}))
        given = tuple(sorted(set(self.before.devices) - set(self.after.devices)))
        taken = tuple(sorted(set(self.after.devices) - set(self.before.devices)))
        if leaving:
            yield Action(kind="leave", worker=self.worker, devices=left, ranks=leaving)
        if left:
            yield Action(kind="offload", worker=self.worker, devices=left)
        if given:
            yield Action(kind="release", worker=self.worker, devices=given)
        if taken:
            yield Action(kind="acquire", worker=self.worker, devices=taken)
        if entered:
            yield Action(kind="onload", worker=self.worker, devices=entered)
        if joining:
            yield Action(kind="join", worker=self.worker, devices=entered, ranks=joining)


def check_transitions(transitions: Sequence[Transition]) -> None:
    """Checks that these transitions cannot deadlock, however they overlap.

    Raises:
        PlanError: with every mistake: numbers that do not rise, a kind of action after a later kind (an acquire before
            a release), an action named twice, a release of a device that its group has given up before.
    """
    raise_problems(PlanError, "transitions", _problems(transitions))


def _problems(transitions: Sequence[Transition]) -> Iterator[str]:
    given: set[tuple[str, int]] = set()
    for i, transition in enumerate(transitions):
        where = f"transitions[{i}]"
        if i and transition.number <= transitions[i - 1].number:
            yield f"{where}.number={transition.number} must be above {transitions[i - 1].number}, the one before"
        latest = 0
        for j, action in enumerate(transition.actions):
            place = ACTION_KINDS.index(action.kind)
            if place < latest:
                late = ACTION_KINDS[latest]
                yield f"{where}.actions[{j}]: {action.kind} of {action.worker} comes after {late}; put it before"
            latest = max(latest, place)
            if len(set(action.devices)) < len(action.devices):
                yield f"{where}.actions[{j}].devices={list(action.devices)} names a device twice"
            holdings = {(action.worker, device) for device in action.devices}
            if action.kind == "release":
                for worker, device in sorted(holdings & given):
                    yield f"{where}.actions[{j}]: {worker} releases device {device}, which it does not hold"
                given |= holdings
            elif action.kind == "acquire":
                given -= holdings


def transition_seconds(problem: Problem, before: Plan, after: Plan, *, restart_s: float = 0.0) -> float:
    """What the transition costs a run that stands still meanwhile.

    Groups move in parallel, so the slowest counts: its ranks take their state off (over the host link), and those that
    join bring theirs on and receive the weights over the network link. A transition that changes nothing is free.

    Args:
        restart_s: seconds to restart the processes that leave and join (connections, graph capture, compilation).

    Raises:
        PlanError: a group is placed in a way that was not profiled.
    """
    moved = {
        action.worker for action in make_transition(problem.flow, before, after, number=0).actions if action.devices
    }
    links, slowest = problem.cluster.links, 0.0
    for worker in moved:
        name = problem.flow.workers[worker][0]
        weights = max(problem.profile(stage).weights_bytes for stage in problem.flow.workers[worker])
        placed = [plan.stage(name) for plan in (before, after)]
        state = sum(problem.state_bytes(name, problem.instance(one), len(one.devices)) for one in placed)
        num_devices = len(placed[1].devices)
        seconds = state / links.host_bytes_per_s + weights / (links.network_bytes_per_s * num_devices)
        slowest = max(slowest, seconds)
    return slowest + (restart_s if moved else 0.0)


def execute(transitions: Sequence[Transition], *, order: Order = "global", seed: int = 0) -> Outcome:
    """Tries the overlapping transitions out: a random one of the groups that need not wait does its next action.

    Args:
        transitions: in the order of their numbers. All are under way from the beginning, as far as a group's earlier
            actions let them.
        order: "component": every group acquires before it releases, transition by transition.
    """
    programs = _programs(transitions, order)
    open_releases, open_acquires = _counts(transitions, "release"), _counts(transitions, "acquire")
    draw, num_done = random.Random(seed), 0
    places = dict.fromkeys(programs, 0)

    def waits(worker: str) -> bool:
        kind, number, device = programs[worker][places[worker]]
        if kind != "acquire":
            return False
        return any(n <= number for n in open_releases[device]) or any(n < number for n in open_acquires[device])

    while unfinished := [worker for worker in programs if places[worker] < len(programs[worker])]:
        ready = [worker for worker in unfinished if not waits(worker)]
        if not ready:
            waiting = [(worker, *programs[worker][places[worker]][1:]) for worker in unfinished]
            texts = [f"{worker} waits for device {device} in transition {n}" for worker, n, device in waiting]
            return Outcome(finished=False, num_actions=num_done, waiting=tuple(texts))
        worker = draw.choice(ready)
        kind, number, device = programs[worker][places[worker]]
        if kind in ("release", "acquire"):
            (open_releases if kind == "release" else open_acquires)[device].remove(number)
        places[worker] += 1
        num_done += 1
    return Outcome(finished=True, num_actions=num_done)


def _programs(transitions: Sequence[Transition], order: Order) -> dict[str, list[tuple[ActionKind, int, int]]]:
    """Worker group -> (kind, transition number, device; -1 where the action has no single one) in its own order."""
    programs: dict[str, list[tuple[ActionKind, int, int]]] = {}
    for transition in transitions:
        actions = list(transition.actions)
        if order == "component":
            actions.sort(key=lambda action: action.kind in ("leave", "offload", "release"))
        for action in actions:
            single = action.kind in ("release", "acquire")
            program = programs.setdefault(action.worker, [])
            for device in action.devices if single else (-1,):
                program.append((action.kind, transition.number, device))
    return programs


def _counts(transitions: Sequence[Transition], kind: ActionKind) -> dict[int, list[int]]:
    """Device -> numbers of the transitions that have such an action there, once for each group."""
    devices = {device for transition in transitions for action in transition.actions for device in action.devices}
    return {
        device: [t.number for t in transitions for a in t.actions if a.kind == kind and device in a.devices]
        for device in devices
    }
