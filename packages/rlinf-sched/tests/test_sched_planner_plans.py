"""What plans hold to: modes, pins, groups, products, staleness, size, determinism."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from sched_planner_problems import GIB, MODES, chain, gpus, ppo, profile

from rlinf_sched import Cluster, Device, Plan, PlanError, ProblemError, StagePlan, simulate
from rlinf_sched.plan import Mode
from rlinf_sched.planner import best_plan, plan_and_compare
from rlinf_sched.profile import MAX_SECONDS

pytestmark = pytest.mark.usefixtures("each_search")
TWO = {"rollout": profile(0.5, fixed=1.0, state_bytes=15 * GIB), "actor": profile(1.0, state_bytes=20 * GIB)}


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_only_the_modes_that_were_asked_for(mode: Mode):
    plan = best_plan(chain(TWO, gpus(4)), modes=(mode,))
    assert plan.mode == mode
    assert plan.prediction is not None
    assert plan.prediction.runners_up == ()


def test_hybrid_alone_is_found_where_collocated_is_better():
    assert best_plan(chain(TWO, gpus(4)), modes=("hybrid",)).mode == "hybrid"


def test_the_best_of_all_modes_is_the_best_of_each():
    problem = chain(TWO, gpus(4))
    best = best_plan(problem)
    assert best.prediction is not None
    rows = {best.mode: best.prediction.step_s} | {o.mode: o.step_s for o in best.prediction.runners_up}
    for mode in ("collocated", "disaggregated"):
        alone = best_plan(problem, modes=(mode,))
        assert alone.prediction is not None
        assert alone.prediction.step_s == pytest.approx(rows[mode])
        assert best.prediction.step_s <= alone.prediction.step_s


def test_the_plans_that_lost_come_with_their_timelines():
    problem = chain(TWO, gpus(4))
    planned = plan_and_compare(problem)
    prediction = planned.plan.prediction
    assert planned.plan == best_plan(problem)
    assert prediction is not None
    assert planned.timeline.step_s == prediction.step_s
    assert planned.others
    assert [(o.plan.mode, o.step_s) for o in planned.others] == [(r.mode, r.step_s) for r in prediction.runners_up]
    for other in planned.others:
        assert simulate(problem, other.plan).step_s == other.step_s >= prediction.step_s


@pytest.mark.parametrize("span", [2, *(pytest.param(span, marks=pytest.mark.slow) for span in (1, 4))])
def test_a_stage_gets_the_devices_per_rank_that_it_asks_for(span: int):
    """As if nothing else had been profiled for it, also where another stage of its worker group asks."""
    one_by_one = [profile(1.0 / width**0.8, num_devices=width, state_bytes=15 * GIB) for width in (1, 2, 4)]
    wide = replace(one_by_one[0], instances=tuple(one.instances[0] for one in one_by_one))
    names = {"rollout": wide, "logprob": wide, "actor": profile(1.0)}
    problem = chain(names, gpus(4), workers={"logprob": "rollout"})
    for asks in ("rollout", "logprob"):
        stages = tuple(replace(s, devices_per_rank=span) if s.name == asks else s for s in problem.flow.stages)
        plan = best_plan(replace(problem, flow=replace(problem.flow, stages=stages)))
        alone = one_by_one[(1, 2, 4).index(span)]
        only = best_plan(chain(names | {"rollout": alone, "logprob": alone}, gpus(4), workers={"logprob": "rollout"}))
        assert plan.prediction is not None and only.prediction is not None
        assert plan.prediction.step_s == pytest.approx(only.prediction.step_s, rel=1e-9)
        assert {len(plan.stage(name).devices_of(0)) for name in ("rollout", "logprob")} == {span}


def test_a_mode_that_does_not_exist_and_none_at_all():
    problem = chain(TWO, gpus(2))
    with pytest.raises(PlanError, match="did you mean 'hybrid'"):
        best_plan(problem, modes=("hybird",))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="modes is empty"):
        best_plan(problem, modes=())
    assert set(get_args(Mode)) == set(MODES)


@pytest.mark.parametrize("count", [1, 3])
def test_pinned_devices_are_kept(count: int):
    plan = best_plan(chain(TWO, gpus(4), pinned_devices={"rollout": count}))
    assert len(plan.stage("rollout").devices) == count


def test_stages_of_a_worker_group_land_in_one_place():
    profiles = {
        "rollout": profile(0.5, fixed=1.0),
        "values": profile(0.2, state_bytes=10 * GIB),
        "reference": profile(0.3),
        "critic": profile(0.7, state_bytes=10 * GIB),
        "actor": profile(1.0),
    }
    problem = chain(profiles, gpus(4), num_items=8, workers={"values": "critic"})
    for mode in ("collocated", "disaggregated"):
        plan = best_plan(problem, modes=(mode,))
        values, critic = plan.stage("values"), plan.stage("critic")
        assert (values.devices, values.num_ranks) == (critic.devices, critic.num_ranks)


def test_no_stage_is_on_devices_of_several_products_unless_its_times_hold_for_all():
    """4 of each product; a rollout of 1 s an item that was measured on one takes 16 s on those, not 8 s on all."""
    devices = tuple(
        Device(index=i, kind="cuda", node=0, name="fast" if i < 4 else "slow", memory_bytes=80 * GIB) for i in range(8)
    )
    fast, slow = profile(1.0, device_name="fast"), profile(10.0, device_name="slow")
    both = replace(fast, instances=fast.instances + slow.instances)
    for rollout in (fast, both):
        problem = chain({"rollout": rollout, "actor": profile(0.5)}, Cluster(devices=devices), num_items=64)
        plan = best_plan(problem)
        assert plan.prediction is not None
        assert plan.prediction.step_s >= 64 / (4 + 0.4)
        assert len({devices[i].name for i in plan.stage("rollout").devices}) == 1


def test_products_differ_and_each_stage_gets_the_one_its_profile_names():
    devices = tuple(
        Device(
            index=i, kind="cuda", node=0, name="fast" if i < 4 else "small", memory_bytes=(80 if i < 4 else 24) * GIB
        )
        for i in range(8)
    )
    profiles = {
        "rollout": profile(1.0, device_name="small", state_bytes=10 * GIB),
        "actor": profile(1.0, device_name="fast", state_bytes=60 * GIB),
    }
    plan = best_plan(chain(profiles, Cluster(devices=devices)))
    assert set(plan.stage("rollout").devices) <= set(range(4, 8))
    assert set(plan.stage("actor").devices) <= set(range(4))
    assert plan.mode == "disaggregated"


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", None])
def test_a_plan_that_may_run_ahead_is_no_slower(mode: Mode | None):
    steps = []
    for max_staleness in (0, 1):
        problem = chain(TWO, gpus(4), max_staleness=max_staleness)
        plan = best_plan(problem) if mode is None else best_plan(problem, modes=(mode,))
        assert plan.prediction is not None
        steps.append(plan.prediction.step_s)
    assert steps[1] <= steps[0] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rollout", "actor"),
    [((6, 16, 10), (16, 20, 4)), ((0, 4, 4), (6, 12, 6))],
    ids=["generation is slower", "training is slower"],
)
def test_stages_of_a_plan_that_runs_ahead_are_predicted_for_the_steady_state(rollout, actor):
    """(start, end, busy) of one item; a step may begin at the end of that before the last."""
    places = {"rollout": rollout, "actor": actor}
    profiles = {name: profile(busy_s) for name, (_, _, busy_s) in places.items()}
    plan = best_plan(chain(profiles, gpus(2), num_items=1, max_staleness=1), modes=("disaggregated",))
    assert plan.prediction is not None
    for name, expected in places.items():
        stage = plan.prediction.stages[name]
        assert (stage.start_s, stage.end_s, stage.busy_s) == pytest.approx(expected, abs=0.02)


def test_stages_of_one_side_overlap_across_steps():
    """Three whole batches of 100 s on three devices: with staleness 2 a step ends every 100 s."""
    profiles = {name: profile(100.0) for name in ("rollout", "reference", "actor")}
    problem = chain(profiles, gpus(3), num_items=1, max_staleness=2)
    plan = best_plan(problem)
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(100, rel=1e-3)
    assert plan.prediction.estimate_s == pytest.approx(100, rel=1e-3)


def test_the_pace_of_a_plan_that_runs_ahead_is_that_of_many_steps():
    profiles = {
        "rollout": profile(0.5, fixed=1.0, state_bytes=15 * GIB),
        "reference": profile(0.37),
        "actor": profile(1.1, step_s=0.3, state_bytes=20 * GIB),
    }
    problem = chain(profiles, gpus(8), num_items=96, max_staleness=1)
    places = {"rollout": (range(3), 32), "reference": (range(3), 1), "actor": (range(3, 8), 1)}
    stages = tuple(
        StagePlan(stage=name, devices=tuple(on), num_ranks=len(on), granularity=size, offload=False, turn=turn)
        for turn, (name, (on, size)) in enumerate(places.items())
    )
    manual_plan = Plan(flow="chain", mode="disaggregated", stages=stages, reason="by hand")
    ends = simulate(problem, manual_plan, num_steps=61).step_end_s
    assert simulate(problem, manual_plan).step_s == pytest.approx((ends[-1] - ends[0]) / 60, rel=0.03)


def test_the_longest_times_are_planned_without_a_warning():
    profiles = {
        name: profile(MAX_SECONDS / 100, batching=batching, step_s=MAX_SECONDS)
        for name, batching in (("rollout", "continuous"), ("reference", "longest"), ("actor", "sum"))
    }
    with np.errstate(all="raise"):
        plan = best_plan(chain(profiles, gpus(4), num_items=64))
    assert plan.prediction is not None
    assert MAX_SECONDS < plan.prediction.step_s < 10 * MAX_SECONDS


@pytest.mark.parametrize("num_devices", [8, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_plans_of_any_size_are_valid_and_say_what_the_search_thought(num_devices: int, record_property):
    problem = ppo(num_devices)
    plan = best_plan(problem)
    plan.validate(problem.flow, problem.cluster)
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(simulate(problem, replace(plan, prediction=None)).step_s)
    if plan.prediction.estimate_s is not None:
        assert plan.prediction.estimate_s == pytest.approx(plan.prediction.step_s, rel=0.1)
        record_property("estimate_over_step", plan.prediction.estimate_s / plan.prediction.step_s)
    for stage in plan.prediction.stages.values():
        assert stage.peak_bytes <= 80 * GIB


@pytest.mark.parametrize("num_devices", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_the_same_problem_gives_the_same_plan(num_devices: int):
    problem = ppo(num_devices, num_items=128)
    assert best_plan(problem).to_json() == best_plan(type(problem).from_json(problem.to_json())).to_json()
