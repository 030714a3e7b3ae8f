"""What planning may not do: be worse than one of its modes, leave counts out, go on after Ctrl-C or without end."""

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from sched_planner_problems import GIB, MODES, chain, gpus, ppo, profile

from rlinf_sched import (
    FlowGraph,
    InfeasibleError,
    InstanceProfile,
    ItemCosts,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    TimePoint,
)
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.local_search import LocalSearch
from rlinf_sched.planner.placements import StagePlacement
from rlinf_sched.planner.pools import device_counts, pools_of
from rlinf_sched.planner.search import Search

pytestmark = pytest.mark.usefixtures("each_search")


def small(seed: int) -> Problem:
    """Three stages of unequal items on four devices with little memory."""
    draw = random.Random(seed)
    stages = {
        name: profile(
            draw.choice([0.2, 0.5, 1.0]),
            fixed=draw.choice([0.0, 1.0]),
            batching="sum" if name == "actor" else draw.choice(["sum", "longest", "continuous"]),
            state_bytes=draw.choice([1, 8, 14]) * GIB,
        )
        for name in ("rollout", "score", "actor")
    }
    costs = ItemCosts(spread="lognormal", sigma=0.6)
    stages = {name: replace(stage, costs=costs) for name, stage in stages.items()}
    return chain(stages, gpus(4, gib=24), num_items=12, allow_offload=draw.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_no_mode_alone_is_better_than_all_of_them(seed: int):
    problem = small(seed)
    prediction = best_plan(problem).prediction
    assert prediction is not None
    rows = {one.mode: one.step_s for one in prediction.runners_up}
    for mode in MODES:
        try:
            alone = best_plan(problem, [mode]).prediction
        except InfeasibleError:
            continue
        assert alone is not None
        assert rows.get(mode, prediction.step_s) == alone.step_s >= prediction.step_s


def test_every_count_that_a_profile_lists_is_tried():
    counts = set(device_counts(128, num_items=512, sizes=(512,), most=0, listed=(71, 80, 200)))
    assert {71, 80} <= counts
    assert 200 not in counts
    points = {71: 1.0, 80: 2.0, 128: 2.0}
    instances = tuple(
        InstanceProfile(num_ranks=count, points=(TimePoint(num_items=1, seconds=seconds),))
        for count, seconds in points.items()
    )
    problem = chain({"rollout": StageProfile(instances=instances), "actor": profile(0.01)}, gpus(128), num_items=71)
    assert best_plan(problem).stage("rollout").num_ranks == 71


@pytest.mark.parametrize("num_devices", [3, 6])
def test_shares_of_a_cycle_may_be_uneven(num_devices: int):
    """40 environments, which 3 devices do not divide: a third of them each is better than half of them on two."""
    stages = {"env": profile(0.5, rounds=4), "policy": profile(0.5, rounds=4)}
    problem = chain(stages, gpus(num_devices), num_items=40)
    flow = problem.flow
    env, policy = flow.stages
    env = replace(env, role="env", reads=("to-env",))
    policy = replace(policy, writes=("to-env",), role="rollout", trains=False)
    problem = replace(problem, flow=replace(flow, stages=(env, policy), feeds=(), weight_edges=()))
    plan = best_plan(problem)
    assert len({device for stage in plan.stages for device in stage.devices}) == num_devices


def test_of_plans_that_take_equally_long_the_one_with_slack_is_kept():
    """Two stages side by side, of which one decides: the other is better off with two devices than with one."""
    stages = tuple(Stage(name=name, worker=name, role="rollout", reads=(f"to-{name}",)) for name in ("slow", "quick"))
    problem = Problem(
        flow=FlowGraph(name="two", stages=stages, feeds=("to-slow", "to-quick")),
        profiles=Profiles(stages={"slow": profile(10.0), "quick": profile(1.0)}),
        cluster=gpus(3),
        num_items=2,
    )
    around = LocalSearch(problem, pools_of(problem.cluster), num_plans=9)
    one, two = (
        (StagePlacement(0b001, 1, 0, False), StagePlacement(devices, devices.bit_count(), 0, False))
        for devices in (0b010, 0b110)
    )
    plans = [around.time(placements, 0.0) for placements in (one, two, one)]
    assert [one.step_s for one in plans if one] == [20.0, 20.0, 20.0]
    assert around.best["disaggregated"].placements == two


def test_the_reason_says_that_the_search_was_bounded(monkeypatch: pytest.MonkeyPatch):
    assert "candidates" not in best_plan(ppo(8, num_items=16)).reason
    monkeypatch.setattr("rlinf_sched.planner.search._PAIRS", 1000)
    problem = ppo(64)
    search = Search(problem, pools_of(problem.cluster))
    for mode in MODES:
        search.best([mode])
    assert search.was_thinned
    assert f"at most {search.most_rows} candidates" in best_plan(problem).reason


def test_ctrl_c_interrupts_within_a_second():
    code = (
        "from rlinf_sched import best_plan\n"
        "from sched_planner_problems import ppo\n"
        "problem = ppo(8192, num_items=2_000_000)\n"
        "print('begins', flush=True)\n"
        "best_plan(problem)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(2)
        assert process.poll() is None, "the search ended before it could be interrupted"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert errors.rstrip().endswith("KeyboardInterrupt")
    finally:
        process.kill()
