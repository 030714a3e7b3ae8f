"""Dynamic scheduling: time of a decision by devices, and the gain on the long tail over the best static plan.

    pytest benchmarks/sched/test_sched_dynamic_benchmark.py --benchmark-json=sched-dynamic.json

The figures of the long tail (gain, overhead, and what no schedule could exceed) are in `extra_info`.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_sched.derive import grpo
from rlinf_sched.dynamic import Controller, best_long_tail, least_step_s, simulate_long_tail
from rlinf_sched.planner import plan
from rlinf_sched.simulator import simulate


@pytest.mark.parametrize("num_devices", [64, 256, 1024])
def test_decision(benchmark: Any, num_devices: int) -> None:
    problem = grpo(num_devices=num_devices, num_prompts=max(512, 2 * num_devices))
    controller = Controller(problem=problem, plan=plan(problem, modes=["disaggregated"]))
    controller.rescale("actor", 1.6)
    benchmark(controller.propose)


@pytest.mark.parametrize("num_devices", [64, 128])
def test_long_tail(benchmark: Any, num_devices: int) -> None:
    problem = grpo(num_devices=num_devices)
    static = plan(problem)
    static_s = simulate(problem, static).step_s
    chosen, policy = best_long_tail(problem, [static, plan(problem, modes=("collocated",))])
    outcome = benchmark(simulate_long_tail, problem, chosen, policy)
    benchmark.extra_info["static_s"], benchmark.extra_info["dynamic_s"] = static_s, outcome.step_s
    benchmark.extra_info["gain"] = static_s / outcome.step_s
    benchmark.extra_info["overhead"] = outcome.overhead
    benchmark.extra_info["gain_of_a_perfect_schedule"] = static_s / least_step_s(problem)
