"""How near the search's estimates come to the simulator on large clusters, and what local search makes of the rest:
`python -m benchmarks.sched.estimates [NUM_EACH] [SEED]`.

Random graphs of 5, 6 and 7 unequal stages (`random_graphs`) on 1,024 devices. Of each, the best candidates of every
mode and every way to share devices are executed by the simulator beside their estimates. Then the plan that
`best_plan` returns is attacked with what wrong estimates could have kept from it: local search from each of those
candidates, and from plans made at random, with as many plans timed from each as `best_plan` times in all. By how much
the plan is beaten is what wrong estimates cost.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.sched.random_graphs import random_graph

from rlinf_sched import Problem, best_plan, simulate
from rlinf_sched.plan import ALL_MODES
from rlinf_sched.planner.improvement import affordable_plans, placements_of_candidate
from rlinf_sched.planner.local_search import Found, LocalSearch
from rlinf_sched.planner.placements import Placements, StagePlacement, bits_of, plan_of
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search
from rlinf_sched.planner.tree import shape

STAGES = (5, 6, 7)
NUM_DEVICES = 1024
NUM_CANDIDATES = 16
"""Candidates of each mode that the search is asked for."""
NUM_RANDOM = 10
"""Random plans of each graph that local search begins with."""


def proposed(problem: Problem, num_each: int) -> Iterator[tuple[Placements, float, float]]:
    """Of the search's best candidates of each mode the first of each way to share devices, best estimate first: where
    its stages are, and its step as estimated and as simulated."""
    pools, seen = pools_of(problem.cluster), set()
    for candidate in Search(problem, pools).best(ALL_MODES, num_each=num_each):
        placements = placements_of_candidate(problem, pools, candidate)
        if placements is not None and shape(candidate.tree) not in seen:
            seen.add(shape(candidate.tree))
            proposal = plan_of(problem, placements, candidate.mode, "proposed by the search")
            yield placements, candidate.step_s, simulate(problem, proposal).step_s


def random_placements(problem: Problem, draw: random.Random) -> Iterator[Placements]:
    """Plans made at random: worker groups in random blocks, which share the devices out at random in whole nodes."""
    names = [stage.name for stage in problem.flow.stages]
    while True:
        block_of = [draw.randrange(len(names)) for _ in names]
        blocks = sorted(set(block_of))
        cuts = sorted(draw.sample(range(1, NUM_DEVICES // 8), len(blocks) - 1))
        ends = [0, *(8 * cut for cut in cuts), NUM_DEVICES]
        devices = {block: range(ends[i], ends[i + 1]) for i, block in enumerate(blocks)}
        placements = []
        for name, block in zip(names, block_of, strict=True):
            span = draw.choice(problem.profile(name).instances).num_devices
            granularity = draw.choice([size % problem.num_items for size in problem.choices(name)])
            mine = devices[block]
            placements.append(StagePlacement(bits_of(mine), len(mine) // span, granularity, draw.random() < 0.3))
        yield tuple(placements)


def beaten_by(problem: Problem, starts: list[Placements], num_plans: int) -> list[Found]:
    """What local search makes of each start on its own."""
    improved = []
    for placements in starts:
        around = LocalSearch(problem, pools_of(problem.cluster), num_plans=num_plans)
        first = around.time(placements)
        if first is not None:
            improved.append(around.improve(first))
    return improved


def one_graph(num_stages: int, seed: int) -> dict[str, Any]:
    """Errors of the estimates of one graph, and what its plan is beaten by."""
    problem = random_graph(num_stages, NUM_DEVICES, seed=seed)
    candidates = list(proposed(problem, NUM_CANDIDATES))
    plan = best_plan(problem)
    assert plan.prediction is not None
    step_s, num_plans, draw = plan.prediction.step_s, affordable_plans(problem), random.Random(seed)
    from_candidates = beaten_by(problem, [placements for placements, _, _ in candidates], num_plans)
    pools = pools_of(problem.cluster)
    drawn: list[Placements] = []
    for placements in random_placements(problem, draw):
        if len(drawn) == NUM_RANDOM:
            break
        if LocalSearch(problem, pools, num_plans=1).time(placements) is not None:
            drawn.append(placements)
    from_random = beaten_by(problem, drawn, num_plans)
    return {
        "stages": num_stages,
        "seed": seed,
        "mode": plan.mode,
        "step_s": step_s,
        "errors": [estimate_s / simulated_s - 1 for _, estimate_s, simulated_s in candidates],
        "plan_error": plan.prediction.estimate_s and plan.prediction.estimate_s / step_s - 1,
        "beaten_from_candidates": max([0.0, *(step_s / improved.step_s - 1 for improved in from_candidates)]),
        "beaten_from_random": max([0.0, *(step_s / improved.step_s - 1 for improved in from_random)]),
        "num_starts": len(from_candidates) + len(from_random),
        "plans_each": num_plans,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all graphs: errors of estimates, and by how much plans were beaten."""
    best, everything = [abs(row["errors"][0]) for row in rows], [abs(e) for row in rows for e in row["errors"]]
    beaten = [max(row["beaten_from_candidates"], row["beaten_from_random"]) for row in rows]
    return {
        "devices": NUM_DEVICES,
        "num_graphs": len(rows),
        "estimated_best": {"median_error": statistics.median(best), "worst_error": max(best)},
        "all_shapes": {
            "num_plans": len(everything),
            "median_error": statistics.median(everything),
            "worst_error": max(everything),
        },
        "num_starts": sum(row["num_starts"] for row in rows),
        "beaten": {
            "num_graphs": sum(gap > 1e-6 for gap in beaten),
            "mean": statistics.mean(beaten),
            "worst": max(beaten),
        },
        "graphs": rows,
    }


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    num_each, first_seed = arguments + [7, 0][len(arguments) :]
    rows = []
    for number, num_stages in enumerate(STAGES * num_each):
        rows.append(one_graph(num_stages, first_seed + number // len(STAGES)))
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(summary(rows), indent=1))
