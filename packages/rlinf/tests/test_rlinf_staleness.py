"""Steps that overlap: which ones begin when, and what is refused before anything starts."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.embodied.job import EmbodiedJob
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.deadlines import Deadlines
from rlinf.loop.pauses import next_pause
from rlinf.loop.session import Session
from rlinf.machine import Machine
from rlinf.planning.plans import make_plans
from rlinf.program.recipe import make_workers
from rlinf.run_folder.record import RecordedStep, RunRecord

JOBS: dict[str, Any] = {"sort-grpo": ReasoningJob, "env-ppo": EmbodiedJob}
MACHINE = Machine(num_cpus=3, memory_bytes=1 << 34, gpus=())


class WatchedExecutor:
    """Counts the runs under way; each ends when it is waited for."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[str] = []
        self.num_under_way = 0

    def begin(self, flow: Any, *, context: Any, feeds: Any, **recording: Any) -> None:
        self.num_under_way += 1
        self.events.append(f"begin {context.step}")

    def steps_ahead(self, flow: Any) -> int:
        return flow.max_staleness

    def finish(self, timeout_s: float) -> Any:
        self.num_under_way -= 1
        self.events.append("finish")
        return SimpleNamespace(duration_s=1.0, spans=[], decisions={})


def events(max_staleness: int, steps: range, until: int, record: RunRecord | None = None) -> list[str]:
    """The calls of a session to its executor during these steps."""
    unchecked: Any = SimpleNamespace
    executor: Any = WatchedExecutor()
    job = unchecked(config=unchecked(seed=0), feeds=lambda step: {"prompts": [step]})
    flows = unchecked(train=unchecked(name="grpo", max_staleness=max_staleness))
    folder, progress = unchecked(trace=lambda events: None), unchecked(doing=lambda what: nullcontext(), total=9)
    session = Session(job, flows, executor, folder, progress, Deadlines(None), record)
    for step in steps:
        session.train(step, predicted_s=None, until=until)
    assert session.num_ahead == 0
    return executor.events


def test_steps_begin_as_early_as_the_bound_and_the_next_pause_allow():
    assert events(0, range(3), 3) == ["begin 0", "finish", "begin 1", "finish", "begin 2", "finish"]
    assert events(1, range(3), 3) == ["begin 0", "begin 1", "finish", "begin 2", "finish", "finish"]
    assert events(8, range(4, 6), 6) == ["begin 4", "begin 5", "finish", "finish"]


def test_recorded_steps_begin_when_the_record_says(tmp_path):
    record = RunRecord(tmp_path)
    for step, begun_after in enumerate((0, 0, 1, 3)):
        record.add(step, RecordedStep(begun_after=begun_after, decisions={}))
    replay = RunRecord(tmp_path, must_match=True)
    expected = ["begin 0", "begin 1", "finish", "begin 2", "finish", "finish", "begin 3", "finish"]
    assert events(3, range(4), 4, replay) == expected
    assert replay.num_equal == 4


def test_one_step_of_staleness_is_generation_ahead_and_the_rest_is_for_late_groups():
    line = "--rollout.sampler as_finished --rollout.engine_options.refill true --rollout.num_prompts 10"
    for staleness, expected in ((2, (1, 1, 5)), (3, (1, 2, 10)), (8, (1, 7, 35))):
        config: Any = load_config("sort-grpo", parse_overrides(f"{line} --algorithm.max_staleness {staleness}".split()))
        assert (config.steps_ahead, config.max_lateness, config.num_late_groups) == expected
    in_order: Any = load_config("sort-grpo", parse_overrides(["--algorithm.max_staleness", "3"]))
    assert (in_order.steps_ahead, in_order.max_lateness, in_order.num_late_groups) == (3, 0, 0)


def run_config(line: str) -> Any:
    return load_config("sort-grpo", parse_overrides(line.split())).run


