"""Whether new workers may start beside the old ones is a question of memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.base import Flows
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.moving import begin_move
from rlinf.machine import Machine
from rlinf.planning.plans import RunPlans, plans_by_rule
from rlinf.planning.side_by_side import MemoryForBoth, memory_for_both
from rlinf_sched import Cluster, InstanceProfile, Plan, Problem, Profiles, StageProfile, TimePoint

GIB = 1 << 30
LARGE = 64 * GIB


def job_with(memory_bytes: int) -> ReasoningJob:
    config = load_config("sort-grpo", parse_overrides(["--cluster.num_devices", "2"]))
    return ReasoningJob(config, Machine(num_cpus=8, memory_bytes=memory_bytes))  # pyright: ignore[reportArgumentType]


def plans_of(job: ReasoningJob, cluster: Cluster | None = None) -> tuple[Plan, RunPlans]:
    """The plan of a run that begins together, and those under which it goes on apart."""
    flows = job.build(Path("none"))
    together, apart = (plans_by_rule(job, flows, mode) for mode in ("collocated", "disaggregated"))
    return together.plans["grpo"], replace(apart, problem=problem_of(flows, cluster or apart.cluster))


def problem_of(flows: Flows, cluster: Cluster) -> Problem:
    """Every process has 1 GiB, and 1 GiB more while it works."""
    points = (TimePoint(num_items=1, seconds=1.0),)
    stages = {
        stage.name: StageProfile(
            instances=(
                InstanceProfile(
                    num_devices=int(stage.needs_device), points=points, state_bytes=GIB, work_bytes=GIB, num_ranks=1
                ),
            )
        )
        for stage in flows.train.graph().stages
    }
    return Problem(flow=flows.train.graph(), profiles=Profiles(stages=stages), cluster=cluster, num_items=64)


def test_the_memory_of_both_plans_is_counted_as_that_of_each():
    job = job_with(LARGE)
    before, planned = plans_of(job)
    assert job.memory is not None
    both = job.memory.place_beside(before, planned.plans["grpo"], {"rollout", "actor"})
    each = [job.memory.fullest_place(plan).needed_bytes for plan in (before, planned.plans["grpo"])]
    assert both is not None and both.needed_bytes == sum(each)
    assert memory_for_both(job, before, planned).is_enough
    smaller = memory_for_both(job_with(sum(each) - 1), before, planned)
    assert not smaller.is_enough
    assert smaller.text.startswith("old and new processes need ")


def other_job(memory_bytes: int) -> Any:
    """A job whose memory nothing predicts."""
    return SimpleNamespace(memory=None, machine=SimpleNamespace(memory_bytes=memory_bytes))


@pytest.mark.parametrize(("memory_bytes", "is_enough"), [(14 * GIB, True), (14 * GIB - 1, False)])
def test_what_was_measured_counts_where_nothing_predicts_it(memory_bytes, is_enough):
    """Together 2 ranks generate, 2 train and one judges; apart a rank generates and another trains: 7 of 2 GiB."""
    before, planned = plans_of(job_with(LARGE))
    expected = MemoryForBoth(
        is_enough=is_enough, text="old and new processes need 14.0 GiB at most; this machine has 14.0"
    )
    assert memory_for_both(other_job(memory_bytes), before, planned) == expected


def test_the_memory_of_gpus_that_nothing_predicts_is_not_risked():
    gpus = Cluster.cuda_nodes(1, 2, name="NVIDIA H100", memory_bytes=80 * GIB)
    before, planned = plans_of(job_with(LARGE), gpus)
    assert memory_for_both(other_job(LARGE), before, planned) == MemoryForBoth(
        is_enough=False, text="the memory of these processes is not counted"
    )


@pytest.mark.parametrize("checkpoint", [None, Path("checkpoint")])
def test_a_trainer_rehearses_with_a_checkpoint_if_there_is_one(checkpoint):
    calls: list[tuple[str, str]] = []
    trainer: Any = SimpleNamespace(start_call=lambda *call: calls.append(call) or [])
    groups = {"rollout": None, "actor": trainer, "actor-second": trainer}
    executor: Any = SimpleNamespace(start_ahead=lambda plans: groups)
    job: Any = SimpleNamespace(
        trainers={"actor": "", "actor-second": "policies/second", "actor-third": "policies/third"}
    )
    planned: Any = SimpleNamespace(plans={})
    upcoming = begin_move(job, executor, planned, MemoryForBoth(is_enough=True, text="both fit"), checkpoint)
    assert upcoming.text == "starts actor, actor-second, rollout elsewhere while steps go on; both fit"
    folders = [] if checkpoint is None else ["checkpoint", "checkpoint/policies/second"]
    assert calls == [("load_checkpoint", folder) for folder in folders]
