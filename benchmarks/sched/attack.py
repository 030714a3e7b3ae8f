"""Seeks shorter plans than the planner's: `python -m benchmarks.sched.attack [NUM_PROBLEMS] [FIRST_SEED] [SECONDS]`.
`--known` plans the stored problems again and compares with the shortest plans known.

What is too large to enumerate is attacked: random problems (attack_problems.py), then the published workloads up to 64
devices. Of the processor time for each a quarter goes to random plans, half to annealing from three of them, and a
quarter to annealing from the plan that `best_plan` returns. Beside that function and `simulate` nothing here is the
planner's: plans are held in another way and memory is counted anew (attack_space.py), and other changes are tried
(attack_moves.py). The draws are the same in each run, but how far they get in the time is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.sched.attack_moves import mutated, random_state
from benchmarks.sched.attack_problems import random_problem
from benchmarks.sched.attack_space import Space, State

from rlinf_sched import InfeasibleError, Plan, Problem, best_plan, simulate
from rlinf_sched.derive import WORKLOADS

RESULT = Path(__file__).parents[1] / "results" / "planner-attack.json"
ROUNDING = 1e-9
MOST_DEVICES = 64
"""Of a published workload."""
BEATEN = 0.005
"""By what part of the best step a plan has to be longer to count as beaten."""
NUM_KEPT = 60
"""Random plans of which one is drawn to be annealed beside the two shortest."""
HEAT_OF_RANDOM, HEAT_OF_MADE = 0.05, 0.02
"""By what part of a step annealing takes longer plans at first: from a random plan, from the planner's."""

Found = tuple[float, State | None]
"""Seconds of a step, and the plan; infinity and None where there is none."""
FoundBy = Literal["planner", "annealing from it", "annealing from random plans"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attacked:
    """A problem and what was found."""

    problem: str
    """Kind and seed, or the workload's name."""
    seed: int | None
    num_stages: int
    num_devices: int
    plan_s: float
    """Step of the planner's plan."""
    best_s: float
    """The shortest step known."""
    gap: float
    """By what part of the best step the plan is longer."""
    found_by: FoundBy
    planning_s: float
    """Processor time of `best_plan`."""
    num_tried: int
    """Plans that the attack looked at."""
    plan: list[str]
    """For each stage its devices, ranks, items per hand-over, turn, and whether it offloads."""
    best: list[str]


def attack(problem: Problem, seconds: float, *, seed: int | None = None, name: str = "") -> Attacked:
    """Plans the problem and seeks a shorter plan for so many seconds of processor time."""
    own_plan, plan_s, planning_s = _planned(problem)
    space, draw = Space(problem), random.Random(seed or 0)
    shortest: dict[FoundBy, Found] = {"annealing from random plans": _from_random(space, draw, seconds)}
    own = space.state_of(own_plan)
    if own is not None:  # else it has devices of several products in a worker group
        shortest["annealing from it"] = _annealed(space, own, draw, HEAT_OF_MADE, seconds / 4)
    found_by, (best_s, state) = min(shortest.items(), key=lambda item: item[1][0])
    best = own_plan if state is None or best_s > plan_s * (1 - ROUNDING) else space.plan_of(state)
    best_s = simulate(problem, best).step_s
    return Attacked(
        problem=name or problem.flow.name,
        seed=seed,
        num_stages=len(problem.flow.stages),
        num_devices=problem.cluster.num_devices,
        plan_s=plan_s,
        best_s=best_s,
        gap=plan_s / best_s - 1,
        found_by="planner" if best is own_plan else found_by,
        planning_s=planning_s,
        num_tried=len(space.simulated_s),
        plan=described(own_plan),
        best=described(best),
    )


def _planned(problem: Problem) -> tuple[Plan, float, float]:
    """The planner's plan, its step, and the processor time of planning."""
    began_s = time.process_time()
    own_plan = best_plan(problem)
    return own_plan, simulate(problem, own_plan).step_s, time.process_time() - began_s


def planned_again(stored: Attacked) -> Attacked:
    """Today's plan beside the shortest that is known from an attack."""
    problem = WORKLOADS[stored.problem]() if stored.seed is None else random_problem(stored.seed)
    new_plan, plan_s, planning_s = _planned(problem)
    is_shortest = plan_s < stored.best_s * (1 - ROUNDING)
    best_s = plan_s if is_shortest else stored.best_s
    return replace(
        stored,
        plan_s=plan_s,
        best_s=best_s,
        gap=plan_s / best_s - 1,
        found_by="planner" if is_shortest else stored.found_by,
        planning_s=planning_s,
        plan=described(new_plan),
        best=described(new_plan) if is_shortest else stored.best,
    )


def _from_random(space: Space, draw: random.Random, seconds: float) -> Found:
    """The shortest of three annealed random plans."""
    shortest: list[tuple[float, State]] = []
    end_s = time.process_time() + seconds / 4
    while time.process_time() < end_s:
        state = random_state(space, draw)
        if state is None:
            continue
        step_s = space.step_s(state, 2 * shortest[0][0] if shortest else math.inf)
        if step_s < math.inf:
            shortest = sorted([*shortest, (step_s, state)], key=lambda one: one[0])[:NUM_KEPT]
    if not shortest:
        return math.inf, None
    starts = [*shortest[:2], draw.choice(shortest)]
    annealed = [_annealed(space, state, draw, HEAT_OF_RANDOM, seconds / 2 / len(starts)) for _, state in starts]
    return min(annealed, key=lambda one: one[0])


def _annealed(space: Space, state: State, draw: random.Random, heat: float, seconds: float) -> Found:
    """The shortest plan met on a walk that takes what is longer by ever less."""
    step_s = space.step_s(state)
    best_s, best = step_s, state
    began_s = time.process_time()
    while (spent := (time.process_time() - began_s) / seconds) < 1:
        near = state
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3))):
            near = mutated(space, near, draw)
        near_s = space.step_s(near, step_s)
        if near_s < step_s * (1 + heat * (1 - spent) ** 1.5 * draw.random()):
            state, step_s = near, near_s
            if step_s < best_s:
                best_s, best = step_s, state
    return best_s, best