def test_steps_pause_for_evaluations_checkpoints_and_profiles():
    run = run_config("--run.num_steps 23 --run.evaluate_every 10 --run.checkpoint_every 4 --run.profile_steps 6-7")
    assert [next_pause(run, step) for step in (0, 4, 5, 6, 7, 8, 9, 20, 21)] == [4, 5, 7, 7, 8, 10, 10, 23, 23]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--algorithm.max_staleness 9", "algorithm.max_staleness=9 must be between 0 and 8"),
        ("--algorithm.max_staleness -1", "algorithm.max_staleness=-1 must be between 0 and 8"),
        (
            "--algorithm.max_staleness 1 --mode disaggregated --algorithm.name otb",
            "algorithm.max_staleness=1: advantage=otb reads the probabilities of the policy that sampled",
        ),
        (
            "--algorithm.max_staleness 1 --mode disaggregated --reference.sync_every 5 --algorithm.kl_coef 0.1",
            "reference.sync_every=5 changes the reference between steps",
        ),
        (
            "--algorithm.max_staleness 1 --rollout.sampler as_finished --rollout.engine_options.refill true",
            "rollout.sampler=as_finished: with algorithm.max_staleness=1 no group may be late",
        ),
        (
            "--algorithm.max_staleness 2 --rollout.sampler as_finished",
            "rollout.sampler=as_finished is not possible with rollout.engine=huggingface: without continuous batching",
        ),
        (
            "--rollout.on_new_weights keep --rollout.engine_options.refill true",
            "rollout.on_new_weights=keep: with algorithm.max_staleness=0 no weights arrive while completions run; use "
            "finish, or max_staleness 1 or more",
        ),
        (
            "--algorithm.max_staleness 1 --rollout.on_new_weights recompute --rollout.engine_options.refill true "
            "--plan.num_ranks_per_replica.rollout 2",
            "rollout.on_new_weights=recompute is for replicas of one rank",
        ),
    ],
)
def test_what_cannot_overlap_is_refused(line: str, expected: str):
    with pytest.raises(UserError) as caught:
        load_config("sort-grpo", parse_overrides([*line.split(), "--cluster.num_devices", "2"]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--algorithm.max_staleness 9", "algorithm.max_staleness=9 must be between 0 and 8"),
        (
            "--algorithm.max_staleness 1 --algorithm.policy_loss policy_gradient --algorithm.correction null "
            "--algorithm.target_kl null",
            "algorithm.max_staleness=1: policy_loss=policy_gradient has no ratio to the weights that sampled",
        ),
    ],
)
def test_robots_learn_from_older_weights_by_a_ratio_alone(line: str, expected: str):
    with pytest.raises(UserError) as caught:
        load_config("env-ppo", parse_overrides([*line.split(), "--mode", "disaggregated"]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("collocated", r"the two share devices \[0, 1\]"),
        ("hybrid", r"the two share devices \[0"),
    ],
)
@pytest.mark.parametrize(("recipe", "make"), JOBS.items())
def test_a_plan_without_devices_for_both_sides_is_refused(tmp_path, recipe, make, mode: str, expected: str):
    line = f"--algorithm.max_staleness 1 --mode {mode} --cluster.num_devices 2"
    job = make(load_config(recipe, parse_overrides(line.split())), MACHINE)
    with pytest.raises(UserError, match=expected):
        make_plans(job, job.build(tmp_path), tmp_path)


def test_a_hybrid_plan_with_the_actor_on_a_device_of_its_own_overlaps(tmp_path):
    devices = "{env: [0, 1], policy: [0, 1], actor: [2]}"
    line = ["--algorithm.max_staleness", "1", "--mode", "hybrid", "--cluster.num_devices", "3"]
    config: Any = load_config("env-ppo", parse_overrides([*line, "--plan.devices", devices]))
    job = EmbodiedJob(config, MACHINE)
    flows = job.build(tmp_path)
    assert make_plans(job, flows, tmp_path).plans[flows.train.name].stage("actor").devices == (2,)


@pytest.mark.parametrize("recipe", JOBS)
def test_one_process_runs_step_by_step(tmp_path, recipe):
    config = load_config(recipe, parse_overrides(["--algorithm.max_staleness", "1", "--mode", "disaggregated"]))
    with pytest.raises(UserError, match=r"max_staleness=1: steps in one process do not overlap"):
        make_workers(config, tmp_path)
