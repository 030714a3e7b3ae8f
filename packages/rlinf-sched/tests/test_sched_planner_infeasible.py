"""Where nothing fits, the planner says which stage, by how much, and a remedy that works."""

import re
from dataclasses import replace

import pytest
from sched_planner_problems import GIB, chain, gpus, profile

from rlinf_sched import InfeasibleError, Problem, ProblemError, Profiles, WeightEdge
from rlinf_sched.planner import best_plan

pytestmark = pytest.mark.usefixtures("brief_search")


def test_a_stage_that_is_too_large_is_named_with_its_figures():
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0, state_bytes=100 * GIB)}, gpus(4))
    with pytest.raises(InfeasibleError, match=r"^actor needs at least 100\.0 GiB .* 80\.0 GiB: 20\.0 GiB too little"):
        best_plan(problem)


def test_the_devices_that_a_sharded_stage_is_said_to_need_are_enough_and_one_less_is_not():
    actor = profile(1.0, work_bytes=20 * GIB, sharded_state_bytes=400 * GIB)
    profiles = {"rollout": profile(1.0), "actor": actor}
    with pytest.raises(InfeasibleError, match=r"actor needs at least 120\.0 GiB.*40\.0 GiB too little") as raised:
        best_plan(chain(profiles, gpus(4)))
    match = re.search(r"would fit on (\d+) devices", str(raised.value))
    assert match
    enough = int(match[1])
    assert best_plan(chain(profiles, gpus(enough))).prediction is not None
    with pytest.raises(InfeasibleError):
        best_plan(chain(profiles, gpus(enough - 1)))


def test_more_devices_are_not_promised_where_they_would_not_help():
    actor = profile(1.0, state_bytes=85 * GIB, sharded_state_bytes=8 * GIB)
    with pytest.raises(InfeasibleError, match="more of them would not help enough"):
        best_plan(chain({"rollout": profile(1.0), "actor": actor}, gpus(4)))


def test_stages_that_do_not_fit_together_may_be_told_to_offload():
    profiles = {"rollout": profile(1.0, state_bytes=50 * GIB), "actor": profile(1.0, state_bytes=50 * GIB)}
    problem = chain(profiles, gpus(1), allow_offload=False)
    with pytest.raises(InfeasibleError, match=r"each stage fits alone.*allow offload") as raised:
        best_plan(problem)
    need, lacking = map(float, re.findall(r"([\d.]+) GiB", str(raised.value))[::2])
    assert need == pytest.approx(100, rel=0.02)
    assert lacking == pytest.approx(20, abs=2)
    assert best_plan(replace(problem, allow_offload=True)).prediction is not None


def test_no_parallel_choice_that_the_cluster_holds():
    wide = profile(1.0, num_devices=8)
    with pytest.raises(InfeasibleError, match=r"actor: no parallel choice fits: .*spans 8 devices; the cluster has 4"):
        best_plan(chain({"rollout": profile(1.0), "actor": wide}, gpus(4)))


def test_a_pin_that_is_no_multiple_of_an_instance():
    problem = chain(
        {"rollout": profile(1.0, num_devices=2), "actor": profile(1.0)}, gpus(4), pinned_devices={"rollout": 3}
    )
    with pytest.raises(InfeasibleError, match=r"rollout: no parallel choice fits: .*pinned_devices=3"):
        best_plan(problem)


def test_devices_per_rank_that_no_parallel_choice_has():
    problem = with_span(chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(4)), "actor", 8)
    with pytest.raises(ProblemError) as raised:
        best_plan(problem)
    assert str(raised.value) == (
        "flow.stages.actor.devices_per_rank=8, but profiles.stages.actor.instances have num_devices 1; use 1, or 0 for "
        "any of them"
    )


def test_devices_per_rank_that_the_cluster_does_not_hold():
    one, wide = profile(1.0), profile(1.0, num_devices=8)
    actor = replace(one, instances=one.instances + wide.instances)
    problem = with_span(chain({"rollout": profile(1.0), "actor": actor}, gpus(4)), "actor", 8)
    with pytest.raises(InfeasibleError, match=r"an instance of actor spans 8 devices, devices_per_rank=8; the cluster"):
        best_plan(problem)


def with_span(problem: Problem, name: str, span: int) -> Problem:
    """The problem with a stage whose ranks compute on so many devices each."""
    stages = (replace(s, devices_per_rank=span) if s.name == name else s for s in problem.flow.stages)
    return replace(problem, flow=replace(problem.flow, stages=tuple(stages)))


def test_more_pinned_devices_than_there_are():
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(4), pinned_devices={"actor": 5})
    with pytest.raises(ProblemError, match=r"pinned_devices\.actor=5: the cluster has 4 devices"):
        best_plan(problem)


def test_pins_that_together_exceed_the_cluster_leave_no_disaggregated_plan():
    profiles = {"rollout": profile(1.0), "actor": profile(1.0)}
    problem = chain(profiles, gpus(4), pinned_devices={"rollout": 3, "actor": 2})
    with pytest.raises(InfeasibleError, match=r"no plan of mode disaggregated exists .*; allow others"):
        best_plan(problem, modes=("disaggregated",))
    assert best_plan(problem).mode == "hybrid"


def test_disaggregated_needs_two_devices():
    with pytest.raises(InfeasibleError, match="disaggregated needs at least 2 devices"):
        best_plan(chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(1)), modes=("disaggregated",))


def test_a_stage_without_a_profile_is_named():
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0)}, gpus(2))
    missing = Profiles(stages={"rollout": profile(1.0)})
    with pytest.raises(ProblemError, match="actor"):
        best_plan(replace(problem, profiles=missing))


def with_versions(problem: Problem, max_staleness: int) -> Problem:
    """The problem with 20 GiB for each published version that the trainer keeps."""
    edges = (WeightEdge(source="actor", target="rollout", kept_bytes=20 * GIB),)
    return replace(problem, flow=replace(problem.flow, weight_edges=edges, max_staleness=max_staleness))


def test_versions_that_wait_take_memory_of_the_devices_that_train():
    """k + 1 of them, which offload does not move; none are counted where steps do not overlap."""
    problem = chain({"rollout": profile(1.0), "actor": profile(1.0, state_bytes=10 * GIB)}, gpus(4))
    (instance,) = problem.profile("actor").instances
    for max_staleness, expected in ((0, 10), (1, 10 + 20), (3, 10 + 40)):
        overlapping = with_versions(problem, max_staleness)
        assert overlapping.state_bytes("actor", instance, 2) == expected * GIB
        assert overlapping.state_bytes("rollout", instance, 2) == 0
        assert overlapping.switch_s("actor", instance, 2) == problem.switch_s("actor", instance, 2)


def test_a_plan_gives_the_trainer_devices_for_all_versions():
    """Five versions take 100 GiB, so one device of 80 GiB is not enough."""
    problem = chain({"rollout": profile(4.0), "actor": profile(0.1)}, gpus(4))
    plan = best_plan(with_versions(problem, 4), ["disaggregated"])
    assert len(plan.stage("actor").devices) == 2
    assert len(best_plan(with_versions(problem, 1), ["disaggregated"]).stage("actor").devices) == 1
    with pytest.raises(InfeasibleError):
        best_plan(with_versions(chain({"rollout": profile(4.0), "actor": profile(0.1)}, gpus(1)), 4))
