"""Predicted against measured steps that overlap (`algorithm.max_staleness` 0, 1 and 2), on two CPU slots.

    python -m benchmarks.sched.overlapping_runs [--rounds 4] [--only NAME ...]

Each workload runs disaggregated, in one group of processes. A round is a step of each probe plan, then a burst of
steps for each k: generation begins k steps ahead of training, and what counts is the time from the end of the first
k + 1 steps of the burst to the end of the last that generation still ran beside. Two profiles predict the time from
step to step:

profile   of the probe plans, whose steps do not overlap: what `rlinf profile` measures
own       of the steps of the burst with that k
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bursts import burst
from benchmarks.harness import interleave, report
from benchmarks.sched import real_runs
from benchmarks.sched.real_runs import Placed, Probing, started

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.planning.plans import make_plans
from rlinf_sched import Problem, simulate
from rlinf_workers import Profiler

STALENESS = (0, 1, 2)
NUM_WARMUP = 1
_SORT = ["--sft_warm_up", "null", "--reward.kind", "random"]
WORKLOADS: Mapping[str, tuple[str, Sequence[str]]] = {
    # MuJoCo draws first: it cannot once ManiSkill has been loaded into the process.
    "faucets, pictures": ("reach-openvla-ppo", [*real_runs.WORKLOADS["faucets, pictures"][1], "--env.num_envs", "16"]),
    "sort, critic": ("sort-grpo", [*_SORT, "--algorithm.name", "ppo"]),
    "cart pole": ("env-ppo", ["--algorithm.target_kl", "null"]),
} | {name: real_runs.WORKLOADS[name] for name in ("sort", "sort, long answers", "push cube")}


@dataclass
class Bursts(Placed):
    """Bursts of steps on the processes of one placement, generation `ahead` steps ahead of training."""

    ahead: int = 0
    num_steps: int = 10
    clock: list[int] = field(default_factory=lambda: [0])
    """The next step; shared by all bursts on these processes."""

    def step(self, index: int) -> float:
        """A burst: seconds from step to step."""
        runs, ended_s = burst(
            self.executor, self._begin, first=self.clock[0], num_steps=self.num_steps, ahead=self.ahead
        )
        self.clock[0] += self.num_steps
        if index >= NUM_WARMUP:
            for run in runs[self.ahead + 1 : self.num_steps - self.ahead]:
                self.profiler.observe(run, self.plan)
        first, last = self.ahead, self.num_steps - 1 - self.ahead
        return (ended_s[last] - ended_s[first]) / (last - first)

    def _begin(self, step: int) -> None:
        context, feeds = self._input(step)
        self.executor.begin(self.flows.train, context=context, feeds=feeds)


@dataclass(kw_only=True)
class ProbeSteps(Probing):
    """A step of each probe plan, on the same processes."""

    clock: list[int]

    def step(self, index: int) -> float:
        """Seconds per step."""
        spent_s = 0.0
        for probe in self.probes:
            self.executor.replan(self.flows.train, probe)
            run = self._run(self.clock[0])
            self.clock[0] += 1
            spent_s += run.duration_s
            if index >= NUM_WARMUP:
                self.profiler.observe(run, probe)
        self.executor.replan(self.flows.train, self.plan)
        return spent_s / len(self.probes)


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One workload: by k, seconds from step to step, predicted and measured."""
    recipe, overrides = WORKLOADS[name]
    fixed = ["--cluster.num_devices", "2", "--mode", "disaggregated", "--algorithm.max_staleness", str(STALENESS[-1])]
    job = jobs.prepare(load_config(recipe, parse_overrides([*overrides, *fixed])))
    flows = job.build(folder)
    job.write_inputs(folder)
    planned = make_plans(job, flows, folder)
    with ExitStack() as stack:
        base = stack.enter_context(started(job, flows, planned.plans[flows.train.name], folder, planned.cluster))
        shared = {key: getattr(base, key) for key in ("job", "flows", "executor", "plan")}
        clock = [0]

        def profiler() -> Profiler:
            return Profiler(flows.train.graph(), planned.cluster, job.num_items)

        probes = ProbeSteps(**shared, profiler=profiler(), also=profiler(), clock=clock)
        bursts = {
            ahead: Bursts(**shared, profiler=profiler(), ahead=ahead, num_steps=options.steps, clock=clock)
            for ahead in STALENESS
        }
        sides = {"probe": probes.step} | {f"k = {ahead}": burst.step for ahead, burst in bursts.items()}
        samples_s = interleave(sides, num_warmup=NUM_WARMUP, num_rounds=options.rounds)
        probed = probes.measured().problem
        return {
            f"k = {ahead}": _row(samples_s[f"k = {ahead}"], burst, {"profile": probed, "own": burst.measured().problem})
            for ahead, burst in bursts.items()
        }


def _row(samples_s: Sequence[float], side: Bursts, problems: Mapping[str, Problem]) -> dict[str, Any]:
    measured_s = statistics.median(samples_s)
    predicted_s = {
        source: simulate(problem.with_staleness(side.ahead), side.plan).step_s for source, problem in problems.items()
    }
    return {
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": {source: seconds / measured_s - 1 for source, seconds in predicted_s.items()},
        "samples_s": samples_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps of a burst")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    workloads: dict[str, Any] = {}
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="rlinf-overlapping-runs-") as scratch:
            workloads[name] = measure(name, options, Path(scratch))
        for ahead, row in workloads[name].items():
            errors = ", ".join(f"{source} {error:+.1%}" for source, error in row["error"].items())
            print(f"{name}, {ahead}: {row['measured_s']:.4f} s; predicted: {errors}", flush=True)
        _report(options, workloads)


def _report(options: argparse.Namespace, workloads: Mapping[str, Any]) -> None:
    rows = [row for workload in workloads.values() for row in workload.values()]
    absolute = {source: [abs(row["error"][source]) for row in rows] for source in rows[0]["error"]}
    report(
        "sched-overlapping-runs",
        settings={
            "rounds": options.rounds,
            "steps_of_a_burst": options.steps,
            "workloads": {name: list(WORKLOADS[name][1]) for name in workloads},
        },
        samples_s={},
        comparisons=[],
        findings={
            "median_error": {source: statistics.median(errors) for source, errors in absolute.items()},
            "worst_error": {source: max(errors) for source, errors in absolute.items()},
            "workloads": workloads,
        },
        output=options.output,
    )


if __name__ == "__main__":
    main()
