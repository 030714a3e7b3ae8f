"""What the system costs: a training step as a flow of processes against a plain loop over the same classes.

    python -m benchmarks.throughput.overhead sort|pushcube [--one-core]

Both sides do the same step (the metrics are compared to the bit) with one torch thread. The flow is collocated on one
CPU slot: a process for each worker, channels, leases and a weight sync with digests; its workers take turns, so a
second core gives it nothing to compute on. The loop calls the workers one after the other in this process and copies
the weights. Beside the wall clock stands the processor time of all processes together, which other work on the machine
does not move, and which a second core cannot hide. Target: ratio of medians at most 1.05.

`--one-core` binds every process to the same core, the worst case: workers that hand over a hundred times a step evict
each other from its caches (measured with nothing but the simulator, the policy and an empty message between them: 3 %
of the step).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.harness import compare, cpu_seconds, interleave, mean_seconds, report
from benchmarks.throughput.single_process import EnvironmentLoop, ListWriter, SingleProcess

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.base import Flows, Job
from rlinf.loop.session import Session
from rlinf.planning.plans import make_plans
from rlinf.processes.env_vars import worker_env_vars
from rlinf_workers import Executor, Flow, FlowRun, Span, StepContext

RECIPES = {"sort": "sort-grpo", "pushcube": "pushcube-ppo"}
TARGET = 1.05


@dataclass(frozen=True)
class PlainGroup:
    """A worker group of one worker, in this process."""

    worker: Any
    num_ranks: int = 1

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]


class PlainLoop:
    """The training step in one process. It also stands in for the session while the job prepares itself (the warm
    start)."""

    def __init__(self, job: Job, flows: Flows, folder: Path) -> None:
        self._job, self._flows, self.folder = job, flows, folder
        self.local = SingleProcess(flows.train)
        self.sync_weights()
        self._step = self._step_with_env if "env" in flows.train.workers else self._step_without_env

    def step(self, context: StepContext, feeds: dict[str, list[Any]]) -> tuple[float, dict[str, float]]:
        """Seconds and metrics of one training step, the copy of the weights included."""
        start_s = time.perf_counter()
        self.local.begin(context)
        self._step(feeds)
        self.sync_weights()
        metrics = self.local.metrics()
        return time.perf_counter() - start_s, metrics

    def _step_without_env(self, feeds: dict[str, list[Any]]) -> None:
        self.local.run_stages(self._flows.train, feeds)

    def _step_with_env(self, feeds: dict[str, list[Any]]) -> None:
        workers, actions, trajectories = self.local, ListWriter(), ListWriter()
        workers["policy"].act(EnvironmentLoop(workers["env"], actions), actions, trajectories)
        in_order = sorted(trajectories.items, key=lambda trajectory: trajectory.group)
        workers["actor"].train([in_order])

    # -- what Job.prepare uses of a session ------------------------------------------------------------------------

    def run_flow(self, flow: Flow, *, step: int, feeds: dict[str, list[Any]], phase: Any = "train") -> FlowRun:
        num_items = max(map(len, feeds.values()))
        self.local.begin(StepContext(step=step, phase=phase, seed=self._job.config.seed, num_items=num_items))
        channels = self.local.run_stages(flow, feeds)
        collected = {channel: channels[channel] for channel in flow.graph().collects}
        metrics = self.local.metrics()
        return FlowRun(
            metrics=metrics, collected=collected, shown_rows=[], spans=[], decisions={}, start_s=0.0, duration_s=0.0
        )

    def group(self, name: str) -> PlainGroup:
        return PlainGroup(self.local[name])

    def sync_weights(self) -> None:
        for edge in self._flows.train.graph().weight_edges:
            self.local.sync(edge.source, edge.target)

    def evaluate(self, step: int) -> dict[str, float]:
        self.sync_weights()
        run = self.run_flow(self._flows.evaluate, step=step, feeds=self._job.evaluation_feeds(), phase="evaluate")
        return self._job.evaluation_metrics(run)

    def message(self, text: str) -> None:
        print(text, flush=True)

    note = message


@dataclass
class FlowSide:
    """The training step as a flow of processes."""

    executor: Executor
    flow: Flow
    spans: list[Span] = field(default_factory=list)

    def step(self, context: StepContext, feeds: dict[str, list[Any]]) -> tuple[float, dict[str, float]]:
        start_s = time.perf_counter()
        run = self.executor.run(self.flow, context=context, feeds=feeds)
        spent_s = time.perf_counter() - start_s
        self.spans.extend(run.spans)
        return spent_s, run.metrics


def make_job(name: str, overrides: list[str]) -> Job:
    """The recipe's job, in collocated mode on one CPU slot."""
    fixed = ["--cluster.num_devices=1", "--mode=collocated", "--plan.num_ranks={}", *overrides]
    return jobs.prepare(load_config(RECIPES[name], parse_overrides(fixed)))


