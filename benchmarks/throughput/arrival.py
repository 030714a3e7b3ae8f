"""How soon the actor begins when groups leave the rollout one by one: benchmarks/results/arrival.json.

    PYTHONPATH=. python -m benchmarks.throughput.arrival

`sort-grpo` with completions of log-normal length (planted.py), rollout and actor on a CPU slot each with one thread
each, random rewards, micro-batches of one group. Three flows take turns, each in processes of its own:

    as they come    rows are refilled, a group leaves when it is whole, and the actor takes what comes
                    (actor.group_order=arrival)
    in order        the same, but the actor learns from groups in the order of their prompts
    whole batch     the engine as it is by default, and all groups leave together

`shortest group` is the same refilling engine alone in this process, with the same prompts, until its first group is
whole. All times begin where the rollout begins to compute. The planner predicts the later half of the steps from what
was measured in the first half.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.sched.real_runs import NUM_WARMUP, Placed, started
from benchmarks.throughput.planted import SIGMA, PlantedEngine

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.planning.plans import make_plans
from rlinf_sched import simulate
from rlinf_workers import COMPUTE_SPAN, FlowRun
from rlinf_workers.roles import RolloutSettings

ENGINE = "benchmarks.throughput.planted:PlantedEngine"
FIRST = "first micro-batch"
AS_THEY_COME, IN_ORDER, WHOLE_BATCH, SHORTEST = "as they come", "in order", "whole batch", "shortest group"


@dataclass
class Timed(Placed):
    """A placement whose runs say when the actor began."""

    first_s: list[float] = field(default_factory=list)
    """Seconds from the rollout's first computing to the actor's."""
    step_s: list[float] = field(default_factory=list)
    num_observed: int = 0
    """Steps that are the profile; those behind them are predicted."""

    def step(self, index: int) -> float:
        run = self._run(index)
        if index >= NUM_WARMUP:
            self.first_s.append(began_s(run, "actor") - began_s(run, "rollout"))
            self.step_s.append(run.duration_s)
            if len(self.step_s) <= self.num_observed:
                self.profiler.observe(run, self.plan)
        return run.duration_s


def began_s(run: FlowRun, stage: str) -> float:
    """When a stage first computed on items."""
    return min(
        span.start_s for span in run.spans if span.category == COMPUTE_SPAN and span.name == stage and span.num_items
    )


def overrides_of(options: argparse.Namespace, name: str) -> list[str]:
    refill = name != WHOLE_BATCH
    granularity = "{rollout: 1, reward: 1, actor: 1}" if refill else "{rollout: 0, reward: 0, actor: 1}"
    return [
        *("--mode", "disaggregated", "--cluster.num_devices", "2", "--sft_warm_up", "null", "--reward.kind", "random"),
        *("--rollout.num_prompts", str(options.prompts), "--algorithm.group_size", str(options.group_size)),
        *("--rollout.max_new_tokens", str(options.new_tokens), "--actor.micro_batch_groups", "1"),
        *("--model.architecture.max_positions", str(options.new_tokens + 64), "--actor.num_shards", "1"),
        *("--rollout.engine", ENGINE, "--plan.granularity", granularity),
        f"--rollout.engine_options={{refill: {str(refill).lower()}, mean_tokens: {options.mean_tokens}}}",
        *("--actor.group_order", "arrival" if name == AS_THEY_COME else "index"),
    ]


def start(stack: ExitStack, options: argparse.Namespace, name: str, folder: Path) -> Timed:
    folder.mkdir()
    config = load_config("sort-grpo", parse_overrides(overrides_of(options, name)))
    job = jobs.prepare(config)
    flows = job.build(folder)
    job.write_inputs(folder)
    planned = make_plans(job, flows, folder)
    placed = stack.enter_context(started(job, flows, planned.plans[flows.train.name], folder, planned.cluster))
    return Timed(
        **{key: getattr(placed, key) for key in ("job", "flows", "executor", "plan", "profiler")},
        num_observed=options.rounds // 2,
    )


@dataclass
class Alone:
    """The refilling engine by itself, until a group is whole."""

    side: Timed
    first_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        settings = self.side.flows.train.workers["rollout"].arguments[0]
        assert isinstance(settings, RolloutSettings), "of the reasoning job"
        self._sampling = settings.train
        options: dict[str, Any] = dict(settings.engine_options)
        self._engine = PlantedEngine(
            settings.model, torch.device("cpu"), max_prompt_tokens=settings.max_prompt_tokens, **options
        )

    def step(self, index: int) -> float:
        prompts = self.side.job.feeds(index)["prompts"]
        missing = {prompt.index: self._sampling.group_size for prompt in prompts}
        began = time.perf_counter()
        self._engine.submit(prompts[:1], self._sampling, seed=0, step=index)
        self._engine.submit(prompts[1:], self._sampling, seed=0, step=index)
        while all(missing.values()):
            for part in self._engine.finished():
                missing[part.index] -= len(part.members)
        seconds = time.perf_counter() - began
        while self._engine.finished():
            pass
        if index >= NUM_WARMUP:
            self.first_s.append(seconds)
        return seconds


def prediction(side: Timed) -> dict[str, float]:
    """The step by the profile of the first steps, beside the later ones."""
    timeline = simulate(side.measured().problem, side.plan)
    measured_s = statistics.median(side.step_s[side.num_observed :])
    return {"predicted_s": timeline.step_s, "measured_s": measured_s, "error": timeline.step_s / measured_s - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mean-tokens", type=float, default=64.0)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlinf-arrival-") as scratch, ExitStack() as stack:
        names = (AS_THEY_COME, IN_ORDER, WHOLE_BATCH)
        sides = {name: start(stack, options, name, Path(scratch, name.replace(" ", "-"))) for name in names}
        alone = Alone(sides[AS_THEY_COME])
        steps = {name: side.step for name, side in sides.items()} | {SHORTEST: alone.step}
        samples_s = interleave(steps, num_warmup=NUM_WARMUP, num_rounds=options.rounds)
        predictions = {name: prediction(side) for name, side in sides.items()}
    first_s = {f"{FIRST}, {name}": side.first_s for name, side in sides.items()} | {SHORTEST: alone.first_s}
    findings = {
        "first_micro_batch_s": {name: statistics.median(times) for name, times in first_s.items()},
        "predictions": predictions,
        "first_s": first_s,
    }
    for name, finding in findings.items():
        print(name, finding)
    report(
        "arrival",
        settings={
            "recipe": "sort-grpo",
            "prompts": options.prompts,
            "group_size": options.group_size,
            "mean_tokens": options.mean_tokens,
            "sigma": SIGMA,
            "max_new_tokens": options.new_tokens,
            "rounds_profiled": options.rounds // 2,
            "overrides": {name: overrides_of(options, name) for name in names},
        },
        samples_s={name: samples for name, samples in samples_s.items() if name != SHORTEST},
        comparisons=[
            *(compare(first_s, f"{FIRST}, {name}", SHORTEST) for name in names),
            *(compare(samples_s, WHOLE_BATCH, name) for name in names[:2]),
        ],
        findings=findings,
        output=options.output,
    )


if __name__ == "__main__":
    main()