# -- what is reported --------------------------------------------------------------------------------------------------


def described(plan: Plan) -> list[str]:
    return [
        f"{stage.stage}: {_intervals(stage.devices) or 'host'} x{stage.num_ranks} items {stage.granularity or 'all'} "
        f"turn {stage.turn}{' offload' * stage.offload}"
        for stage in plan.stages
    ]


def _intervals(devices: Sequence[int]) -> str:
    starts = [device for device in devices if device - 1 not in devices]
    ends = [device for device in devices if device + 1 not in devices]
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(sorted(starts), sorted(ends), strict=True))


def summary(rows: Sequence[Attacked]) -> dict[str, Any]:
    gaps = [row.gap for row in rows]
    return {
        "num_problems": len(rows),
        "mean_gap": statistics.fmean(gaps or [0.0]),
        "worst_gap": max(gaps, default=0.0),
        "num_beaten_by_half_a_percent": sum(gap > BEATEN for gap in gaps),
        "median_planning_s": statistics.median([row.planning_s for row in rows] or [0.0]),
    }


def attacked(num_problems: int, first_seed: int, seconds: float) -> Iterator[Attacked]:
    """Random problems that fit, then published ones."""
    for seed in range(first_seed, first_seed + num_problems):
        with contextlib.suppress(InfeasibleError):
            yield attack(random_problem(seed), seconds, seed=seed)
    for name, make in WORKLOADS.items():
        if (problem := make()).cluster.num_devices <= MOST_DEVICES:
            yield attack(problem, seconds, name=name)


def write(path: Path, rows: Sequence[Attacked], settings: dict[str, Any]) -> None:
    """One line for each problem."""
    parts = {
        "random": [row for row in rows if row.seed is not None],
        "published": [row for row in rows if row.seed is None],
    }
    head = json.dumps(settings | {name: summary(of) for name, of in parts.items()}, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    path.write_text(f'{head},\n "problems": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("num_problems", type=int, nargs="?", default=30)
    parser.add_argument("first_seed", type=int, nargs="?", default=1000)
    parser.add_argument("seconds", type=float, nargs="?", default=25.0, help="processor time for each problem")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--known", action="store_true", help="plan the stored problems again, attack nothing")
    options = parser.parse_args()
    rows: list[Attacked] = []
    settings = {"first_seed": options.first_seed, "seconds": options.seconds}
    attacks = attacked(options.num_problems, options.first_seed, options.seconds)
    if options.known:
        stored = json.loads(options.output.read_text(encoding="utf-8"))
        settings = {key: stored[key] for key in settings}
        attacks = (planned_again(Attacked(**row)) for row in stored["problems"])
    for row in attacks:
        rows.append(row)
        write(options.output, rows, settings)
        print(f"{row.problem}: {row.plan_s:.4g} s, gap {row.gap:.2%}, shortest by {row.found_by}", flush=True)


if __name__ == "__main__":
    main()
