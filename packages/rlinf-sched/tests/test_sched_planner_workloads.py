"""The paper's ranking of modes (arXiv:2509.15965), from public shapes only; what is not reproduced says why."""

from functools import cache

import pytest

from rlinf_sched.derive import workload
from rlinf_sched.planner import best_plan

pytestmark = pytest.mark.usefixtures("each_search")

NUM_DEVICES = [8, *(pytest.param(num, marks=pytest.mark.slow) for num in (16, 32))]


@cache
def steps(name: str) -> dict[str, float]:
    """Seconds of a step in the best plan of each mode that the planner found."""
    plan = best_plan(workload(name))
    assert plan.prediction is not None
    return {plan.mode: plan.prediction.step_s} | {o.mode: o.step_s for o in plan.prediction.runners_up}


@pytest.mark.slow
def test_grpo_7b_on_64_is_faster_collocated():
    modes = steps("grpo-qwen2.5-7b-64")
    assert min(modes, key=lambda mode: modes[mode]) == "collocated"


@pytest.mark.slow
def test_ppo_7b_on_32_is_faster_apart():
    modes = steps("ppo-qwen2.5-7b-32")
    assert min(modes, key=lambda mode: modes[mode]) == "disaggregated"


@pytest.mark.slow
def test_qwen3_30b_on_128_is_faster_collocated():
    modes = steps("grpo-qwen3-30b-a3b-128")
    assert min(modes, key=lambda mode: modes[mode]) == "collocated"


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_libero_is_faster_collocated(num_devices: int):
    modes = steps(f"libero-openvla-oft-{num_devices}")
    assert min(modes, key=lambda mode: modes[mode]) == "collocated"


@pytest.mark.xfail(
    strict=True,
    reason="generation is 76 % of the step and as efficient on 32 devices as on fewer; pipelining hides the 5 % of the "
    "log-probabilities and gives up devices for it (docs/calibration.md has the values at which it pays)",
)
def test_qwen3_30b_on_32_is_faster_pipelined():
    modes = steps("grpo-qwen3-30b-a3b-32")
    assert min(modes, key=lambda mode: modes[mode]) != "collocated"


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_maniskill_is_faster_hybrid(num_devices: int):
    modes = steps(f"maniskill-openvla-{num_devices}")
    assert min(modes, key=lambda mode: modes[mode]) == "hybrid"
