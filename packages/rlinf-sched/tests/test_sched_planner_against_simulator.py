"""What the planner predicts beside what the simulator finds."""

from functools import cache

import numpy as np
import pytest
from sched_planner_problems import chain, gpus, profile

from rlinf_sched import Plan, Problem, simulate
from rlinf_sched.derive import workload
from rlinf_sched.derive.workloads import grpo
from rlinf_sched.plan import ALL_MODES
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.improvement import placements_of_candidate
from rlinf_sched.planner.placements import plan_of
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search

pytestmark = pytest.mark.usefixtures("brief_search")

LONG_TAILED = ("grpo-qwen2.5-7b-64", "ppo-qwen2.5-7b-32", "grpo-qwen3-30b-a3b-32", "grpo-qwen3-30b-a3b-128")


@cache
def planned(name: str) -> tuple[Problem, Plan]:
    problem = workload(name)
    return problem, best_plan(problem)


def first_found(problem: Problem) -> tuple[float, float]:
    """What the search over cuts estimates of the plan that it puts first, and its simulated step, both in seconds."""
    pools = pools_of(problem.cluster)
    first = min(Search(problem, pools).best(ALL_MODES), key=lambda candidate: candidate.step_s)
    placements = placements_of_candidate(problem, pools, first)
    assert placements is not None
    return first.step_s, simulate(problem, plan_of(problem, placements, first.mode, "proposed by the search")).step_s


@pytest.mark.parametrize(
    "name", [LONG_TAILED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LONG_TAILED[1:])]
)
def test_predictions_from_typical_costs_are_the_mean_of_drawn_ones(name: str) -> None:
    problem, plan = planned(name)
    assert plan.prediction is not None
    drawn_s = [simulate(problem, plan, seed=seed).step_s for seed in range(20)]
    assert plan.prediction.step_s == pytest.approx(np.mean(drawn_s), rel=0.05)


@pytest.mark.parametrize("name", [*LONG_TAILED, "maniskill-openvla-8", "libero-openvla-oft-8"])
def test_the_search_estimates_the_plan_that_it_finds(name: str) -> None:
    estimate_s, step_s = first_found(planned(name)[0])
    assert estimate_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_search_estimates_steps_that_overlap(max_staleness: int) -> None:
    """Random chains: what the search thinks of the plan that it puts first, beside the simulator."""
    draw, errors = np.random.default_rng(max_staleness), []
    for _ in range(20):
        seconds = draw.choice([0.2, 0.5, 1.0, 2.0], size=3)
        profiles = {
            "rollout": profile(seconds[0], batching=str(draw.choice(["sum", "longest", "continuous"])), max_items=8),
            "reference": profile(seconds[1], fixed=draw.choice([0.0, 1.0])),
            "actor": profile(seconds[2], step_s=draw.choice([0.0, 0.5])),
        }
        problem = chain(profiles, gpus(int(draw.integers(3, 9))), num_items=16, max_staleness=max_staleness)
        estimate_s, step_s = first_found(problem)
        errors.append(abs(estimate_s / step_s - 1))
    assert np.median(errors) < 0.02
    assert max(errors) < 0.3


def test_a_rollout_that_runs_ahead_of_training_is_planned_for_it() -> None:
    """236 s synchronous; 233 s if each side of the flow counts as a box whose steps do not overlap."""
    problem = grpo(max_staleness=1)
    prediction = best_plan(problem).prediction
    assert prediction is not None
    assert prediction.step_s < 210
    estimate_s, step_s = first_found(problem)
    assert estimate_s == pytest.approx(step_s, rel=0.05)
