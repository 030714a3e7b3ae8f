"""Explanations of hand-made timelines, against numbers worked out by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sched_device_seconds import device_seconds
from sched_planner_problems import GIB, chain, gpus, profile

from rlinf_sched import Cluster, InfeasibleError, Mode, Plan, Prediction, Problem, RunnerUp, plan_for_mode
from rlinf_sched.derive.workloads import grpo
from rlinf_sched.explain import (
    DeviceGroup,
    Spans,
    device_groups,
    explain,
    explain_problem,
    explanation_text,
    trace_json,
    usage,
)
from rlinf_sched.explain.cores import core_shares
from rlinf_sched.explain.from_timeline import path_of, spans_of
from rlinf_sched.explain.gains import Gain
from rlinf_sched.explain.make import lost_term
from rlinf_sched.explain.memory import memory_uses
from rlinf_sched.explain.quantities import gib, listed, seconds
from rlinf_sched.explain.spans import KINDS
from rlinf_sched.explain.what_if import changes, grown, what_if
from rlinf_sched.planner import best_plan as make_plan
from rlinf_sched.problem_file import read_problem
from rlinf_sched.simulator import simulate

pytestmark = pytest.mark.usefixtures("brief_search")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def problem() -> Problem:
    return read_problem(EXAMPLES / "laptop.json")


@pytest.fixture
def embodied() -> Problem:
    pytest.importorskip("yaml")
    return read_problem(EXAMPLES / "embodied-cycle.yaml")


def make_spans(*rows: tuple[int, int, str, float, float], step_s: float = 10.0) -> Spans:
    """Rows of (stage, rank, kind, start, end) of rollout and actor."""
    return Spans(
        step_s=step_s,
        length_s=step_s,
        stages=("rollout", "actor"),
        stage=np.array([row[0] for row in rows]),
        rank=np.array([row[1] for row in rows]),
        kind=np.array([KINDS.index(row[2]) for row in rows]),  # type: ignore[arg-type]
        start_s=np.array([row[3] for row in rows]),
        end_s=np.array([row[4] for row in rows]),
        num_items=np.full(len(rows), 8),
    )


STEP = make_spans(
    (0, 0, "compute", 0.0, 6.0),
    (0, 1, "compute", 0.0, 2.0),
    (1, 0, "onload", 6.0, 6.5),
    (1, 1, "onload", 6.0, 6.5),
    (1, 0, "compute", 6.5, 8.0),
    (1, 1, "compute", 6.5, 8.0),
    (1, 0, "step", 8.0, 9.0),
    (1, 0, "sync", 9.0, 10.0),
)
PATH = {"rollout": 6.0, "moving state": 0.5, "actor": 2.5, "weight sync": 1.0}


@pytest.fixture
def plan(problem: Problem) -> Plan:
    plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
    other = RunnerUp(mode="disaggregated", step_s=12.5, reason="actor waits 3.1 s for rollout's longest answers")
    return replace(plan, prediction=Prediction(estimate_s=0.0, step_s=10.0, sync_s=1.0, stages={}, runners_up=(other,)))


# -- devices ---------------------------------------------------------------------------------------------------------


def test_ranks_are_on_the_devices_that_the_plan_says(problem: Problem):
    cluster = Cluster.cuda_nodes(1, 4, name="x", memory_bytes=1 << 30)

    def devices(num_ranks: int) -> list[tuple[int, ...]]:
        plan = plan_for_mode(problem.flow, cluster, "collocated", num_ranks={"rollout": num_ranks})
        return [plan.stage("rollout").devices_of(rank) for rank in range(num_ranks)]

    assert devices(4) == [(0,), (1,), (2,), (3,)]
    assert devices(2) == [(0, 1), (2, 3)]
    assert devices(8) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_devices_with_the_same_stages_are_one_group(grpo):
    cluster = Cluster.cuda_nodes(128, 8, name="x", memory_bytes=1 << 30)
    chosen = {"rollout": range(700), "reference": range(600, 1024), "actor": range(1024)}
    plan = plan_for_mode(grpo, cluster, "hybrid", devices=chosen)
    assert [(g.stages, len(g.devices), g.devices[:1]) for g in device_groups(plan)] == [
        (("rollout", "actor"), 600, (0,)),
        (("rollout", "reference", "actor"), 100, (600,)),
        (("reference", "actor"), 324, (700,)),
        (("reward",), 0, ()),
    ]


def test_usage_is_the_mean_number_of_busy_devices_in_each_bin(plan: Plan):
    group = device_groups(plan)[0]
    used = usage(STEP, plan, group, np.array([0.0, 2.0, 4.0, 10.0]))
    assert {name: values.round(9).tolist() for name, values in used.items()} == {
        "rollout": [2.0, 1.0, round(2 / 6, 9)],
        "actor": [0.0, 0.0, round(4 / 6, 9)],
        "switch": [0.0, 0.0, round(1 / 6, 9)],
        "sync": [0.0, 0.0, round(1 / 6, 9)],
    }
    single = DeviceGroup(devices=(1,), stages=group.stages)
    assert usage(STEP, plan, single, np.array([0.0, 10.0]))["rollout"].tolist() == [0.2]


def test_ranks_that_share_or_span_devices_count_with_their_part(problem: Problem):
    for num_ranks, expected in ((1, 4.0), (8, 0.5)):
        cluster = Cluster.cuda_nodes(1, 4, name="x", memory_bytes=1 << 30)
        plan = plan_for_mode(problem.flow, cluster, "collocated", num_ranks={"rollout": num_ranks})
        spans = make_spans((0, 0, "compute", 0.0, 10.0))
        assert usage(spans, plan, device_groups(plan)[0], np.array([0.0, 10.0]))["rollout"].tolist() == [expected]


@pytest.mark.parametrize("name", ["laptop.json", "embodied-cycle.yaml"])
def test_every_mode_is_compared_at_its_best(name: str):
    pytest.importorskip("yaml")
    problem = read_problem(EXAMPLES / name)
    plan = explain_problem(problem).plan
    assert plan.prediction is not None
    compared = {row.mode: row.step_s for row in plan.prediction.runners_up} | {plan.mode: plan.prediction.step_s}
    for mode in ("collocated", "disaggregated", "hybrid"):
        alone = make_plan(problem, [mode]).prediction
        assert alone is not None
        assert compared[mode] <= alone.step_s * (1 + 1e-9)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_at_the_fullest_moment_of_a_collocated_plan(problem: Problem, plan: Plan):
    (use,) = memory_uses(problem, plan)
    assert (use.fullest, use.state_bytes, use.work_bytes) == ("actor", {"actor": 600_000_000}, 0)
    staying = replace(plan, stages=tuple(replace(stage, offload=False) for stage in plan.stages))
    (use,) = memory_uses(problem, staying)
    assert use.state_bytes == {"rollout": 200_000_000, "actor": 600_000_000}
    assert (use.used_bytes, use.capacity_bytes) == (800_000_000, 4 << 30)


def test_memory_counts_sharded_state_hand_overs_and_the_stages_of_a_cycle(embodied: Problem):
    plan = plan_for_mode(embodied.flow, embodied.cluster, "collocated", granularity={"env": 8, "policy": 8})
    (use,) = memory_uses(embodied, plan)
    # env and policy share a turn, so both are there; 8 items of the policy at a time
    generation = (6 << 30) + 15_000_000_000 + (1 << 30) + 8 * (40 << 20)
    training = 2_000_000_000 + 110_000_000_000 // 8 + (20 << 30)
    assert use.fullest == "actor"
    assert use.used_bytes == training > generation
    smaller = replace(embodied.profile("actor").instances[0], work_bytes=0)
    stages = {**embodied.profiles.stages, "actor": replace(embodied.profile("actor"), instances=(smaller,))}
    (use,) = memory_uses(replace(embodied, profiles=replace(embodied.profiles, stages=stages)), plan)
    assert (use.fullest, use.used_bytes) == ("policy", generation)


@pytest.mark.parametrize("first", [1, 5])
def test_stages_of_one_group_keep_the_largest_state_that_one_of_them_names(first: int):
    state = {"generate": first * GIB, "logprobs": 3 * GIB, "actor": 2 * GIB}
    work = {"generate": 10 * GIB}
    profiles = {
        name: profile(1.0, state_bytes=num_bytes, work_bytes=work.get(name, 0)) for name, num_bytes in state.items()
    }
    problem = chain(profiles, gpus(1), workers={"generate": "rollout", "logprobs": "rollout"})
    plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
    (use,) = memory_uses(problem, plan)
    assert use.used_bytes == (max(first, 3) + 10) * GIB == simulate(problem, plan).memory(0).peak_bytes


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
@pytest.mark.parametrize("name", ["grpo-7b.yaml", "embodied-cycle.yaml", "laptop.json"])
def test_memory_path_and_use_agree_with_the_simulator(name: str, mode: Mode):
    pytest.importorskip("yaml")
    problem = read_problem(EXAMPLES / name)
    plan = plan_for_mode(problem.flow, problem.cluster, mode)
    timeline = simulate(problem, plan)
    for use in memory_uses(problem, plan):
        assert use.used_bytes == max(timeline.memory(device).peak_bytes for device in use.group.devices)
    assert sum(path_of(timeline).values()) == pytest.approx(timeline.step_s)
    spans, busy_s = spans_of(timeline), device_seconds(timeline, "compute", "step")
    for group in device_groups(plan):
        used = usage(spans, plan, group, np.array([0.0, spans.step_s]))
        busy = sum(float(used[stage][0]) for stage in group.stages if stage in used)
        if group.devices:
            assert busy == pytest.approx(sum(busy_s[list(group.devices)]) / timeline.total_s)


@pytest.mark.parametrize(
    ("mode", "seconds_each", "num_steps", "path"),
    [
        ("disaggregated", {"rollout": 10.0, "actor": 4.0}, 1, {"rollout": 10.0}),
        ("disaggregated", {"rollout": 4.0, "actor": 6.0}, 1, {"actor": 6.0}),
        ("collocated", {"rollout": 4.0, "actor": 6.0}, 2, {"rollout": 4.0, "actor": 6.0}),  # two of each in turns
    ],
    ids=["generation is slower", "training is slower", "in turns"],
)
def test_where_steps_overlap_the_steady_state_is_told(
    mode: Mode, seconds_each: dict[str, float], num_steps: int, path: dict[str, float]
):
    """One item; in the last steps of the simulation nothing is generated any more."""
    profiles = {name: profile(each) for name, each in seconds_each.items()}
    problem = chain(profiles, gpus(1 if mode == "collocated" else 2), num_items=1, max_staleness=1)
    plan = plan_for_mode(problem.flow, problem.cluster, mode)
    timeline = simulate(problem, plan)
    spans, step_s = spans_of(timeline), sum(path.values())
    near = 0.01  # syncs and latencies take milliseconds
    assert (spans.num_steps, spans.step_s) == (num_steps, pytest.approx(step_s, rel=near))
    assert spans.length_s == pytest.approx(num_steps * step_s, rel=near)
    assert spans.start_s.min() == 0 and spans.end_s.max() == spans.length_s
    for name, each in seconds_each.items():
        assert spans.busy_share(name) == pytest.approx(each / step_s, rel=near)
    critical_path = path_of(timeline)
    assert sum(critical_path.values()) == pytest.approx(timeline.step_s)
    assert {label: round(s, 1) for label, s in critical_path.items() if s > 0.05} == path
    explanation = explain(problem, plan, spans, critical_path)
    assert (
        f"A step of chain, 1 item through 2 stages, ends every {seconds(timeline.step_s)}" in explanation.sentences[0]
    )
    rows = [line for line in explanation_text(explanation).splitlines() if line.startswith("  actor ")]
    assert f"{seconds_each['actor'] / step_s:.0%}" in rows[0]


def test_of_drawn_steps_the_one_nearest_to_their_mean_is_told():
    problem = read_problem(EXAMPLES / "laptop.json")
    explanation = explain_problem(problem, num_draws=5)
    ends_s = simulate(problem, explanation.plan, seed=0, num_steps=5).step_end_s
    lengths_s = np.diff(ends_s, prepend=0.0)
    assert explanation.step_s == pytest.approx(lengths_s.mean())
    nearest = min(lengths_s, key=lambda length_s: abs(length_s - lengths_s.mean()))
    assert explanation.spans.length_s == pytest.approx(nearest) and explanation.spans.start_s.min() >= 0
    assert sum(part.share for part in explanation.path) == pytest.approx(1)
    assert "mean of 5 steps with drawn costs" in explanation.notes[0]


# -- the whole -------------------------------------------------------------------------------------------------------


def test_an_explanation_tells_path_modes_use_and_memory(problem: Problem, plan: Plan):
    explanation = explain(problem, plan, STEP, PATH)
    assert [(part.label, part.share) for part in explanation.path][:2] == [("rollout", 0.6), ("actor", 0.25)]
    assert [(row.mode, row.step_s, row.is_chosen) for row in explanation.modes] == [
        ("collocated", 10.0, True),
        ("disaggregated", 12.5, False),
    ]
    (use,) = explanation.groups
    assert {label: round(share, 9) for label, share in use.busy_share.items()} == {
        "rollout": 0.4,
        "actor": 0.2,
        "switch": 0.05,
        "sync": 0.05,
    }
    words = " ".join(explanation.sentences)
    assert "rollout and actor take turns on the same devices" in words
    assert "rollout (60%), actor (25%), weight sync (10%) and moving state (5%)." in words
    use = "they compute 35% to 85% of the time, moving state takes 5% and weight syncs take 10%."
    assert f"The busiest are devices 0-1: {use} On average 60% of the devices compute" in words  # what helps: not asked
    assert "12.5 s, 25.0% more: actor waits 3.1 s for rollout's longest answers." in words
    assert "close call" not in words


def test_a_runner_up_that_is_close_is_told(problem: Problem, plan: Plan):
    assert plan.prediction is not None
    close = replace(plan.prediction, runners_up=(RunnerUp(mode="hybrid", step_s=10.2, reason=""),))
    words = explain(problem, replace(plan, prediction=close), STEP, PATH).sentences
    assert words[-2:] == [
        "The best hybrid plan would take 10.2 s, 2.0% more.",
        "That is a close call; measure both before a long run.",
    ]


def test_a_hand_over_beyond_the_measured_range_is_noted(problem: Problem, plan: Plan):
    assert explain(problem, plan, STEP, PATH).notes == ()
    (note,) = explain(replace(problem, num_items=17), plan, STEP, PATH).notes[:1]
    assert note.startswith("profiles.stages.rollout: the plan gives an instance 9 items at once, more than the 8 of")


def test_items_at_a_time_are_what_is_handed_over(problem: Problem, plan: Plan):
    """16 items on two ranks that begin when all are there."""
    rows = explanation_text(explain(problem, plan, STEP, PATH)).splitlines()
    (rollout,) = [row.split() for row in rows if row.startswith("  rollout  0-1")]
    assert rollout[:4] == ["rollout", "0-1", "2", "8"]


def test_a_host_stage_has_as_many_processes_as_its_profile_says_and_a_limit_is_named():
    """0: no limit."""
    for most, expected, named in ((0, 16, False), (3, 3, True)):
        env = replace(profile(1.0, num_devices=0), max_instances=most)
        explanation = explain_problem(chain({"reward": env, "actor": profile(0.1)}, gpus(1)))
        assert explanation.plan.stage("reward").num_ranks == expected
        limit = "reward has as many host processes as its profile allows, profiles.stages.reward.max_instances=3."
        assert (limit in explanation.sentences) == named
        busiest = next(text for text in explanation.sentences if text.startswith("The busiest "))
        assert busiest.startswith("The busiest are the 3 host processes of reward: they compute ") == named
        helps = next(text for text in explanation.sentences if text.startswith("With this plan"))
        assert ("off the time of reward helps most" in helps) == named


def test_a_host_stage_that_has_as_many_processes_as_there_are_cores_says_so():
    """Of 16 that it may have."""
    env = replace(profile(1.0, num_devices=0), max_instances=16)
    problem = chain({"reward": env, "actor": profile(0.1)}, replace(gpus(1), cpu_cores=4))
    explanation = explain_problem(problem)
    assert explanation.plan.stage("reward").num_ranks == 4
    assert "reward has as many host processes as its node has cores for, cluster.cpu_cores=4." in explanation.sentences


def test_cores_that_all_stages_share_are_the_busiest():
    """A check takes 1 s of a core, rollout and actor 0.5 s each of slots that are on the same two cores."""
    stages = {"rollout": profile(0.5), "reward": profile(1.0, num_devices=0), "actor": profile(0.5)}
    slots = replace(Cluster.cpu_slots(2, 1 << 40), cpu_cores=2)
    explanation = explain_problem(chain(stages, slots))
    (busiest,) = [text for text in explanation.sentences if text.startswith("The busiest are")]
    assert busiest == "The busiest are the 2 cores: they compute 100% of the time."
    assert any("off the time of reward helps most" in text for text in explanation.sentences)
    shares = core_shares(explanation.problem, explanation.plan, explanation.spans)[0]
    step_s, num_items = explanation.spans.step_s, explanation.problem.num_items
    for stage, item_s in (("rollout", 0.5), ("reward", 1.0), ("actor", 0.5)):
        assert shares[stage] == pytest.approx(num_items * item_s / (2 * step_s))


def test_text_and_json_say_the_same(problem: Problem, plan: Plan):
    gains = [Gain(label="actor", share=0.04)]
    explanation = explain(problem, plan, STEP, PATH, what_if(problem, plan, lambda *_: plan), gains)
    text = explanation_text(explanation)
    assert max(map(len, text.splitlines())) <= 110
    assert text.splitlines()[-1].split() == ["no", "offload", "10", "s", "2", "makes", "no", "difference"]
    tree = json.loads(explanation.to_json())
    assert tree["sentences"] == explanation.sentences
    assert Plan.from_json(json.dumps(tree["plan"])) == plan
    assert tree["critical_path"][0] == {"label": "rollout", "seconds": 6.0, "share": 0.6}
    assert tree["gains"] == [{"label": "actor", "share": 0.04}]
    assert tree["memory"][0]["used_bytes"] == 600_000_000
    assert [answer["question"] for answer in tree["what_if"]] == [
        "twice the rollout devices",
        "twice the devices",
        "twice the items a step",
        "staleness 1",
        "staleness 2",
        "staleness 4",
        "30 % longer answers",
        "no offload",
    ]


def test_the_trace_has_every_span_in_microseconds_and_counters_that_add_up(problem: Problem, plan: Plan):
    events = json.loads(trace_json(STEP, plan, problem.flow))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans][:2] == [
        ("rollout", 0, 0.0, 6e6),
        ("rollout", 1, 0.0, 2e6),
    ]
    assert {e["name"]: e["cat"] for e in spans} == {
        "rollout": "stage",
        "actor: onload": "lease",
        "actor": "stage",
        "actor: step": "stage",
        "actor: sync": "sync",
    }
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {f"{worker}/{rank}, device {rank}" for worker in ("rollout", "actor") for rank in (0, 1)}
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert sum(values["rollout"] for values in counters) / len(counters) == pytest.approx(0.8, rel=0.01)


def test_the_term_that_lost_is_what_the_other_path_has_most_more_of():
    assert lost_term({"rollout": 50.0, "actor": 30.0}, {"rollout": 62.5, "actor": 20.0, "weight sync": 2.0}) == (
        "12.5 s more of rollout on its critical path (62.5 s)"
    )
    assert lost_term({"rollout": 50.0}, {"rollout": 50.0}) == ""


# -- what if -----------------------------------------------------------------------------------------------------------


def test_questions_change_what_they_say(problem: Problem, plan: Plan):
    by_question = {change.question: change.problem for change in changes(problem, plan)}
    for change in by_question.values():
        change.validate()
    assert by_question["twice the rollout devices"].pinned_devices == {"rollout": 4}
    assert by_question["twice the rollout devices"].cluster.num_devices == 4
    assert by_question["twice the devices"].cluster.num_devices == 4
    longer = by_question["30 % longer answers"].profile("actor").instances[0]
    assert [point.seconds for point in longer.points] == pytest.approx([0.26, 2.08])
    assert not by_question["no offload"].allow_offload
    assert by_question["twice the items a step"].num_items == 2 * problem.num_items
    assert by_question["staleness 1"].flow.max_staleness == 1


def test_another_network_and_another_gpu_are_asked_about():
    problem = grpo()  # on H100s
    changed = {
        one.question: one.problem
        for one in changes(problem, plan_for_mode(problem.flow, problem.cluster, "collocated"))
    }
    assert changed["twice the network"].cluster.links.network_bytes_per_s == 100e9
    other = changed["H200 in place of NVIDIA H100 SXM"]
    other.validate()
    assert {device.memory_bytes for device in other.cluster.devices} == {141 * 10**9}
    for stage, rates in {"rollout": (3.35, 4.8), "actor": (989, 989)}.items():
        now, then = (one.profile(stage).instances[0].points[0].seconds for one in (problem, other))
        assert then == pytest.approx(now * rates[0] / rates[1])


def test_longer_episodes_are_more_rounds_and_larger_trajectories(embodied: Problem):
    plan = plan_for_mode(embodied.flow, embodied.cluster, "collocated")
    by_question = {change.question: change.problem for change in changes(embodied, plan)}
    longer = by_question["30 % longer episodes"]
    longer.validate()
    assert longer.profile("env").rounds == 104
    assert longer.profile("env").instances == embodied.profile("env").instances
    assert longer.profile("actor").instances[0].points[0].seconds == pytest.approx(1.43)
    assert longer.flow.item_bytes == {"observations": 600_000, "actions": 1_000, "trajectories": 65_000_000}


def test_more_devices_are_on_new_nodes():
    cluster = grown(Cluster.cuda_nodes(2, 4, name="x", memory_bytes=5), 6)
    assert [device.node for device in cluster.devices] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    assert {device.name for device in cluster.devices} == {"x"}


def test_answers_compare_with_the_plan_and_tell_what_does_not_fit(problem: Problem, plan: Plan):
    def planner(changed: Problem, modes: Sequence[Mode] | None) -> Plan:
        assert modes == (("disaggregated",) if changed.flow.max_staleness else None)
        if not changed.allow_offload:
            raise InfeasibleError("actor does not fit")
        step_s = {2: 13.0, 4: 5.0}[changed.cluster.num_devices]
        assert plan.prediction is not None
        return replace(plan, mode="hybrid", prediction=replace(plan.prediction, step_s=step_s))

    answers = what_if(problem, plan, planner)
    assert [(answer.step_s, answer.text) for answer in answers] == [
        (5.0, "2.00 times as fast; hybrid in place of collocated"),
        (5.0, "2.00 times as fast; hybrid in place of collocated"),
        (13.0, "1.54 times as fast; hybrid in place of collocated"),  # twice the items
        *[(13.0, "30% slower; hybrid in place of collocated")] * 4,  # staleness 1, 2 and 4, longer answers
        (None, "actor does not fit"),
    ]


def test_quantities():
    assert [seconds(value) for value in (64.4e-6, 0.0853, 2.414, 100.4, 252, 7500)] == [
        "64.4 us",
        "85.3 ms",
        "2.41 s",
        "100 s",
        "4 min 12 s",
        "2 h 05 min",
    ]
    assert gib(3 << 29) == "1.5 GiB"
    assert [listed(list("abc")[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_nothing_is_asked_that_no_problem_may_have(problem: Problem, plan: Plan):
    """As many items as there may be, the bound that it has, and steps that overlap on one device."""
    flow = replace(problem.flow, max_staleness=2)
    full = replace(problem, flow=flow, num_items=10_000_000)
    texts = {one.question for one in what_if(full, plan, lambda *_: plan)}
    assert not texts & {"twice the items a step", "staleness 2"}
    assert texts > {"staleness 0", "staleness 1", "staleness 4"}
    alone = replace(full, cluster=Cluster.cpu_slots(1, 1 << 40))
    assert not {one.question for one in changes(alone, plan)} & {"staleness 1", "staleness 4"}


def test_another_split_of_the_devices_is_asked_about_where_training_has_its_own():
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(4))
    apart = plan_for_mode(problem.flow, problem.cluster, "disaggregated")
    variants = {one.question: one for one in changes(problem, apart)}
    for question, num_devices in (("a rollout device more", 3), ("a rollout device less", 1)):
        assert variants[question].problem.pinned_devices == {"rollout": num_devices}
        assert variants[question].modes == ("disaggregated",)
    assert variants["one more device"].problem.cluster.num_devices == 5
    together = plan_for_mode(problem.flow, problem.cluster, "collocated")
    questions = {one.question for one in changes(problem, together)}
    assert not questions & {"a rollout device more", "a rollout device less", "one more device"}


def test_answers_on_more_staleness_are_those_of_the_planner():
    """Rollout and training take equally long, so that steps that overlap take half of the time."""
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(2))
    explanation = explain_problem(problem, modes=["disaggregated"], asks_what_if=True)
    answers = {one.question: one.step_s for one in explanation.answers}
    for ahead in (1, 2):
        planned = make_plan(problem.with_staleness(ahead), ["disaggregated"]).prediction
        assert planned is not None and answers[f"staleness {ahead}"] == planned.step_s
    assert answers["staleness 1"] == pytest.approx(16.0, rel=0.1)
