"""What is busiest and what helps most: worked out by hand, and against the reference of the simulator."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from sched_device_seconds import device_seconds
from sched_generated_problems import problems
from sched_planner_problems import GIB, chain, gpus, profile
from sched_simpy_reference import Reference

from rlinf_sched import Plan, Problem, StagePlan
from rlinf_sched.explain import explain, explain_problem, gains
from rlinf_sched.explain.busiest import device_shares
from rlinf_sched.explain.from_timeline import path_of, spans_of
from rlinf_sched.explain.gains import gains_of
from rlinf_sched.simulator import simulate
from rlinf_sched.simulator.timeline import SpanKind

pytestmark = pytest.mark.usefixtures("brief_search")

SYNC = "the weight sync from actor to rollout"


def placed(stages: dict[str, tuple[int, ...]], offload: bool = False) -> Plan:
    """One rank for each stage, of which each has its turn when the one before is done."""
    plans = [
        StagePlan(stage=name, devices=devices, num_ranks=1, granularity=0, offload=offload and bool(devices), turn=turn)
        for turn, (name, devices) in enumerate(stages.items())
    ]
    return Plan(flow="chain", mode="hybrid", stages=tuple(plans), reason="by hand")


def sentences_of(problem: Problem, plan: Plan, *, asks: bool = True) -> list[str]:
    """The sentences on what is busiest and on what helps."""
    timeline = simulate(problem, plan)
    plan_gains = gains_of(problem, plan) if asks else ()
    sentences = explain(problem, plan, spans_of(timeline), path_of(timeline), (), plan_gains).sentences
    return [text for text in sentences if text.startswith(("The busiest", "Weight syncs take", "With this plan"))]


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_what_helps_most_need_not_be_on_the_busiest_device():
    """One item goes through 3 s and 3 s on device 0 and 4 s on device 1 between them."""
    stages = {"rollout": profile(3.0), "reference": profile(4.0), "actor": profile(3.0)}
    problem = chain(stages, gpus(2), num_items=1)
    assert sentences_of(problem, placed({"rollout": (0,), "reference": (1,), "actor": (0,)})) == [
        "The busiest is device 0: it computes 60% of the time.",
        "With this plan 10% off the time of reference helps most: it makes the step 4.0% shorter.",
    ]


def test_stages_of_overlapping_steps_that_take_equally_long_do_not_help():
    problem = chain({"rollout": profile(4.0), "actor": profile(4.0)}, gpus(2), num_items=1, max_staleness=1)
    assert sentences_of(problem, placed({"rollout": (0,), "actor": (1,)}))[1] == (
        "With this plan no single stage helps: 10% off the time of any of them makes the step less than 0.5% shorter, "
        "as several take turns in deciding."
    )


def test_weight_syncs_that_take_longest_are_told_and_help():
    """12 s beside 2 s and 2 s of computing."""
    cluster = gpus(2)
    slow = replace(cluster, links=replace(cluster.links, sync_bytes_per_s=GIB / 12))
    problem = chain({"rollout": profile(2.0), "actor": profile(2.0)}, slow, num_items=1)
    assert sentences_of(problem, placed({"rollout": (0,), "actor": (1,)})) == [
        "Weight syncs take 75% of the time, longer than any device or process computes.",
        f"With this plan 10% off the time of {SYNC} helps most: it makes the step 7.5% shorter.",
    ]


def test_moving_state_and_weight_syncs_are_told_apart_from_computing():
    """Twice onload and offload of 2 s each and 6 s of computing, then 2 s of syncing: 22 s."""
    cluster = gpus(1)
    slow = replace(cluster, links=replace(cluster.links, sync_bytes_per_s=GIB / 2))
    stages = {name: profile(6.0, onload_s=2.0, offload_s=2.0) for name in ("rollout", "actor")}
    problem = chain(stages, slow, num_items=1)
    assert sentences_of(problem, placed({"rollout": (0,), "actor": (0,)}, offload=True)) == [
        "The busiest is device 0: it computes 55% of the time, moving state takes 36% and weight syncs take 9%.",
        "With this plan 10% off the time of moving state helps most: it makes the step 3.6% shorter.",
    ]


def test_items_that_move_slowly_help():
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(2), num_items=1)
    rate = problem.cluster.links.node_bytes_per_s
    problem = replace(problem, flow=replace(problem.flow, item_bytes={"to-actor": round(6 * rate)}))
    assert sentences_of(problem, placed({"rollout": (0,), "actor": (1,)})) == [
        "The busiest is device 0: it computes 12% of the time.",
        "With this plan 10% off the time of moving items helps most: it makes the step 7.5% shorter.",
    ]


def test_devices_of_a_group_that_compute_unequally_and_host_processes():
    """Three items of 2 s on two devices; each waits for 1 s on the host, where there is one process."""
    stages = {"rollout": profile(2.0), "reward": profile(1.0, num_devices=0), "actor": profile(1.0)}
    problem = chain(stages, gpus(2), num_items=3)
    by_hand = placed({"rollout": (0, 1), "reward": (), "actor": (0,)})
    rollout = replace(by_hand.stages[0], num_ranks=2, granularity=1)
    plan = replace(by_hand, stages=(rollout, *by_hand.stages[1:]))
    # rollout 4 s and 2 s, then reward 3 s, then actor on device 0
    assert sentences_of(problem, plan) == [
        "The busiest is device 0: it computes 70% of the time.",
        "With this plan 10% off the time of rollout helps most: it makes the step 4.0% shorter.",
    ]
    both = replace(plan.stages[2], devices=(1,))
    apart = replace(plan, stages=(rollout, plan.stages[1], both))
    assert sentences_of(problem, apart)[0] == "The busiest is device 1: it computes 50% of the time."
    slow = replace(
        problem, profiles=replace(problem.profiles, stages={**stages, "reward": profile(9.0, num_devices=0)})
    )
    assert sentences_of(slow, apart)[0] == "The busiest is the host process of reward: it computes 79% of the time."
    alone = chain({"rollout": stages["rollout"], "actor": profile(1.0, num_devices=0)}, gpus(2), num_items=3)
    host = replace(plan, stages=(rollout, replace(plan.stages[2], devices=(), turn=1)))
    assert sentences_of(alone, host)[0] == "The busiest are devices 0-1: they compute 29% to 57% of the time."


def test_steps_with_too_many_items_to_be_simulated_often_name_the_busiest_only(monkeypatch: pytest.MonkeyPatch):
    problem = chain({"rollout": profile(2.0), "actor": profile(1.0)}, gpus(2), num_items=1)
    plan = placed({"rollout": (0,), "actor": (1,)})
    monkeypatch.setattr(gains, "MOST_ITEMS", 2)
    assert len(gains_of(problem, plan)) == 4
    monkeypatch.setattr(gains, "MOST_ITEMS", 1)
    assert gains_of(problem, plan) == ()
    assert sentences_of(problem, plan) == ["The busiest is device 0: it computes 67% of the time."]


def test_gains_are_of_the_steps_that_judge_the_plan():
    stages = {name: profile(1.0) for name in ("rollout", "actor")}
    lognormal = replace(stages["rollout"].costs, spread="lognormal", sigma=1.0)
    stages["rollout"] = replace(stages["rollout"], batching="longest", costs=lognormal)
    problem = chain(stages, gpus(2), num_items=8)
    explanation = explain_problem(problem, num_draws=3)
    best = explanation.gains[0]
    drawn = {"seed": 0, "num_steps": 3}
    faster = simulate(_with_a_faster_stage(problem, best.label), explanation.plan, **drawn).step_s
    assert best.share == pytest.approx(1 - faster / simulate(problem, explanation.plan, **drawn).step_s)


# -- against the reference ---------------------------------------------------------------------------------------------


class Faster(Reference):
    """With 10 % off the time of a stage, of the syncs over one edge, of moving state or of moving items."""

    def __init__(self, problem, plan, faster):
        self.faster, self.factor = faster, 1
        super().__init__(_with_a_faster_stage(problem, faster), plan)

    def factor_of(self, thing):
        return Fraction(9, 10) if thing == self.faster else 1

    def new_stage(self, stage):
        s = super().new_stage(stage)
        s.onload, s.offload = (seconds * self.factor_of("moving state") for seconds in (s.onload, s.offload))
        return s

    def transfer_s(self, edge, count):
        return super().transfer_s(edge, count) * self.factor_of("moving items")

    def sync(self, edge, step):
        self.factor = self.factor_of(_sync_label(edge))
        super().sync(edge, step)
        self.factor = 1

    def after(self, seconds, then):
        super().after(seconds * self.factor, then)

    def step_s(self):
        ends, settled = [0, *self.run().step_ends], self.num_steps // 2 if self.late else 0
        return float(ends[-1] - ends[settled]) / (self.num_steps - settled)


def _sync_label(edge):
    return f"the weight sync from {edge.source} to {edge.target}"


def _with_a_faster_stage(problem, name):
    if name not in problem.profiles.stages:
        return problem
    instances = tuple(
        replace(
            one,
            points=tuple(replace(point, seconds=point.seconds * 0.9) for point in one.points),
            step_s=one.step_s * 0.9,
        )
        for one in problem.profile(name).instances
    )
    stages = {**problem.profiles.stages, name: replace(problem.profile(name), instances=instances)}
    return replace(problem, profiles=replace(problem.profiles, stages=stages))


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems())
def test_what_is_named_saves_most_by_the_reference(case):
    problem, plan = case
    things = [stage.name for stage in problem.flow.stages]
    things += [*map(_sync_label, problem.flow.weight_edges), "moving state", "moving items"]
    now_s = Faster(problem, plan, "").step_s()
    saved = {thing: 1 - Faster(problem, plan, thing).step_s() / now_s for thing in things}
    plan_gains = gains_of(problem, plan)
    for gain in plan_gains:
        assert gain.share == pytest.approx(saved[gain.label], abs=1e-7)
    best = max(saved.values())
    assert saved[plan_gains[0].label] == pytest.approx(best, abs=1e-7)
    (sentence,) = [text for text in sentences_of(problem, plan) if text.startswith("With this plan")]
    if abs(best - 0.005) > 1e-6:
        assert ("no single stage helps" in sentence) == (best < 0.005)
    if "no single stage" not in sentence:
        assert f"off the time of {plan_gains[0].label} helps most" in sentence


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(max_staleness=0))
def test_devices_compute_and_switch_as_long_as_the_simulator_says(case):
    problem, plan = case
    timeline = simulate(problem, plan)
    spans, num_devices = spans_of(timeline), problem.cluster.num_devices
    kinds_of_use: tuple[tuple[SpanKind, ...], ...] = (("compute", "step"), ("onload", "offload"))
    of_devices = [device_shares(plan, spans, num_devices, *kinds) for kinds in kinds_of_use]
    seconds = np.array([device_seconds(timeline, *kinds) for kinds in kinds_of_use])
    np.testing.assert_allclose(of_devices, seconds / timeline.step_s, rtol=1e-9, atol=1e-9)
