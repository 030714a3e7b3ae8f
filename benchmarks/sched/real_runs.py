"""Predicted against measured steps of the main jobs, on this machine's CPU slots.

    python -m benchmarks.sched.real_runs [--rounds 40] [--only NAME ...]

Each workload runs in the placement of every mode at once, in processes of their own, a step of one after a step of the
other, so that a busy machine is busy for all. Between them run the probe plans, on the collocated processes and on the
disaggregated ones. What the probes took makes profiles, of the collocated ones alone (what mode auto begins with) and
of both (`rlinf profile`), and the simulator predicts the steps of all placements from them. The error has two parts:
what stages take elsewhere is not what the probes saw, and a step is not what the simulator makes of its stages. A
prediction from a profile of the placement's own steps has the second part alone. At last the plan that the planner
makes of the collocated probes runs in turn with the same placements.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, interleave, report

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.base import Flows, Job
from rlinf.loop.plan_times import busy_seconds
from rlinf.planning.plans import complete_problem, make_plans, plans_of_problem
from rlinf.processes.env_vars import worker_env_vars
from rlinf_sched import Plan, Problem, simulate
from rlinf_workers import Executor, LocalLauncher, Measured, Profiler, StepContext, probe_plans

NUM_WARMUP = 3
MODES = ("collocated", "disaggregated", "hybrid")
PROBED = ("collocated", "disaggregated")
AUTO, PROBES = "auto", "probes"
_SORT = ["--sft_warm_up", "null", "--reward.kind", "random"]
"""Random rewards: every group has advantages from the first step on, so that every step costs the same."""
_PUSH = ["--algorithm.target_kl", "null", "--env.num_groups", "4", "--actor.num_shards", "2"]
"""So that both slots train, and each pipelines two groups."""


def _agent(name: str, limits: str) -> list[str]:
    """An agent of waiting_agents.py, which rewards at random."""
    agent = f"{{run: benchmarks.sched.waiting_agents:{name}, {limits}}}"
    return ["--sft_warm_up", "null", "--reward", "{kind: episode}", "--rollout.agent", agent]


WORKLOADS: Mapping[str, tuple[str, Sequence[str]]] = {
    "sort": ("sort-grpo", _SORT),
    "sort, long answers": (
        "sort-grpo",
        [*_SORT, "--task.num_digits", "24", "--rollout.max_new_tokens", "25", "--rollout.max_prompt_tokens", "25"],
    ),
    "sort, one shard": ("sort-grpo", [*_SORT, "--actor.num_shards", "1", "--actor.micro_batch_groups", "8"]),
    "sort, reference": ("sort-grpo", [*_SORT, "--algorithm.kl_coef", "0.01"]),
    "push cube": ("pushcube-ppo", _PUSH),
    "push cube, four times the training": ("pushcube-ppo", [*_PUSH, "--algorithm.num_epochs", "32"]),
    "faucets, pictures": ("reach-openvla-ppo", ["--sft_warm_up", "null", "--algorithm.target_kl", "null"]),
    "calculator, two turns": (
        "tool-calculator",
        [*_agent("calculates", "max_turns: 2, max_context_tokens: 56"), "--rollout.num_prompts", "16"],
    ),
    "agent that waits": (
        "sort-grpo",
        [
            *_agent("waits", "max_turns: 3, max_context_tokens: 60"),
            *("--rollout.engine_options.refill", "true", "--rollout.num_prompts", "16"),
        ],
    ),
}


@dataclass
class Placed:
    """One placement of a workload, with its processes."""

    job: Job
    flows: Flows
    executor: Executor
    plan: Plan
    profiler: Profiler
    """Observes the steps of this placement alone."""
    stages_s: list[Mapping[str, float]] = field(default_factory=list)

    def step(self, index: int) -> float:
        run = self._run(index)
        if index >= NUM_WARMUP:
            self.stages_s.append(busy_seconds(run))
            self.profiler.observe(run, self.plan)
        return run.duration_s

    def measured(self) -> Measured:
        """What its profiler has seen."""
        self.profiler.observe_memory(self.executor, self.plan)
        profiled = self.profiler.measured()
        return Measured(problem=complete_problem(self.job, profiled.problem), fits=profiled.fits)

    def _run(self, index: int) -> Any:
        context, feeds = self._input(index)
        return self.executor.run(self.flows.train, context=context, feeds=feeds)

    def _input(self, step: int) -> tuple[StepContext, Mapping[str, Sequence[Any]]]:
        feeds = self.job.feeds(step)
        num_items = max(map(len, feeds.values()), default=0)
        return StepContext(step=step, phase="train", seed=self.job.config.seed, num_items=num_items), feeds


@dataclass(kw_only=True)
class Probing(Placed):
    """The probe plans in turn, on the processes of another placement."""

    also: Profiler
    """Sees them too, and those of other placements."""

    @cached_property
    def probes(self) -> Sequence[Plan]:
        return probe_plans(self.flows.train.graph(), self.plan, self.job.num_items)

    def step(self, index: int) -> float:
        probe = self.probes[index % len(self.probes)]
        self.executor.replan(self.flows.train, probe)
        run = self._run(index)
        self.executor.replan(self.flows.train, self.plan)
        if index >= NUM_WARMUP:
            self.profiler.observe(run, probe)
            self.also.observe(run, probe)
        return run.duration_s

    def measured(self) -> Measured:
        self.also.observe_memory(self.executor, self.plan)
        return super().measured()


@contextmanager
def started(job: Job, flows: Flows, plan: Plan, folder: Path, cluster: Any) -> Iterator[Placed]:
    """The processes of one placement."""
    environment = worker_env_vars(job.config.cluster)
    launcher = LocalLauncher(pins_slots=True)
    with Executor(cluster=cluster, launcher=launcher, env_vars=environment, log_folder=folder / "logs") as executor:
        executor.start(flows.train, plan)
        executor.sync_weights()
        yield Placed(job, flows, executor, plan, Profiler(flows.train.graph(), cluster, job.num_items))


def prepared(name: str, mode: str) -> Job:
    """A workload in one mode. Raises: UserError for what this machine cannot run."""
    recipe, overrides = WORKLOADS[name]
    config = load_config(recipe, parse_overrides([*overrides, "--cluster.num_devices", "2", "--mode", mode]))
    return jobs.prepare(config)


def measure(name: str, num_rounds: int, scratch: Path) -> dict[str, Any]:
    """One workload: medians, predictions and what auto chose."""
    sides: dict[str, Placed] = {}
    with ExitStack() as stack:
        for mode in MODES:
            folder = scratch / mode
            folder.mkdir(parents=True)
            job = prepared(name, mode)
            flows = job.build(folder)
            job.write_inputs(folder)
            planned = make_plans(job, flows, folder)
            sides[mode] = stack.enter_context(
                started(job, flows, planned.plans[flows.train.name], folder, planned.cluster)
            )
        base = sides["collocated"]
        graph, num_items = base.flows.train.graph(), base.job.num_items
        both = Profiler(graph, planned.cluster, num_items)
        probing = {
            f"{PROBES}, {mode}": Probing(
                **{key: getattr(sides[mode], key) for key in ("job", "flows", "executor", "plan")},
                profiler=Profiler(graph, planned.cluster, num_items),
                also=both,
            )
            for mode in PROBED
        }
        steps = {name: side.step for name, side in (*probing.items(), *sides.items())}
        samples_s = interleave(steps, num_warmup=NUM_WARMUP, num_rounds=num_rounds)
        probed, *_ = [side.measured() for side in probing.values()]
        profiled = both.measured()
        probed_problems = {"auto": probed.problem, "profile": complete_problem(base.job, profiled.problem)}
        first = {mode: _row(samples_s[mode], side, probed_problems) for mode, side in sides.items()}
        auto = plans_of_problem(base.job, base.flows, probed.problem).plans[base.flows.train.name]
        (scratch / AUTO).mkdir()
        base.job.write_inputs(scratch / AUTO)
        sides[AUTO] = stack.enter_context(started(base.job, base.flows, auto, scratch / AUTO, planned.cluster))
        steps = {mode: side.step for mode, side in sides.items()}
        second_s = interleave(steps, num_warmup=NUM_WARMUP, num_rounds=num_rounds)
    best = min(MODES, key=lambda mode: statistics.median(second_s[mode]))
    return {
        "placements": first,
        "fits": {f"{stage}, {ranks} ranks": fit.describe() for (stage, ranks), fit in profiled.fits.items()},
        "auto": {
            "mode": auto.mode,
            "plan": {p.stage: [list(p.devices), p.num_ranks, p.granularity] for p in auto.stages},
            "predicted_s": auto.prediction.step_s if auto.prediction else None,
            "measured_s": statistics.median(second_s[AUTO]),
            "best_mode": best,
            "over_best": compare(second_s, AUTO, best).median_of_ratios,
            "modes_s": {mode: statistics.median(second_s[mode]) for mode in MODES},
        },
    }


def _row(samples_s: Sequence[float], side: Placed, probed_problems: Mapping[str, Problem]) -> dict[str, Any]:
    """Seconds of the step and of its stages, measured and by each profile."""
    measured_s = statistics.median(samples_s)
    problems = {**probed_problems, "own": side.measured().problem}
    predicted = {source: simulate(problem, side.plan) for source, problem in problems.items()}
    return {
        "measured_s": measured_s,
        "predicted_s": {source: timeline.step_s for source, timeline in predicted.items()},
        "error": {source: timeline.step_s / measured_s - 1 for source, timeline in predicted.items()},
        "stages": {
            stage: {
                "measured_s": statistics.median(step.get(stage, 0.0) for step in side.stages_s),
                "predicted_s": {
                    source: timeline.busiest_s(stage, "compute", "step") for source, timeline in predicted.items()
                },
            }
            for stage in predicted["own"].stages
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    workloads: dict[str, Any] = {}
    for name in options.only:
        prepared(name, MODES[0])  # what cannot run ends this before anything was measured
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="rlinf-real-runs-") as scratch:
            workloads[name] = measure(name, options.rounds, Path(scratch))
        for mode, row in workloads[name]["placements"].items():
            errors = ", ".join(f"{source} {error:+.1%}" for source, error in row["error"].items())
            print(f"{name}, {mode}: {row['measured_s']:.4f} s; predicted: {errors}")
        print(f"{name}, auto: {workloads[name]['auto']}", flush=True)
        rows = [row for workload in workloads.values() for row in workload["placements"].values()]
        errors = {source: statistics.median(abs(row["error"][source]) for row in rows) for source in rows[0]["error"]}
        report(
            "sched-real-runs",
            settings={"rounds": options.rounds, "workloads": {name: list(WORKLOADS[name][1]) for name in workloads}},
            samples_s={},
            comparisons=[],
            findings={"median_error": errors, "workloads": workloads},
            output=options.output,
        )
    print("median error: " + ", ".join(f"{source} {error:.1%}" for source, error in errors.items()))


if __name__ == "__main__":
    main()
