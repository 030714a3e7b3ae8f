"""Random plans after random plans, with killed workers, against runs that never move: the same numbers, and no hang.

    python -m benchmarks.failures.random_moves [--transitions 200] [--minutes 60] [--seed 0] [--adds]

A tiny sorting job trains a few steps under each plan that is drawn: its mode, numbers of ranks and granularity. Workers
start in advance or end first, at random; sometimes the move waits for them and sometimes steps go on. Now and then a
running worker or one that has started in advance is killed at a random moment. Every metric of every step and the last
weights have to be those of a run under one plan. A step that takes two minutes counts as a hang.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS_FOLDER, report
from safetensors.torch import load_file

from rlinf import jobs
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.base import Flows, Job
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop import training_loop
from rlinf.loop.moving import UpcomingMove
from rlinf.planning.auto_mode import AutoMode
from rlinf.planning.plans import RunPlans, plans_by_rule
from rlinf.planning.side_by_side import MemoryForBoth
from rlinf.run_folder import RunFolder
from rlinf_sched import Mode, SchedError
from rlinf_workers import Executor, FlowRun, WorkerGroup

NAME = "random-moves"
NUM_STEPS = 40
"""Steps of a run."""
STEPS_OF_A_PLAN = 1, 2
"""A plan is kept for at least, and at most, so many steps before the next one is drawn."""
SETTINGS = (
    "--task.num_digits=3",
    "--task.num_held_out=8",
    "--model.architecture.hidden_size=16",
    "--model.architecture.intermediate_size=16",
    "--model.architecture.num_layers=1",
    "--sft_warm_up=null",
    "--reward={kind: length, free: 0, limit: 10}",  # gives every group a gradient from the first step on
    "--rollout.num_prompts=8",
    "--rollout.max_new_tokens=4",
    "--actor.num_shards=2",
    "--actor.micro_batch_groups=2",
    "--cluster.num_devices=2",
    "--cluster.oversubscribe=true",
    f"--run.num_steps={NUM_STEPS}",
    f"--run.evaluate_every={NUM_STEPS}",
    "--run.checkpoint_every=10",
    "--run.stop_at_score=null",
    "--run.max_minutes=null",
    "--run.max_restarts=1000",
    "--run.step_timeout_s=120",
    "--run.loggers={tensorboard: null}",
)
MODES: tuple[Mode, ...] = ("collocated", "disaggregated", "hybrid")


@dataclass
class Draws:
    """What is drawn in the runs of a benchmark, and what came of it."""

    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    ahead: list[WorkerGroup] = field(default_factory=list)
    """Groups of the current run that have started in advance, whether they have replaced others or not."""
    kill_share: float = 0.05
    """Probability of a kill after a step and before a move."""
    executor: Executor | None = None

    def kill_soon(self) -> None:
        """Kills a worker within the next moments, if it is still there."""
        if self.executor is None or self.chance.random() > self.kill_share:
            return
        is_ahead, place, delay_s = self.chance.random() < 0.5, self.chance.random(), self.chance.uniform(0.0, 1.0)
        threading.Timer(delay_s, self._kill, (self.executor, is_ahead, place)).start()

    def _kill(self, executor: Executor, is_ahead: bool, place: float) -> None:
        handles = [handle for group in self.ahead for handle in group.handles] if is_ahead else []
        handles = handles or [
            handle for name in ("rollout", "reward", "actor") for handle in executor.group(name).handles
        ]
        handle = handles[int(place * len(handles))]
        if handle.is_lost:
            return
        process = handle.call("process", lane=-3)
        try:
            _, pid, _ = process.result(timeout=10.0)
            os.kill(pid, signal.SIGKILL)
        except Exception:  # noqa: BLE001 - it has ended or is starting: nobody is killed
            return
        self.counts[f"killed, {'started in advance' if is_ahead else 'running'}"] += 1


class DrawnPlans(AutoMode):
    """A mode auto whose planner draws."""

    draws: Draws

    def __init__(self, job: Job, flows: Flows, planned: RunPlans, tell: Callable[[str], None]) -> None:
        super().__init__(job, flows, planned, tell)
        self.probes = []
        self._steps_left = 1
        self._choices = list(choices(job, flows))

    def observe(self, run: FlowRun, busy_s: Mapping[str, float]) -> bool:
        self.draws.kill_soon()
        self._steps_left -= 1
        return self._steps_left <= 0

    def better(self, executor: Executor, *, num_steps: int, move_s: float) -> RunPlans:
        self.draws.executor = executor
        self.draws.ahead.clear()
        return self.draws.chance.choice(self._choices)

    def take(self, run_plans: RunPlans) -> None:
        self._planned = run_plans
        self._steps_left = self.draws.chance.randint(*STEPS_OF_A_PLAN)
        self.draws.counts["transitions"] += 1


def choices(job: Job, flows: Flows) -> list[RunPlans]:
    """Plans for the job in every mode, with one or two ranks and three granularities."""
    assert isinstance(job, ReasoningJob), "a recipe of a language model"
    planned = []
    for mode, rollout_ranks, actor_ranks, granularity in product(MODES, (1, 2), (1, 2), (0, 2, 3)):
        num_ranks = {"rollout": rollout_ranks, "actor": actor_ranks} if mode == "collocated" else {}
        plan = job.config.plan.model_copy(update={"num_ranks": num_ranks, "granularity": {"rollout": granularity}})
        drawn = ReasoningJob(job.config.model_copy(update={"plan": plan}), job.machine)
        try:
            one = plans_by_rule(drawn, flows, mode)
        except (SchedError, training_loop.RlinfError):
            continue
        if one.plans not in [other.plans for other in planned]:
            planned.append(one)
    return planned


def install(draws: Draws) -> None:
    """Lets the training loop of this process draw."""
    DrawnPlans.draws = draws
    start_ahead, move, is_ready = Executor.start_ahead, Executor.move, UpcomingMove.is_ready

    def memory_for_both(*_: Any) -> MemoryForBoth:
        return MemoryForBoth(is_enough=draws.chance.random() < 0.75, text="drawn")

    def started(self: Executor, plans: Any) -> dict[str, WorkerGroup]:
        groups = start_ahead(self, plans)
        draws.ahead[:] = groups.values()
        return groups

    def moved(self: Executor, plans: Any) -> set[str]:
        ahead = {id(group) for group in draws.ahead}
        groups = move(self, plans)
        for name in groups:
            in_advance = id(self.group(name)) in ahead
            draws.counts[f"moved, {'started in advance' if in_advance else 'ended first'}"] += 1
        return groups

    def is_ready_or_waits(self: UpcomingMove, executor: Executor) -> bool:
        draws.kill_soon()
        while draws.chance.random() < 0.95 and not is_ready(self, executor):
            time.sleep(0.2)
        return is_ready(self, executor)

    training_loop.AutoMode = DrawnPlans  # pyright: ignore[reportPrivateImportUsage]
    training_loop.memory_for_both = memory_for_both  # pyright: ignore[reportPrivateImportUsage]
    Executor.start_ahead, Executor.move, UpcomingMove.is_ready = started, moved, is_ready_or_waits


def train(folder: Path, mode: str, seed: int) -> None:
    config = load_config("sort-grpo", parse_overrides([*SETTINGS, f"--mode={mode}", f"--seed={seed}"]))
    with RunFolder(folder, config_yaml=to_yaml(config), command=["random_moves"], keep_checkpoints=2) as run_folder:
        jobs.run(jobs.prepare(config), run_folder)


def numbers(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """Every metric but times, and the bytes of the last checkpoint's tensors."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        {name: value for name, value in row["metrics"].items() if not name.startswith(("time/", "perf/"))}
        | {"step": row["step"]}
        for row in rows
    ]
    last = max((folder / "checkpoints").iterdir())
    tensors = {
        f"{file.parent.relative_to(last)}/{name}": tensor.numpy().tobytes()
        for file in sorted(last.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return metrics, tensors


def notes(folder: Path) -> list[Any]:
    """The notes of a run, which name every failure of a step."""
    return json.loads((folder / "manifest.json").read_text())["notes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="begins no further run after so many")
    parser.add_argument("--adds", action="store_true", help="adds to the counts of the results, by another seed")
    options = parser.parse_args()
    draws, seeds = Draws(chance=random.Random(options.seed)), [options.seed]
    if options.adds:
        earlier = json.loads((RESULTS_FOLDER / f"{NAME}.json").read_text())
        draws.counts.update(earlier["findings"])
        seeds = [*earlier["settings"]["seeds"], options.seed]
    with tempfile.TemporaryDirectory() as scratch:
        expected = {}
        for seed in range(2):
            train(folder := Path(scratch) / f"still-{seed}", "collocated", seed)
            expected[seed] = numbers(folder)
        install(draws)
        end_s = time.monotonic() + 60 * options.minutes
        num_runs = 0
        while draws.counts["transitions"] < options.transitions and time.monotonic() < end_s:
            train(folder := Path(scratch) / f"moving-{num_runs}", "auto", num_runs % 2)
            draws.executor = None
            is_equal = numbers(folder) == expected[num_runs % 2]
            num_runs += 1
            hangs = sum("not done after" in str(note) for note in notes(folder))
            draws.counts.update({"runs": 1, "runs with equal numbers": int(is_equal), "hangs": hangs})
            print(f"run {num_runs}: {'equal' if is_equal else 'DIFFERENT'}; {dict(draws.counts)}", flush=True)
    findings = {name: draws.counts[name] for name in sorted(draws.counts)}
    report(
        NAME,
        settings={"recipe": "sort-grpo", "seeds": seeds, "steps_of_a_run": NUM_STEPS},
        samples_s={},
        comparisons=[],
        findings=findings,
    )


if __name__ == "__main__":
    main()
