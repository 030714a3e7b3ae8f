"""Training steps of 512 whole episodes (`env.episodes_per_step`) on 16 simulators and on 64, and on 16 that wait for
each other: time, memory, idle simulators, and whether the numbers are the same.

    python -m benchmarks.throughput.whole_episodes

The simulators are those of `simulators_of_any_length.py`. `meta-world` simulates reach-v3 in one process: its memory is
that of real scenes, and its time that of one core, which has as much to do on any number of simulators. Simulators of
`sleeping` are processes of their own that sleep for every action, as if each had a core: there time is saved where
simulators are not idle. `in waves` is the same code without refill: the next episodes begin when all simulators have
ended theirs. Each side is a process of its own: one training step, of which acting is timed, and the weights after it.
Needs rlinf-envs[metaworld].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.simulators_of_any_length import MEDIAN_ACTIONS, MOST_ACTIONS, SIGMA, SLEEP_S

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.program.recipe import make_workers
from rlinf_workers import StepContext
from rlinf_workers.roles import EmbodiedActor, EmbodiedRollout, Environment
from rlinf_workers.roles.embodied import environment
from rlinf_workers.roles.embodied.dealt_group import DealtGroup
from rlinf_workers.roles.records.embodied import Trajectory

MODULE = "benchmarks.throughput.whole_episodes"
SIMULATORS = "benchmarks.throughput.simulators_of_any_length"
NUM_EPISODES, GROUP_SIZE = 512, 8
SIDES = {
    "meta-world, 16": ("meta-world", 16, False),
    "meta-world, 16 in waves": ("meta-world", 16, True),
    "meta-world, 64": ("meta-world", 64, False),
    "sleeping, 16": ("sleeping", 16, False),
    "sleeping, 16 in waves": ("sleeping", 16, True),
}
"""Side -> simulators, their number, and whether they wait for each other."""


class Waves(DealtGroup):
    """Simulators that take their next episodes together, when all have ended theirs."""

    def free_rows(self) -> list[int]:
        free = super().free_rows()
        return free if len(free) == self.env.num_envs else []


def overrides_of(simulator: str, number: int) -> dict[str, Any]:
    return {
        "env.kind": "import",
        "env.id": f"{SIMULATORS}:{'reaching' if simulator == 'meta-world' else 'sleeping'}",
        "env.num_envs": number,
        "env.num_groups": 1,
        "env.num_processes": 0 if simulator == "meta-world" else number,
        "env.num_steps": MOST_ACTIONS,
        "env.max_episode_steps": MOST_ACTIONS,
        "env.episodes_per_step": NUM_EPISODES,
        "env.episodes_megabytes": 0,
        "algorithm.name": "grpo",
        "algorithm.group_size": GROUP_SIZE,
        "algorithm.num_epochs": 1,
        "actor.num_shards": 1,
    }


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def one_step(side: str) -> dict[str, Any]:
    """Makes the workers and does a training step in this process."""
    simulator, number, in_waves = SIDES[side]
    if in_waves:
        environment.DealtGroup = Waves
    keys = [f"--{key}={value}" for key, value in overrides_of(simulator, number).items()]
    with tempfile.TemporaryDirectory() as folder:
        before_mb = resident_mb()
        _, workers = make_workers(load_config("env-ppo", parse_overrides(keys)), Path(folder))
        env, policy = cast(Environment, workers["env"]), cast(EmbodiedRollout, workers["policy"])
        actor = cast(EmbodiedActor, workers["actor"])
        workers.sync("actor", "policy")
        workers.begin(StepContext(step=0, phase="train", seed=0, num_items=0))
        began_s = time.perf_counter()
        trajectories: list[Trajectory] = []
        observations, num_rounds = env.begin_segments(), 0
        while observations:
            action, complete = policy.act_on(observations.pop(0))
            observations += [] if action is None else env.advance(action)
            trajectories += complete
            num_rounds += 1
        acting_s, resident = time.perf_counter() - began_s, resident_mb()
        update(actor, trajectories)
        metrics = workers.metrics()
        weights = b"".join(value.detach().numpy().tobytes() for _, value in sorted(actor.weights().items()))
        workers.close()
    return {
        "acting_s": acting_s,
        "rounds": num_rounds - 1,
        "idle_fraction": metrics.pop("env/idle_fraction"),
        "before_workers_mb": before_mb,
        "resident_mb": resident,
        "weights": hashlib.sha256(weights).hexdigest(),
        "metrics": {name: value for name, value in metrics.items() if name.startswith(("env/", "actor/"))},
    }


def update(actor: EmbodiedActor, trajectories: list[Trajectory]) -> None:
    batches = actor.begin_step(trajectories)
    for rows in actor.minibatches(batches):
        actor.begin_update()
        for batch in actor.micro_batches(batches, rows):
            actor.learn(batch)
        if not actor.end_update():
            break
    actor.end_step(batches)


def measured(side: str) -> dict[str, Any]:
    """Does a step of one side in a process of its own."""
    done = subprocess.run([sys.executable, "-m", MODULE, "--side", side], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def findings_of(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by side; of each simulator how much less idle refill is, and whether all its runs have one result."""
    sides = {
        side: {
            name: statistics.median(one[name] for one in of_side)
            for name in ("rounds", "idle_fraction", "before_workers_mb", "resident_mb")
        }
        for side, of_side in results.items()
    }
    by_simulator: dict[str, Any] = {}
    for simulator in ("meta-world", "sleeping"):
        all_runs = [one for side, of_side in results.items() if SIDES[side][0] == simulator for one in of_side]
        with_refill, in_waves = (sides[f"{simulator}, 16{rest}"]["idle_fraction"] for rest in ("", " in waves"))
        by_simulator[simulator] = {
            "less_idle_with_refill": 1 - with_refill / in_waves,
            "weights": sorted({one["weights"] for one in all_runs}),
            "metrics": [json.loads(text) for text in sorted({json.dumps(one["metrics"]) for one in all_runs})],
        }
    grown_mb = sides["meta-world, 64"]["resident_mb"] - sides["meta-world, 16"]["resident_mb"]
    return {"sides": sides, "simulators": by_simulator, "mb_of_a_meta_world_simulator": grown_mb / 48}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help="do a step of this side and print what was seen")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(one_step(args.side)))
        return
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}

    def step_of(side: str, _: int) -> float:
        results[side].append(measured(side))
        return results[side][-1]["acting_s"]

    steps = {side: partial(step_of, side) for side in SIDES}
    samples_s = interleave(steps, num_warmup=0, num_rounds=args.rounds)
    pairs = [
        ("meta-world, 16", "meta-world, 64"),
        ("meta-world, 16", "meta-world, 16 in waves"),
        ("sleeping, 16", "sleeping, 16 in waves"),
    ]
    settings = {
        "num_episodes": NUM_EPISODES,
        "group_size": GROUP_SIZE,
        "median_actions": MEDIAN_ACTIONS,
        "sigma": SIGMA,
        "most_actions": MOST_ACTIONS,
        "sleep_s": SLEEP_S,
    }
    report(
        "whole-episodes",
        settings=settings,
        samples_s=samples_s,
        comparisons=[compare(samples_s, *pair) for pair in pairs],
        findings=findings_of(results),
        output=args.output,
    )


if __name__ == "__main__":
    main()
