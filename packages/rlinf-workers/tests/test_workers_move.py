"""Plans that change between runs: other processes take the place of the groups that they move, the others stay, and no
number depends on it."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from rlinf_sched import Cluster, Mode, Plan, plan_for_mode
from rlinf_workers import Executor, Flow, FlowDefinitionError, LocalLauncher, StepContext, WorkerLost
from rlinf_workers.testing.toy_flow import Learn, Number, Scale, Shift, reference_run

pytestmark = pytest.mark.usefixtures("forked_workers")

NUMBERS = [Number(index=i, value=float(i)) for i in range(17)]  # with their mean of 8 all weights are exact
CLUSTER = Cluster.cpu_slots(2)
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")


class LoadedLearn(Learn):
    """A trainer whose weight can be set, as by a checkpoint."""

    def set_weight(self, weight: float) -> None:
        self._weight.fill_(weight)
        self._version += 1


def toy_flow() -> Flow:
    flow = Flow("toy")
    flow.worker("scale", Scale)
    flow.worker("shift", Shift)
    flow.worker("learn", LoadedLearn)
    flow.stage("scale", Scale.scale, reads="numbers", writes="scaled")
    flow.stage("shift", Shift.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    return flow


def run(executor: Executor, flow: Flow, step: int) -> float:
    context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
    done = executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=60.0)
    return done.metrics["learn/weight"]


def processes(executor: Executor) -> dict[str, list[int]]:
    """Worker group -> ids of its processes."""
    return {name: [pid for _, pid, _ in executor.group(name).call("process")] for name in ("scale", "shift", "learn")}


def drawn_plan(flow: Flow, chance: random.Random) -> Plan:
    ranks = {name: chance.choice([1, 2]) for name in ("scale", "learn")}
    mode = chance.choice(MODES)
    num_ranks = ranks if mode == "collocated" else {}
    granularity = {"scale": chance.choice([1, 4, 17])}
    return plan_for_mode(flow.graph(), CLUSTER, mode, num_ranks=num_ranks, granularity=granularity)


def run_from_the_start(executor: Executor, flow: Flow, step: int) -> float:
    executor.group("learn").call("set_weight", 1.0)
    executor.sync_weights()
    return run(executor, flow, step)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("num_moves", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_any_plan_may_follow_any_other(tmp_path, num_moves):
    """Whether its workers start before the move, with steps in between, or during it, and whoever is killed."""
    flow, chance = toy_flow(), random.Random(0)
    (expected,) = reference_run([number.value for number in NUMBERS], 1)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        plan = plan_for_mode(flow.graph(), CLUSTER, "collocated")
        executor.start(flow, plan)
        num_learn_moves = 0
        for step in range(num_moves + 1):
            assert run_from_the_start(executor, flow, step) == expected
            if step % 3 == 2:
                victim = chance.choice([pid for ids in processes(executor).values() for pid in ids])
                os.kill(victim, signal.SIGKILL)
                with pytest.raises(WorkerLost):
                    run_from_the_start(executor, flow, step)
                executor.repair()
            before, plan = processes(executor), drawn_plan(flow, chance)
            ahead = executor.start_ahead({"toy": plan}) if chance.random() < 0.7 else {}
            ids = {name: [handle.call("process") for handle in group.handles] for name, group in ahead.items()}
            if chance.random() < 0.5:
                assert run_from_the_start(executor, flow, step) == expected
            moved = executor.move({"toy": plan})
            assert set(ahead) in (moved, set())
            after = processes(executor)
            for name, started in ids.items():
                assert after[name] == [process.result()[1] for process in started]
            for name in after:
                assert len(after[name]) == plan.stage(name).num_ranks
                assert (after[name] == before[name]) is (name not in moved), (
                    f"{name} is new if and only if it has moved"
                )
            assert "shift" not in moved, "it needs no device"
            num_learn_moves += "learn" in moved
        assert 0 < num_learn_moves < num_moves, "the trainer moved and stayed"


def test_workers_are_ahead_until_they_replace_others_or_one_is_lost(tmp_path):
    flow = toy_flow()
    (expected,) = reference_run([number.value for number in NUMBERS], 1)
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated"))
        assert run_from_the_start(executor, flow, 0) == expected
        before, apart = processes(executor), plan_for_mode(flow.graph(), CLUSTER, "disaggregated")
        ahead = executor.start_ahead({"toy": apart})
        assert set(ahead) == {"scale", "learn"}
        wait_until(lambda: executor.is_ahead)
        [(_, victim, _)] = ahead["scale"].call("process")
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: ahead["scale"].handles[0].is_lost)
        with pytest.raises(WorkerLost, match="scale/0"):
            run_from_the_start(executor, flow, 0)
        executor.repair()
        assert processes(executor) == before, "they were not lost"
        assert executor.move({"toy": apart}) == {"scale", "learn"}
        assert processes(executor)["scale"] != [victim]
        assert run_from_the_start(executor, flow, 1) == expected


def test_what_stays_keeps_its_state(tmp_path):
    flow = toy_flow()
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "collocated", num_ranks={"scale": 2, "learn": 1}))
        executor.sync_weights()
        expected = reference_run([number.value for number in NUMBERS], 2)
        assert run(executor, flow, 0) == expected[0]
        one_rank = plan_for_mode(flow.graph(), CLUSTER, "collocated", num_ranks={"scale": 1, "learn": 1})
        assert executor.move({"toy": one_rank}) == {"scale"}
        executor.sync_weights()
        assert run(executor, flow, 1) == expected[1]


def test_a_plan_that_moves_nothing_needs_no_sync(tmp_path):
    flow = toy_flow()
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), CLUSTER, "disaggregated", granularity={"scale": 1}))
        executor.sync_weights()
        expected = reference_run([number.value for number in NUMBERS], 2)
        assert run(executor, flow, 0) == expected[0]
        whole = plan_for_mode(flow.graph(), CLUSTER, "disaggregated", granularity={"scale": 17})
        assert executor.move({"toy": whole}) == set()
        assert run(executor, flow, 1) == expected[1]


def test_a_plan_that_does_not_fit_changes_nothing(tmp_path):
    flow, other = toy_flow(), toy_flow()
    other.name = "other"
    plan, same = (plan_for_mode(each.graph(), CLUSTER, "collocated") for each in (flow, other))
    apart = plan_for_mode(other.graph(), CLUSTER, "disaggregated")
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(), log_folder=tmp_path) as executor:
        executor.start(flow, plan)
        executor.start(other, same)
        before = processes(executor)
        with pytest.raises(FlowDefinitionError, match="worker 'scale' runs on"):
            executor.move({"toy": plan, "other": apart})
        assert processes(executor) == before
