"""How near the search's estimates come to the simulator where steps overlap:
`python -m benchmarks.sched.staleness [NUM_PROBLEMS] [SEED] [NUM_ENUMERATED]`.

The random problems of `enumeration`, half of them with max_staleness 1, half with 2. Every candidate that the search
puts first, of each mode and each way to share devices, is executed by the simulator. Then the plans of some problems,
which the simulator and local search have chosen, are compared with the best that `enumeration` finds, as there.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from typing import Any

from benchmarks.sched.enumeration import enumerated, random_problem
from benchmarks.sched.estimates import proposed

from rlinf_sched import Problem

NUM_EACH = 4
"""Candidates of each mode."""


def stale_problem(draw: random.Random, max_staleness: int) -> Problem:
    """A random problem whose generation may run ahead by so many steps."""
    return random_problem(draw).with_staleness(max_staleness)


def errors(problem: Problem) -> tuple[list[float], int]:
    """Estimate over simulated step, minus 1, of the best candidate of each shape, best estimate first; and which of
    them takes the shortest step. Empty where nothing fits."""
    times_s = [(estimate_s, simulated_s) for _, estimate_s, simulated_s in proposed(problem, NUM_EACH)]
    steps_s = [simulated_s for _, simulated_s in times_s]
    return [estimate_s / simulated_s - 1 for estimate_s, simulated_s in times_s], steps_s.index(
        min(steps_s)
    ) if steps_s else 0


def measure(num_problems: int, seed: int) -> dict[str, Any]:
    """Errors of all candidates, of those that the search puts first, and of those that the simulator does."""
    draw, everything, first, chosen = random.Random(seed), [], [], []
    while len(first) < num_problems:
        problem_errors, best = errors(stale_problem(draw, 1 + len(first) % 2))
        if problem_errors:
            everything += problem_errors
            first.append(problem_errors[0])
            chosen.append(problem_errors[best])
    return {
        "num_problems": num_problems,
        "seed": seed,
        "simulated_best": _summary(chosen),
        "estimated_best": _summary(first),
        "all_shapes": _summary(everything),
    }


def gaps(num_problems: int, seed: int) -> dict[str, Any]:
    """By how much the steps of plans are longer than the shortest that enumeration finds."""
    draw, plan_gaps, num_timed = random.Random(seed), [], 0
    while len(plan_gaps) < num_problems:
        problem = stale_problem(draw, 1 + len(plan_gaps) % 2)
        searched = enumerated(problem)
        if searched is None:
            continue
        placements, everything = searched
        num_timed += everything.num_timed
        plan_gaps.append(everything.step_s(placements) / everything.best_s - 1)
        print(f"{len(plan_gaps)}/{num_problems} {problem.flow.name}: {plan_gaps[-1]:.2%}", file=sys.stderr, flush=True)
    return {
        "num_problems": num_problems,
        "num_plans_timed": num_timed,
        "mean_gap": statistics.fmean(plan_gaps),
        "worst_gap": max(plan_gaps),
        "num_beaten": sum(gap > 1e-6 for gap in plan_gaps),
    }


def _summary(signed_errors: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in signed_errors]
    return {
        "num_plans": len(signed_errors),
        "median_error": statistics.median(sizes),
        "worst_error": max(sizes),
        "mean_signed_error": statistics.mean(signed_errors),
        "num_above_15_percent": sum(size > 0.15 for size in sizes),
    }


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    num_problems, seed, num_enumerated = arguments + [100, 0, 20][len(arguments) :]
    result = measure(num_problems, seed) | {"plans": gaps(num_enumerated, seed)}
    print(json.dumps(result, indent=1))
