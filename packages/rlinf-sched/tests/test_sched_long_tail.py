"""The draining rollout: agreement with the simulator where nothing is handed over, gain where something is, bounds."""

from dataclasses import replace

import pytest

from rlinf_sched import ItemCosts, ProblemError, Profiles
from rlinf_sched.derive import grpo, ppo, workload
from rlinf_sched.dynamic import (
    LongTailPolicy,
    best_long_tail,
    least_step_s,
    parallel_choices,
    simulate_long_tail,
)
from rlinf_sched.planner import plan
from rlinf_sched.simulator import simulate

STATIC = LongTailPolicy(hand_over=False)


@pytest.fixture(scope="module")
def small():
    problem = grpo(num_devices=16, num_prompts=64, sequence_tokens=8192)
    chosen = plan(problem, modes=["collocated"])
    one_by_one = [replace(stage, granularity=1) for stage in chosen.stages]  # larger pieces it does not model
    return problem, replace(chosen, stages=tuple(one_by_one))


def test_without_handing_over_it_agrees_with_the_simulator(small):
    problem, chosen = small
    equal = {name: replace(profile, costs=ItemCosts()) for name, profile in problem.profiles.stages.items()}
    for tried, tolerance in ((problem, 1e-6), (replace(problem, profiles=Profiles(stages=equal)), 1e-6)):
        own = simulate_long_tail(tried, chosen, STATIC)
        reference = simulate(tried, chosen)
        assert own.step_s == pytest.approx(reference.step_s, rel=tolerance)
        ends = reference.end_s[reference.of("rollout")]
        assert own.rollout_end_s == pytest.approx(ends.max(), rel=1e-6)
        assert (own.num_moved, own.overhead) == (0, 0)


def test_equal_costs_leave_no_tail_to_use(small):
    problem, chosen = small
    equal = {name: replace(profile, costs=ItemCosts()) for name, profile in problem.profiles.stages.items()}
    problem = replace(problem, profiles=Profiles(stages=equal))
    outcome = simulate_long_tail(problem, chosen, LongTailPolicy(fill=0.0))
    assert outcome.first_hand_over_s >= outcome.rollout_end_s * 0.99


def test_emptying_engines_hands_devices_over_earlier(small):
    problem, chosen = small
    outcomes = [simulate_long_tail(problem, chosen, LongTailPolicy(fill=fill)) for fill in (0.0, 0.5, 1.0)]
    begins = [outcome.first_hand_over_s for outcome in outcomes]
    assert begins == sorted(begins, reverse=True) and begins[2] < begins[0]
    assert outcomes[0].num_moved == 0 < outcomes[1].num_moved
    assert outcomes[0].rollout_end_s < outcomes[2].rollout_end_s, "fuller engines are slower"


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_schedule_is_below_the_bound(small, seed):
    problem, chosen = small
    for fill in (0.0, 0.5, 1.0):
        outcome = simulate_long_tail(problem, chosen, LongTailPolicy(fill=fill), seed=seed)
        drawn = 0.85  # a draw's costs have mean 1 in expectation only
        assert outcome.step_s >= least_step_s(problem) * (1 if seed is None else drawn)


@pytest.mark.parametrize(("num_devices", "gain"), [(64, 1.05), (128, 1.1)])
def test_long_tailed_grpo_gains_over_the_best_static_plan(num_devices, gain):
    problem = workload("grpo-qwen2.5-7b-64") if num_devices == 64 else grpo(num_devices=num_devices)
    static = plan(problem)
    plans = [static, plan(problem, modes=["collocated"])]
    chosen, policy = best_long_tail(problem, plans, fills=(0.5, 1.0))
    outcome = simulate_long_tail(problem, chosen, policy)
    assert simulate(problem, static).step_s / outcome.step_s > gain
    assert outcome.overhead < 0.01


def test_offload_is_paid_for(small):
    problem, chosen = small
    paying = replace(chosen, stages=tuple(replace(s, offload=bool(s.devices)) for s in chosen.stages))
    free, paid = (simulate_long_tail(problem, p, LongTailPolicy()) for p in (chosen, paying))
    assert paid.overhead > free.overhead


def test_parallel_choices_are_legal(small):
    problem, chosen = small
    choices = parallel_choices(problem, chosen)
    assert choices[0] == chosen and len(choices) > 1
    for choice in choices:
        choice.validate(problem.flow, problem.cluster)
        for placed in choice.stages:
            spans = {i.num_devices for i in problem.profile(placed.stage).instances}
            assert not placed.devices or len(placed.devices) // placed.num_ranks in spans


def test_parallel_choices_have_the_devices_per_rank_that_the_stage_asks_for(small):
    problem, chosen = small
    placed = chosen.stage("rollout")
    span = len(placed.devices) // placed.num_ranks
    stages = (replace(s, devices_per_rank=span if s.name == "rollout" else 0) for s in problem.flow.stages)
    asking = replace(problem, flow=replace(problem.flow, stages=tuple(stages)))
    choices = parallel_choices(asking, chosen)
    assert len(choices) < len(parallel_choices(problem, chosen))
    assert {len(c.stage("rollout").devices) // c.stage("rollout").num_ranks for c in choices} == {span}


def test_other_flows_are_refused():
    problem = ppo(num_devices=8, num_prompts=16)
    broken = replace(
        problem,
        profiles=Profiles(stages={**problem.profiles.stages, "rollout": problem.profile("reference")}),
    )
    with pytest.raises(ProblemError, match="must have batching 'continuous'"):
        simulate_long_tail(broken, plan(broken, modes=["collocated"]), STATIC)
