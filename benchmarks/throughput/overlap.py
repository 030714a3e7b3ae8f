"""Steps that overlap against the same steps one after the other (`algorithm.max_staleness` 1 and 0).

    python -m benchmarks.throughput.overlap

A group of processes trains on two CPU slots, generation on one and training on the other. A round is a burst of steps,
first one after the other, then with generation one step ahead; what is timed is from the end of the first step of a
burst to the end of its last.

sorting   the sorting job. Two optimizer steps on a batch need all of it, so that without overlap nothing of a step is
          pipelined. The reward is the length, which gives every group a gradient from the first step on.
paced     stages that sleep for a fixed time, as drivers of accelerators do: what the executor costs, on a machine whose
          cores do other work too.

The limit is the time of a step without overlap over the time that the busier slot computes in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bursts import burst
from benchmarks.harness import compare, interleave, report

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.plan_times import busy_seconds
from rlinf.machine import this_machine
from rlinf.planning.plans import make_plans
from rlinf.processes.env_vars import worker_env_vars
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext, Writer
from rlinf_workers.testing.toy_flow import Learn, Number, Scale

FIXED = (
    "--mode=disaggregated",
    "--cluster.num_devices=2",
    "--cluster.oversubscribe=true",
    "--algorithm.max_staleness=1",
    "--algorithm.num_minibatches=2",
    "--sft_warm_up=null",
    "--reward={kind: length, free: 0, limit: 10}",
)
PACE_S = 0.5
"""Seconds that generation and training each take in a paced step."""
NUMBERS = [Number(index=index, value=0.0) for index in range(16)]
IN_TURN, OVERLAPPED = "in turn", "overlapped"


class PacedScale(Scale):
    """Generates for `PACE_S`."""

    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        items = [item for chunk in numbers for item in chunk]
        time.sleep(PACE_S)
        scaled.put_many([(item.index, item) for item in items])


class PacedLearn(Learn):
    """Trains for `PACE_S`."""

    def learn(self, shifted: Reader[Number]) -> None:
        super().learn(shifted)
        time.sleep(PACE_S)


@dataclass
class Steps:
    """The training steps of one group of processes; bursts of both kinds follow each other."""

    executor: Executor
    flow: Flow
    feeds: Callable[[int], dict[str, list[Any]]]
    num_steps: int
    """Steps of a burst."""
    num_done: int = 0
    busy_s: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Kind of burst -> for each step but the first of a burst, stage -> seconds of computation."""

    def burst(self, name: str, ahead: int, _: int) -> float:
        """Seconds per step."""
        runs, ended_s = burst(self.executor, self._begin, first=self.num_done, num_steps=self.num_steps, ahead=ahead)
        self.num_done += self.num_steps
        staleness = [run.metrics.get("rollout/staleness_max") for run in runs]
        assert staleness in ([None] * len(runs), [0.0] + [float(ahead)] * (len(runs) - 1)), staleness
        self.busy_s.setdefault(name, []).extend(busy_seconds(run) for run in runs[1:])
        return (ended_s[-1] - ended_s[0]) / (self.num_steps - 1)

    def _begin(self, step: int) -> None:
        feeds = self.feeds(step)
        num_items = max(map(len, feeds.values()))
        context = StepContext(step=step, phase="train", seed=0, num_items=num_items)
        self.executor.begin(self.flow, context=context, feeds=feeds)

    def measure(self, what: str, *, num_warmup: int, num_rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Seconds per step of each burst, and what is found in them."""
        sides = {f"{what}, {name}": partial(self.burst, name, ahead) for name, ahead in ((IN_TURN, 0), (OVERLAPPED, 1))}
        samples_s = interleave(sides, num_warmup=num_warmup, num_rounds=num_rounds)
        busy_s: dict[str, dict[str, float]] = {}
        for name, steps in self.busy_s.items():
            counted = steps[num_warmup * (self.num_steps - 1) :]
            busy_s[name] = {stage: statistics.median(step[stage] for step in counted) for stage in counted[0]}
        limit = statistics.median(samples_s[f"{what}, {IN_TURN}"]) / max(busy_s[IN_TURN].values())
        return samples_s, {"busy_s": busy_s, "limit": limit}


def sorting(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Both sides of the sorting job."""
    config = load_config("sort-grpo", parse_overrides([*FIXED, *overrides]))
    assert isinstance(config, ReasoningConfig), "the recipe is of a language model"
    folder = Path.cwd() / "runs" / "overlap-benchmark"
    job = ReasoningJob(config, this_machine())
    flows = job.build(folder)
    planned = make_plans(job, flows, folder)
    job.write_inputs(folder)
    with Executor(cluster=planned.cluster, env_vars=worker_env_vars(config.cluster)) as executor:
        executor.start(flows.train, planned.plans[flows.train.name])
        executor.sync_weights()
        steps = Steps(executor, flows.train, job.feeds, options.steps)
        return steps.measure("sorting", num_warmup=options.warmup, num_rounds=options.rounds)


def paced(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Both sides of stages that sleep."""
    module, cluster = "benchmarks.throughput.overlap", Cluster.cpu_slots(2)
    flow = Flow("paced", max_staleness=1)
    flow.worker("scale", f"{module}:PacedScale").worker("learn", f"{module}:PacedLearn")
    flow.stage("scale", "scale", reads="numbers", writes="shifted")
    flow.stage("learn", "learn", reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    with Executor(cluster=cluster, env_vars={"OMP_NUM_THREADS": "1"}) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "disaggregated"))
        executor.sync_weights()
        steps = Steps(executor, flow, lambda step: {"numbers": NUMBERS}, options.steps)
        return steps.measure("paced", num_warmup=options.warmup, num_rounds=options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps of a burst")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--what", nargs="+", choices=["paced", "sorting"], default=["paced", "sorting"])
    parser.add_argument("--output", type=Path, default=None)
    options, overrides = parser.parse_known_args()
    samples_s, findings, comparisons = {}, {}, []
    for what in options.what:
        seconds, limits = paced(options) if what == "paced" else sorting(options, overrides)
        samples_s |= seconds
        comparisons.append(compare(seconds, f"{what}, {IN_TURN}", f"{what}, {OVERLAPPED}"))
        findings[what] = limits | {"share_of_limit": comparisons[-1].median_of_ratios / limits["limit"]}
        print(what, findings[what])
    report(
        "overlap",
        settings={
            "recipe": "sort-grpo",
            "overrides": [*FIXED, *overrides],
            "steps_of_a_burst": options.steps,
            "pace_s": PACE_S,
        },
        samples_s=samples_s,
        comparisons=comparisons,
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()
