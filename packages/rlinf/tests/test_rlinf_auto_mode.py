"""Mode auto without processes: what it measures, when it asks for a plan, and when it moves."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.plan_times import RECENT_STEPS, PlanHistory, PlanTimes, busy_seconds
from rlinf.machine import Machine
from rlinf.planning import auto_mode, plans
from rlinf.planning.auto_mode import AutoMode
from rlinf.planning.plans import make_plans, moved_stages, placements_to_measure, plans_of_problem, steps_ahead
from rlinf_sched import Cluster, InstanceProfile, Links, Problem, Profiles, StageProfile, TimePoint
from rlinf_workers import COMPUTE_SPAN, SYNC_SPAN, FlowRun, Span

pytestmark = pytest.mark.usefixtures("brief_search")

NUM_ITEMS = 64


def job_of(*overrides: str) -> ReasoningJob:
    config = load_config("sort-grpo", parse_overrides(["--cluster.num_devices", "2", *overrides]))
    return ReasoningJob(config, Machine(num_cpus=8, memory_bytes=8 << 30))  # pyright: ignore[reportArgumentType]


def step_run(item_s=None, step_s=0.0, **num_ranks):
    """A step in which every rank computes on its share of the items."""
    item_s = item_s or {"rollout": 0.01, "reward": 0.0001, "actor": 0.02}
    spans = []
    for stage, ranks in {"rollout": 2, "reward": 1, "actor": 2, **num_ranks}.items():
        for rank in range(ranks):
            spans.append(
                Span(
                    name=stage,
                    category=COMPUTE_SPAN,
                    worker=f"{stage}/{rank}",
                    devices=(),
                    start_ns=0,
                    duration_ns=round(item_s[stage] * NUM_ITEMS / ranks * 1e9),
                    num_items=NUM_ITEMS // ranks,
                )
            )
    return FlowRun(metrics={}, collected={}, shown_rows=[], spans=spans, start_s=0.0, duration_s=step_s)


class Group:
    def call(self, method):
        return [(1 << 20, 2 << 20)]


class Running:
    def group(self, name):
        return Group()

    def weights_bytes(self, edge):
        return 1000


class Auto:
    """A mode under test, and what it told."""

    def __init__(self, *overrides: str, folder: Path = Path("none")):
        self.told: list[str] = []
        self.job = job_of(*overrides)
        self.flows = self.job.build(folder)
        self.planned = make_plans(self.job, self.flows, folder)
        self.mode = AutoMode(self.job, self.flows, self.planned, self.told.append)

    def observe(self, run):
        return self.mode.observe(run, busy_seconds(run))

    def better(self, **arguments):
        planned = self.mode.better(Running(), **{"num_steps": 100, "move_s": 5.0, **arguments})  # pyright: ignore
        if planned is not None:
            self.mode.take(planned)
        return planned

    def probe_all(self):
        while self.mode.probes:
            asks = self.observe(step_run())
        return asks


def problem_of(auto: Auto, item_s) -> Problem:
    """Costs by item, in the flow of the job."""
    stages = {
        name: StageProfile(
            instances=tuple(
                InstanceProfile(num_devices=span, points=(TimePoint(num_items=1, seconds=seconds),))
                for span in ((0,) if name == "reward" else (1, 2))
            ),
        )
        for name, seconds in item_s.items()
    }
    cluster = replace(Cluster.cpu_slots(2), links=Links(latency_s=0.0))
    return Problem(
        flow=auto.flows.train.graph(), profiles=Profiles(stages=stages), cluster=cluster, num_items=NUM_ITEMS
    )


def test_a_run_begins_collocated_and_measures_each_granularity_several_times():
    auto = Auto()
    assert auto.mode.plan.mode == "collocated"
    seen = []
    while auto.mode.probes:
        seen.append(auto.mode.probes[0].stage("rollout").granularity)
        asks = auto.observe(step_run())
        assert asks == (not auto.mode.probes)
    assert seen == [0, *[0, 16, 8] * auto_mode.NUM_REPEATS]


def test_a_run_that_is_too_short_measures_nothing_and_says_so():
    auto = Auto()
    auto.mode.fit_into(len(auto.mode.probes) + 1)
    assert len(auto.mode.probes) == 10
    auto.mode.fit_into(1)
    assert len(auto.mode.probes) == 0
    assert auto.told == ["auto: collocated stays: measuring takes 10 steps, and the run has 1 left"]


@pytest.mark.parametrize(("num_devices", "modes"), [(1, ["collocated"]), (2, ["collocated", "disaggregated"])])
def test_a_measurement_knows_its_placements_and_their_steps_before_it_begins(num_devices, modes):
    auto = Auto("--cluster.num_devices", str(num_devices))
    placements = placements_to_measure(auto.job, auto.flows)
    assert [placed.plans["grpo"].mode for placed in placements] == modes
    for placed in placements:
        auto.mode.begin_probes(placed)
        steps = iter(lambda: len(auto.mode.probes) > 0 and not auto.observe(step_run()), False)
        assert 1 + sum(steps) == len(auto.mode.probes_of(placed))


def test_what_was_measured_decides():
    auto = Auto()
    auto.probe_all()
    run_plans = auto.better()
    problem = auto.mode.problem
    assert problem is not None
    assert problem.profiles.stages["rollout"].instances[0].seconds(32) == pytest.approx(0.32)
    assert problem.choices("actor") == (32, 64)
    plan = auto.mode.plan if run_plans is None else run_plans.plans["grpo"]
    assert plan.mode == "collocated"
    assert not moved_stages(plan, auto.planned.plans["grpo"])


def test_a_plan_that_pays_is_taken_and_one_that_does_not_is_not(monkeypatch):
    auto = Auto("--actor.num_shards", "1", "--actor.micro_batch_groups", "8")
    auto.probe_all()
    # one rank of the actor takes most of the time: beside it the rollout costs nothing, before it 0.16 s
    problem = problem_of(auto, {"rollout": 0.005, "reward": 0.0001, "actor": 0.02})
    monkeypatch.setattr(AutoMode, "measure", lambda self, executor: type("Found", (), {"problem": problem}))
    base = {"move_s": 5.0}
    assert auto.better(num_steps=1, **base) is None
    assert re.fullmatch(
        r"auto: collocated stays, [\d.]+ s a step; disaggregated takes [\d.]+ s, and moving there 5 s", auto.told[-1]
    )
    run_plans = auto.better(num_steps=1000, **base)
    assert run_plans is not None
    assert run_plans.plans["grpo"].mode == "disaggregated"
    assert re.match(r"auto: goes on with disaggregated: [\d.]+ s a step instead of [\d.]+", auto.told[-1])
    assert moved_stages(auto.planned.plans["grpo"], run_plans.plans["grpo"])
    assert auto.mode.plan == run_plans.plans["grpo"]
    assert {"grpo", "evaluate"} <= set(run_plans.plans)
    assert auto.better(num_steps=1000, **base) is None, "the best plan stays"
    assert "takes" not in auto.told[-1], "there is no other to name"


def test_a_placement_with_other_ranks_is_measured_and_left_if_it_disappoints():
    """A lone actor beside the rollout promises much; there the rollout, on one rank, is four times as slow."""
    auto = Auto("--actor.num_shards", "1", "--actor.micro_batch_groups", "8")
    costs = {"rollout": 0.01, "reward": 0.0001, "actor": 0.01}
    while auto.mode.probes:
        auto.observe(step_run(costs, actor=1))
    run_plans = auto.better(num_steps=1000)
    assert run_plans is not None
    apart = run_plans.plans["grpo"]
    assert (apart.mode, apart.stage("rollout").num_ranks) == ("disaggregated", 1)
    assert len(auto.mode.probes) > 0, "the rollout was never seen on one rank"
    assert auto.mode.probes[0].stage("rollout").devices == apart.stage("rollout").devices
    while auto.mode.probes:
        asks = auto.observe(step_run({**costs, "rollout": 0.04}, rollout=1, actor=1))
    assert asks
    back = auto.better(num_steps=1000)
    assert back is not None
    assert back.plans["grpo"].stage("rollout").num_ranks == 2
    assert len(auto.mode.probes) == 0, "measured before"
    assert auto.better(num_steps=1000) is None


def test_lasting_drift_asks_for_a_plan_and_a_hiccup_does_not():
    auto = Auto()
    auto.probe_all()
    auto.better()
    slow = {"rollout": 0.03, "reward": 0.0001, "actor": 0.02}
    assert not auto.observe(step_run(slow))
    assert not any(auto.observe(step_run()) for _ in range(5))
    before = list(auto.told)
    assert any(auto.observe(step_run(slow)) for _ in range(20))
    stays = auto.better() is None
    assert auto.told[len(before) :] == [] if stays else "rollout takes 3 times what it did" in auto.told[-1]
    assert auto.mode.problem is not None
    assert auto.mode.problem.profiles.stages["rollout"].instances[0].seconds(32) == pytest.approx(0.96)


def test_another_mode_measures_nothing_and_predicts_from_a_given_profile(tmp_path: Path):
    auto = Auto("--mode", "hybrid")
    assert len(auto.mode.probes) == 0
    assert not auto.observe(step_run())
    profile = tmp_path / "profile.json"
    profile.write_text(problem_of(auto, {"rollout": 0.01, "reward": 0.0001, "actor": 0.02}).to_json())
    profiled = Auto("--mode", "hybrid", "--plan.profile", str(profile))
    assert profiled.planned.plans == auto.planned.plans
    assert profiled.mode.problem is not None


def test_a_given_profile_is_planned_from_at_once_and_so_is_that_of_the_run_folder(tmp_path: Path):
    costs = {"rollout": 0.01, "reward": 0.0001, "actor": 0.01}
    problem = problem_of(Auto("--actor.num_shards", "1"), costs)
    problem = replace(problem, cluster=replace(problem.cluster, cpu_cores=7))
    (tmp_path / "problem.json").write_text(problem.to_json())
    for auto in (Auto("--plan.profile", str(tmp_path / "problem.json")), Auto(folder=tmp_path)):
        assert len(auto.mode.probes) == 0
        assert auto.mode.problem is not None
        assert auto.mode.problem.cluster.cpu_cores == 7
        assert auto.mode.plan == plans_of_problem(auto.job, auto.flows, auto.mode.problem).plans["grpo"]
        assert auto.mode.plan.prediction is not None


def test_a_profile_that_is_not_this_recipes_is_refused(tmp_path: Path):
    path = tmp_path / "profile.json"
    with pytest.raises(UserError, match=r"plan\.profile=.*profile\.json: .*No such file"):
        Auto("--plan.profile", str(path))
    path.write_text("{}")
    with pytest.raises(UserError, match=r"(?s)plan\.profile=.*hint: rlinf profile RECIPE writes such a file"):
        Auto("--plan.profile", str(path))
    with_reference = Auto("--algorithm.kl_coef", "0.1")
    costs = {"rollout": 0.01, "reference": 0.01, "reward": 0.0001, "actor": 0.02}
    path.write_text(problem_of(with_reference, costs).to_json())
    with pytest.raises(UserError, match="is of the stages rollout, reference, reward, actor; this recipe has rollout"):
        Auto("--plan.profile", str(path))


def test_a_profile_in_which_nothing_fits_is_an_answer(tmp_path: Path):
    problem = problem_of(Auto(), {"rollout": 0.01, "reward": 0.0001, "actor": 0.02})
    actor = problem.profiles.stages["actor"]
    huge = replace(actor, instances=(replace(actor.instances[0], state_bytes=1 << 60),))
    problem = replace(problem, profiles=Profiles(stages={**problem.profiles.stages, "actor": huge}))
    (tmp_path / "problem.json").write_text(problem.to_json())
    with pytest.raises(UserError, match=r"mode=auto: .*actor"):
        Auto(folder=tmp_path)


def test_times_are_medians_beside_what_was_predicted():
    auto = Auto()
    times = PlanTimes(plan=auto.mode.plan, problem=None, first_step=3)
    assert times.to_json()["step"] == {"predicted_s": None, "measured_s": None}
    problem = problem_of(auto, {"rollout": 0.01, "reward": 0.0001, "actor": 0.02})
    times = PlanTimes(plan=auto.mode.plan, problem=problem, first_step=3)
    for step_s in (1.0, 5.0, 1.2):
        run = step_run(step_s=step_s)
        times.add(run, busy_seconds(run))
    record = times.to_json()
    assert (record["mode"], record["first_step"], record["num_steps"]) == ("collocated", 3, 3)
    assert record["step"]["measured_s"] == 1.2
    assert record["step"]["predicted_s"] == pytest.approx(0.32 + 0.0064 + 0.64, rel=0.01)
    assert record["stages"]["actor"] == {"predicted_s": pytest.approx(0.64), "measured_s": pytest.approx(0.64)}


def test_a_step_should_take_what_was_predicted_or_what_those_before_took():
    auto = Auto()
    problem = problem_of(auto, {"rollout": 0.01, "reward": 0.0001, "actor": 0.02})  # 0.97 s a step
    blind, seeing = (PlanTimes(plan=auto.mode.plan, problem=basis, first_step=0) for basis in (None, problem))
    assert blind.expected_s is None
    assert seeing.expected_s == pytest.approx(0.97, rel=0.01)
    for step_s in (0.5, 40.0, 0.7):
        for times in (blind, seeing):
            times.add(step_run(step_s=step_s), {})
    assert blind.expected_s == 0.7
    assert seeing.expected_s == pytest.approx(0.97, rel=0.01)
    for _ in range(2):
        seeing.add(step_run(step_s=40.0), {})
    assert seeing.expected_s == 40.0
    for _ in range(RECENT_STEPS):
        blind.add(step_run(step_s=2.0), {"actor": 1.0})
    record = blind.to_json()
    assert record["num_steps"] == RECENT_STEPS + 3, "all are counted, and the last ones kept"
    assert sum(map(len, [blind._steps_s, *blind._stages_s.values()])) == 2 * RECENT_STEPS


def test_only_computing_counts_as_busy():
    run = step_run()
    waiting = replace(run.spans[0], category=SYNC_SPAN, duration_ns=9_000_000_000)
    run.spans.append(waiting)
    assert busy_seconds(run)["rollout"] == pytest.approx(0.32)


def test_steps_of_a_resumed_run_are_counted_from_its_checkpoint():
    folder: Any = SimpleNamespace()
    history = PlanHistory(folder)
    history.begin(Auto().mode.plan, None, 0)
    history.resume_at(21)
    assert history.present.to_json()["first_step"] == 21


# -- steps that overlap ------------------------------------------------------------------------------------------------


def without_gain_from_ranks(auto: Auto, item_s) -> Problem:
    """Two ranks of a stage take as long as one, so that only separate stages at once save time."""
    problem = problem_of(auto, item_s)
    stages = {
        name: profile
        if name == "reward"
        else replace(
            profile,
            instances=tuple(
                replace(profile.instances[0], num_ranks=num_ranks, points=(TimePoint(num_items=1, seconds=seconds),))
                for num_ranks, seconds in ((1, item_s[name]), (2, 2 * item_s[name]))
            ),
        )
        for name, profile in problem.profiles.stages.items()
    }
    return replace(problem, profiles=Profiles(stages=stages))


EQUAL_S = {"rollout": 0.02, "reward": 0.0001, "actor": 0.02}


def test_a_plan_whose_steps_overlap_is_taken_where_it_is_the_fastest():
    auto = Auto("--algorithm.max_staleness", "1")
    planned = plans_of_problem(auto.job, auto.flows, without_gain_from_ranks(auto, EQUAL_S))
    plan = planned.plans["grpo"]
    assert plan.mode == "disaggregated" and planned.problem is not None
    assert planned.problem.flow.max_staleness == 1
    assert plan.prediction is not None
    assert plan.prediction.step_s == pytest.approx(0.02 * NUM_ITEMS, rel=0.05), "as long as one of the two stages"


@pytest.mark.parametrize(("gain", "expected"), [(0.03, 3), (0.015, 1)])
def test_generation_runs_no_further_ahead_than_pays(monkeypatch, gain, expected):
    """The steps of 1 and 2 are predicted to take longer than those of 3 by that share."""
    auto = Auto("--algorithm.max_staleness", "3")
    predicted = plans.simulate

    def simulate(problem, plan):
        timeline = predicted(problem, plan)
        return SimpleNamespace(step_s=timeline.step_s * (1.0 + gain * (problem.flow.max_staleness < 3)))

    monkeypatch.setattr(plans, "simulate", simulate)
    planned = plans_of_problem(auto.job, auto.flows, without_gain_from_ranks(auto, EQUAL_S))
    plan = planned.plans["grpo"]
    assert plan.prediction is not None and planned.problem is not None
    assert plan.prediction.max_staleness == planned.problem.flow.max_staleness == expected
    assert plan.steps_ahead(auto.flows.train.graph()) == expected


def test_steps_do_not_overlap_for_a_negligible_gain(monkeypatch):
    auto = Auto("--algorithm.max_staleness", "2")
    monkeypatch.setattr(plans, "NEGLIGIBLE", 1.1)
    planned = plans_of_problem(auto.job, auto.flows, without_gain_from_ranks(auto, EQUAL_S))
    assert planned.problem is not None and planned.problem.flow.max_staleness == 0
    assert steps_ahead(planned.plans["grpo"], auto.flows.train.graph()) == 0


def test_a_collocated_plan_that_is_faster_is_taken_and_predicted_without_overlap():
    """Training takes much longer than generation, and two ranks halve it."""
    auto = Auto("--algorithm.max_staleness", "1")
    planned = plans_of_problem(
        auto.job, auto.flows, problem_of(auto, {"rollout": 0.001, "reward": 0.0001, "actor": 0.1})
    )
    assert planned.plans["grpo"].mode == "collocated" and planned.problem is not None
    assert planned.problem.flow.max_staleness == 0


def test_steps_overlap_once_the_run_has_moved_to_such_a_plan(monkeypatch):
    auto = Auto("--algorithm.max_staleness", "2")
    assert auto.mode.plan.mode == "collocated" and not auto.mode.overlaps
    auto.probe_all()
    problem = without_gain_from_ranks(auto, EQUAL_S)
    monkeypatch.setattr(auto.mode, "measure", lambda executor: SimpleNamespace(problem=problem))
    planned = auto.better()
    assert planned is not None and planned.plans["grpo"].mode == "disaggregated"
    assert "its steps overlap (1 step ahead, of at most 2): rollout on device 0" in auto.told[-1]
    assert auto.mode.probes and not auto.mode.overlaps, "a placement is measured without overlap"
    while auto.mode.probes:
        auto.observe(step_run(rollout=1, actor=1))
    assert auto.mode.overlaps
    assert not any(auto.observe(step_run({**EQUAL_S, "actor": 0.2}, rollout=1, actor=1)) for _ in range(50)), (
        "steps that overlap do not pause for another plan"
    )


def test_a_profile_lets_steps_overlap_from_the_beginning(tmp_path):
    problem = without_gain_from_ranks(Auto("--algorithm.max_staleness", "1"), EQUAL_S)
    (tmp_path / "problem.json").write_text(problem.to_json())
    auto = Auto("--algorithm.max_staleness", "1", "--plan.profile", str(tmp_path / "problem.json"))
    assert auto.mode.overlaps
    assert auto.told[0].startswith("auto: disaggregated; its steps overlap (1 step ahead): ")
