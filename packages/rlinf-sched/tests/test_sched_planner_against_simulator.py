"""What the planner predicts beside what the simulator finds."""

from functools import cache

import numpy as np
import pytest

from rlinf_sched import Plan, Problem, simulate
from rlinf_sched.derive import workload
from rlinf_sched.planner import plan

LONG_TAILED = ("grpo-qwen2.5-7b-64", "ppo-qwen2.5-7b-32", "grpo-qwen3-30b-a3b-32", "grpo-qwen3-30b-a3b-128")


@cache
def planned(name: str) -> tuple[Problem, Plan]:
    problem = workload(name)
    return problem, plan(problem)


@pytest.mark.parametrize("name", LONG_TAILED)
def test_predictions_from_typical_costs_are_the_mean_of_drawn_ones(name: str) -> None:
    problem, made = planned(name)
    assert made.prediction is not None
    drawn_s = [simulate(problem, made, seed=seed).step_s for seed in range(20)]
    assert made.prediction.step_s == pytest.approx(np.mean(drawn_s), rel=0.05)


@pytest.mark.parametrize("name", [*LONG_TAILED, "maniskill-openvla-8", "libero-openvla-oft-8"])
def test_the_search_estimates_the_plan_that_it_finds(name: str) -> None:
    prediction = planned(name)[1].prediction
    assert prediction is not None
    assert prediction.estimate_s == pytest.approx(prediction.step_s, rel=0.04)