def measure(name: str, options: argparse.Namespace, overrides: list[str]) -> None:
    """One benchmark from start to result."""
    job = make_job(name, overrides)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        side, plain = _start(stack, job, folder)
        seen: dict[str, dict[str, float]] = {}
        cpu_s: dict[str, list[float]] = {"flow, cpu time": [], "plain loop, cpu time": []}

        def timed(label: str, step: Callable[..., tuple[float, dict[str, float]]]) -> Callable[[int], float]:
            def run(index: int) -> float:
                feeds = job.feeds(index)
                num_items = max(map(len, feeds.values()), default=0)
                context = StepContext(step=index, phase="train", seed=job.config.seed, num_items=num_items)
                before_s = cpu_seconds(_process_ids())
                spent_s, seen[label] = step(context, feeds)
                if index >= options.warmup:
                    cpu_s[f"{label}, cpu time"].append(cpu_seconds(_process_ids()) - before_s)
                if len(seen) == 2:
                    _check_equal(index, seen)
                if index < options.warmup:
                    side.spans.clear()
                return spent_s

            return run

        sides = {"flow": timed("flow", side.step), "plain loop": timed("plain loop", plain.step)}
        samples_s = interleave(sides, num_warmup=options.warmup, num_rounds=options.rounds) | cpu_s
        comparison = compare(samples_s, "flow", "plain loop")
        seconds = mean_seconds(side.spans, options.rounds)
        for label, value in seconds.items():
            print(f"  {value * 1e3:9.2f} ms  {label}")
        report(
            f"overhead-{name}" + ("-one-core" if options.one_core else ""),
            settings={
                "recipe": RECIPES[name],
                "overrides": overrides,
                "one_core": options.one_core,
                "warmup": options.warmup,
                "target_ratio_of_medians": TARGET,
            },
            samples_s=samples_s,
            comparisons=[comparison, compare(samples_s, *cpu_s)],
            findings={
                "meets_target": comparison.ratio_of_medians <= TARGET,
                "flow_seconds_by_span": seconds,
                "same_metrics_every_round": True,
                "last_metrics": seen["flow"],
            },
            output=options.output,
        )


def _start(stack: ExitStack, job: Job, folder: Path) -> tuple[FlowSide, PlainLoop]:
    """Both sides with the same weights, after the job's SFT warm-up if it has one."""
    flows = job.build(folder)
    planned = make_plans(job, flows, Path())
    job.write_inputs(folder)
    plain = PlainLoop(job, flows, folder)
    job.prepare(cast(Session, plain))
    plain.sync_weights()
    (folder / "start").mkdir()
    (trainer,) = job.trainers
    plain.local[trainer].save_checkpoint(str(folder / "start"))
    executor = stack.enter_context(
        Executor(cluster=planned.cluster, log_folder=folder / "logs", env_vars=worker_env_vars(job.config.cluster))
    )
    executor.start(flows.train, planned.plans[flows.train.name])
    executor.group(trainer).call("load_checkpoint", str(folder / "start"))
    executor.sync_weights()
    return FlowSide(executor, flows.train), plain


def _process_ids() -> list[int]:
    """Process ids of this process and of the workers."""
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]


def _check_equal(index: int, seen: dict[str, dict[str, float]]) -> None:
    if seen["flow"] != seen["plain loop"]:
        different = {
            key: (seen["flow"].get(key), seen["plain loop"].get(key))
            for key in {*seen["flow"], *seen["plain loop"]}
            if seen["flow"].get(key) != seen["plain loop"].get(key)
        }
        sys.exit(f"round {index}: the two sides did not do the same work; (flow, plain loop): {different}")
    seen.pop("plain loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--one-core", action="store_true", help="bind every process to core 0")
    parser.add_argument("--output", type=Path, default=None)
    options, overrides = parser.parse_known_args()
    if options.one_core:
        os.sched_setaffinity(0, {0})  # inherited by every process that is started
    torch.set_num_threads(1)
    measure(options.name, options, overrides)


if __name__ == "__main__":
    main()
