"""Environment and policy pipelined in halves against the same in turn (PushCube).

    python -m benchmarks.throughput.pipelining [--draw docs/images/pipelining.svg]

Four environment groups live in two env processes. Pipelined: groups travel one by one, so that a process simulates one
of its groups while the policy answers the other. In turn: env and policy wait for all groups of each other, so that
nothing overlaps. Both flows run on the same processes, in turn within one run, and make the same trajectories to the
bit. Measured for a hybrid placement (env on slot 0, policy on slot 1) and a collocated one (both on both slots); what
is timed is the part of a training step that env and policy do together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, compare, interleave, mean_seconds, report
from benchmarks.throughput.timeline import Panel, draw

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.embodied.job import EmbodiedJob
from rlinf.machine import this_machine
from rlinf.processes.env_vars import worker_env_vars
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_sched import Cluster, Plan, plan_for_mode
from rlinf_workers import Executor, Flow, Span, StepContext
from rlinf_workers.roles import Trajectory

NUM_ENV_RANKS = 2
PIPELINED, IN_TURN = "pipelined", "in turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The devices on which env and policy are."""

    name: str
    devices: dict[str, tuple[int, ...]]
    num_ranks: dict[str, int]


PLACEMENTS = (
    Placement(name="hybrid", devices={"env": (0,), "policy": (1,)}, num_ranks={"env": NUM_ENV_RANKS, "policy": 1}),
    Placement(
        name="collocated",
        devices={"env": (0, 1), "policy": (0, 1)},
        num_ranks={"env": NUM_ENV_RANKS, "policy": NUM_ENV_RANKS},
    ),
)


@dataclass
class Side:
    """One flow under one plan."""

    executor: Executor
    flow: Flow
    seed: int
    num_warmup: int
    spans: list[Span] = field(default_factory=list)
    last_spans: list[Span] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)

    def step(self, index: int) -> float:
        context = StepContext(step=index, phase="train", seed=self.seed, num_items=0)
        run = self.executor.run(self.flow, context=context)
        self.trajectories, self.last_spans = run.collected["trajectories"], run.spans
        if index >= self.num_warmup:
            self.spans.extend(run.spans)
        return run.duration_s


def env_and_policy(train: Flow, name: str) -> Flow:
    """The cycle of the training flow; the trajectories come to the driver."""
    flow = Flow(name).workers_of(train, "env", "policy")
    for stage in ("env", "policy"):
        definition = train.stages[stage]
        worker_class = train.workers[stage].worker_class
        method: Callable[..., Any] = getattr(worker_class, definition.method)
        flow.stage(
            stage,
            method,
            reads=definition.stage.reads,
            writes=definition.stage.writes,
            dispatch=definition.stage.dispatch,
        )
    return flow


def make_plan(flow: Flow, cluster: Cluster, placement: Placement, num_groups: int) -> Plan:
    """Granularity one group, or all groups that a rank has."""
    at_once = {
        stage: 1 if flow.name == PIPELINED else num_groups // num_ranks
        for stage, num_ranks in placement.num_ranks.items()
    }
    return plan_for_mode(
        flow.graph(),
        cluster,
        "collocated" if placement.name == "collocated" else "hybrid",
        granularity=at_once,
        devices=placement.devices,
        num_ranks=placement.num_ranks,
    )


def measure_placement(
    placement: Placement, options: argparse.Namespace, overrides: Sequence[str]
) -> tuple[dict[str, list[float]], Comparison, dict[str, Side]]:
    """Both sides on the processes of one placement."""
    fixed = ["--cluster.num_devices=2", f"--env.num_groups={2 * NUM_ENV_RANKS}", *overrides]
    config = load_config("pushcube-ppo", parse_overrides(fixed))
    assert isinstance(config, EmbodiedConfig), "the recipe is an embodied one"
    job = EmbodiedJob(config, this_machine())
    train, cluster = job.build(Path()).train, Cluster.cpu_slots(2)
    with Executor(cluster=cluster, env_vars=worker_env_vars(job.config.cluster)) as executor:
        sides: dict[str, Side] = {}
        for name in (IN_TURN, PIPELINED):
            flow = env_and_policy(train, name)
            executor.start(flow, make_plan(flow, cluster, placement, job.config.env.num_groups))
            sides[name] = Side(executor, flow, job.config.seed, options.warmup)
        steps = {f"{placement.name}, {name}": side.step for name, side in sides.items()}
        samples_s = interleave(steps, num_warmup=options.warmup, num_rounds=options.rounds)
        _check_equal(sides)
    return samples_s, compare(samples_s, *steps), sides


def _check_equal(sides: dict[str, Side]) -> None:
    for one, other in zip(sides[IN_TURN].trajectories, sides[PIPELINED].trajectories, strict=True):
        for name, values in one.fields.items():
            assert_bitwise_equal(values, other.fields[name])
        assert_bitwise_equal(one.actions, other.actions)
        assert_bitwise_equal(one.rewards, other.rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--draw", type=Path, default=None, help="file for a timeline of the hybrid placement, SVG")
    parser.add_argument("--draw-ms", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=None)
    options, overrides = parser.parse_known_args()
    samples_s: dict[str, list[float]] = {}
    comparisons: list[Comparison] = []
    seconds: dict[str, dict[str, float]] = {}
    for placement in PLACEMENTS:
        samples, comparison, sides = measure_placement(placement, options, overrides)
        samples_s |= samples
        comparisons.append(comparison)
        seconds |= {f"{placement.name}, {name}": mean_seconds(s.spans, options.rounds) for name, s in sides.items()}
        if placement.name == "hybrid" and options.draw:
            panels = [Panel(title=name, spans=side.last_spans) for name, side in sides.items()]
            draw(panels, options.draw, window_s=options.draw_ms / 1000)
    report(
        "pipelining",
        settings={
            "recipe": "pushcube-ppo",
            "overrides": overrides,
            "env_ranks": NUM_ENV_RANKS,
            "warmup": options.warmup,
        },
        samples_s=samples_s,
        comparisons=comparisons,
        findings={"seconds_by_span": seconds, "same_trajectories": True},
        output=options.output,
    )


if __name__ == "__main__":
    main()
