"""Steps that overlap, ours against TRL's: AsyncGRPOTrainer, and the synchronous trainers beside both.

    python -m benchmarks.throughput.trl_async --trl-python FOLDER/bin/python

The newest TRL whose asynchronous trainer runs on a CPU is 1.6.0; later ones need an attention kernel for GPUs. Makes
one with it:

    python -m venv FOLDER && FOLDER/bin/pip install "torch==2.13.0" "trl==1.6.0" aiohttp requests

Task, model and settings are those of trl_comparison.py (TRL_COMPARISON_TASK chooses the size). Four sides on two cores:

rlinf, k = 1        generation on one CPU slot, training on the other, one thread each
rlinf, k = 0        collocated on both CPU slots
trl, asynchronous   one process that generates with transformers (trl_async_peer.py) and one that trains, one thread
                    each; samples are at most one step old
trl, synchronous    GRPOTrainer with two threads

A round is a burst of steps of each side, in turn; the others are idle or stopped meanwhile. What is timed is from the
end of the first step of a burst to the end of its last.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.bursts import burst
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput import trl_task
from benchmarks.throughput.trl_comparison import (
    NUM_SAMPLES,
    TrlSide,
    make_flow,
    make_prompts,
    write_model,
)

from rlinf.config.common import ClusterConfig
from rlinf.processes.env_vars import worker_env_vars
from rlinf.tasks.language import character_tokenizer
from rlinf_sched import Cluster, Mode, plan_for_mode
from rlinf_workers import Executor, Flow, StepContext

OURS, IN_TURN, THEIRS, THEIRS_IN_TURN = "rlinf, k = 1", "rlinf, k = 0", "trl, asynchronous", "trl, synchronous"


@dataclass
class OurSteps:
    """Bursts of our steps."""

    executor: Executor
    flow: Flow
    ahead: int
    """Steps that generation is ahead of training."""

    num_steps: int
    num_done: int = 0
    tokenizer: Any = field(default_factory=lambda: character_tokenizer(trl_task.ALPHABET))
    metrics: list[dict[str, float]] = field(default_factory=list)

    def burst(self, _: int) -> float:
        """Seconds per step."""
        runs, ended_s = burst(
            self.executor, self._begin, first=self.num_done, num_steps=self.num_steps, ahead=self.ahead
        )
        self.num_done += self.num_steps
        self.metrics += [run.metrics for run in runs]
        return (ended_s[-1] - ended_s[0]) / (self.num_steps - 1)

    def _begin(self, step: int) -> None:
        context = StepContext(step=step, phase="train", seed=0, num_items=trl_task.NUM_PROMPTS)
        self.executor.begin(self.flow, context=context, feeds={"prompts": make_prompts(self.tokenizer, step)})

    def summary(self) -> dict[str, float]:
        return {
            "completion_tokens": statistics.mean(row["rollout/completion_tokens"] for row in self.metrics),
            "reward": statistics.mean(row["reward/mean"] for row in self.metrics),
            "staleness_max": max(row.get("rollout/staleness_max", 0.0) for row in self.metrics),
        }


@dataclass
class TheirSteps:
    """Bursts of TRL's steps; its processes are stopped between them."""

    side: TrlSide
    num_steps: int

    def burst(self, _: int) -> float:
        """Seconds per step."""
        self.side.signal(signal.SIGCONT)
        self.side.step(0)
        started_s = time.perf_counter()
        for step in range(1, self.num_steps):
            self.side.step(step)
        seconds = (time.perf_counter() - started_s) / (self.num_steps - 1)
        self.side.signal(signal.SIGSTOP)
        return seconds

    def summary(self) -> dict[str, float]:
        rows = self.side.rows
        return {
            "completion_tokens": statistics.mean(row["completion_tokens"] for row in rows),
            "reward": statistics.mean(row["reward"] for row in rows),
            "staleness_max": max(row.get("staleness", 0.0) for row in rows),
        }


def our_steps(stack: ExitStack, folder: Path, mode: Mode, ahead: int, num_steps: int) -> OurSteps:
    flow = make_flow(folder, 32, None, 1 if mode == "disaggregated" else 2, max_staleness=ahead)
    cluster = Cluster.cpu_slots(2)
    plan = plan_for_mode(flow.graph(), cluster, mode)
    plan = replace(plan, stages=tuple(replace(stage, granularity=trl_task.NUM_PROMPTS) for stage in plan.stages))
    executor = stack.enter_context(
        Executor(cluster=cluster, env_vars=worker_env_vars(ClusterConfig(threads_per_device=1)))
    )
    executor.start(flow, plan)
    executor.sync_weights()
    return OurSteps(executor, flow, ahead, num_steps)


def their_steps(stack: ExitStack, folder: Path, python: str, module: str, num_threads: int, total: int) -> TrlSide:
    return stack.enter_context(TrlSide(python, folder, num_steps=total, num_threads=num_threads, module=module))


def measure(options: argparse.Namespace) -> None:
    total = options.steps * (options.rounds + options.warmup)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = work / "model"
        num_parameters = write_model(folder)
        theirs = {
            THEIRS: their_steps(stack, folder, options.trl_python, "trl_async_peer", 1, total),
            THEIRS_IN_TURN: their_steps(stack, folder, options.trl_python, "trl_peer", 2, total),
        }
        sides: dict[str, OurSteps | TheirSteps] = {
            OURS: our_steps(stack, folder, "disaggregated", 1, options.steps),
            IN_TURN: our_steps(stack, folder, "collocated", 0, options.steps),
        }
        for name, side in theirs.items():
            side.wait_until_ready()
            side.signal(signal.SIGSTOP)
            sides[name] = TheirSteps(side, options.steps)
        bursts: dict[str, Callable[[int], float]] = {name: side.burst for name, side in sides.items()}
        samples_s = interleave(bursts, num_warmup=options.warmup, num_rounds=options.rounds)
        summaries = {name: side.summary() for name, side in sides.items()}
    assert summaries[OURS]["staleness_max"] == summaries[THEIRS]["staleness_max"] == 1, summaries
    report(
        f"trl-async-{trl_task.NAME}",
        settings={
            "num_parameters": num_parameters,
            "num_prompts": trl_task.NUM_PROMPTS,
            "group_size": trl_task.GROUP_SIZE,
            "max_new_tokens": trl_task.MAX_NEW_TOKENS,
            "steps_of_a_burst": options.steps,
            "warmup": options.warmup,
            "trl_versions": theirs[THEIRS].versions,
        },
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, THEIRS, OURS),
            compare(samples_s, THEIRS_IN_TURN, OURS),
            compare(samples_s, THEIRS_IN_TURN, IN_TURN),
            compare(samples_s, IN_TURN, OURS),
        ],
        findings={
            "samples_per_s": {name: NUM_SAMPLES / statistics.median(seconds) for name, seconds in samples_s.items()},
            "sides": summaries,
        },
        output=options.output,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter that can import trl")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="steps of a burst")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--output", type=Path, default=None)
    torch.set_num_threads(1)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
