"""Simulators that a step of whole episodes does not need any more begin the next one (docs/decisions/059): time of a
step and idle simulators, with and without, and whether the numbers are the same.

    python -m benchmarks.throughput.episodes_ahead

Runs of `rlinf train` on simulators that sleep 10 ms for every action and end their episodes at log-normal lengths
(`simulators_of_any_length.py`), in processes of their own. Training takes a few hundredths of a second: simulation is
what a step takes. In `k = 1, waiting` the stages are not declared `ahead`: simulators wait for the longest episodes of
their step, as they do with `max_staleness` 0. Sides take turns; the first step, which starts processes, and the last,
behind which an evaluation follows, are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.simulators_of_any_length import MEDIAN_ACTIONS, MOST_ACTIONS, SIGMA, SLEEP_S

MODULE = "benchmarks.throughput.episodes_ahead"
NUM_STEPS, NUM_EPISODES, NUM_SIMULATORS = 10, 32, 16
SIDES = {"k = 0": (0, False), "k = 1, waiting": (1, False), "k = 1": (1, True)}
"""Side -> max_staleness, and whether simulators begin the next step."""
KEYS = {
    "mode": "disaggregated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": True,
    "env.kind": "import",
    "env.id": "benchmarks.throughput.simulators_of_any_length:sleeping",
    "env.num_envs": NUM_SIMULATORS,
    "env.num_groups": 2,
    "env.num_processes": NUM_SIMULATORS // 2,
    "env.num_steps": MOST_ACTIONS,
    "env.max_episode_steps": MOST_ACTIONS,
    "env.episodes_per_step": NUM_EPISODES,
    "env.num_eval_episodes": 2,
    "algorithm.name": "grpo",
    "algorithm.group_size": 4,
    "algorithm.num_epochs": 1,
    "actor.num_shards": 1,
    "run.num_steps": NUM_STEPS,
    "run.evaluate_every": NUM_STEPS,
    "run.checkpoint_every": NUM_STEPS,
    "run.stop_at_score": "null",
}


def train(side: str, folder: Path) -> None:
    """Trains in this process."""
    from rlinf.cli.main import main
    from rlinf.config.embodied import EmbodiedConfig

    max_staleness, is_ahead = SIDES[side]
    if not is_ahead:
        EmbodiedConfig.begins_ahead = property(lambda config: False)  # type: ignore[method-assign]
    keys = {**KEYS, "algorithm.max_staleness": max_staleness}
    assert (
        main(["train", "env-ppo", "--output", str(folder), *(f"--{key}={value}" for key, value in keys.items())]) == 0
    )


def measured(side: str) -> dict[str, Any]:
    """Trains one side in a process of its own."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        command = [sys.executable, "-m", MODULE, "--side", side, "--folder", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        weights = (folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model" / "model.safetensors").read_bytes()
    inner = rows[1:-1]
    return {
        "step_s": statistics.mean(row["time/step_s"] for row in inner),
        "idle_fraction": statistics.mean(row["env/idle_fraction"] for row in inner),
        "weights": hashlib.sha256(weights).hexdigest(),
        "returns": [row["env/return"] for row in rows],
    }


def findings_of(results: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sides = {
        side: {name: statistics.median(one[name] for one in of_side) for name in ("step_s", "idle_fraction")}
        for side, of_side in results.items()
    }
    overlapping = [one for side, of_side in results.items() if SIDES[side][0] for one in of_side]
    return {
        "sides": sides,
        "weights with k = 1": sorted({one["weights"] for one in overlapping}),
        "returns with k = 1": sorted({tuple(one["returns"]) for one in overlapping}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help="train this side into --folder")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.side:
        return train(args.side, args.folder)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}

    def step_of(side: str, _: int) -> float:
        results[side].append(measured(side))
        return results[side][-1]["step_s"]

    samples_s = interleave({side: partial(step_of, side) for side in SIDES}, num_warmup=0, num_rounds=args.rounds)
    report(
        "episodes-ahead",
        settings={
            "num_episodes": NUM_EPISODES,
            "num_simulators": NUM_SIMULATORS,
            "median_actions": MEDIAN_ACTIONS,
            "sigma": SIGMA,
            "most_actions": MOST_ACTIONS,
            "sleep_s": SLEEP_S,
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, "k = 1", "k = 1, waiting"), compare(samples_s, "k = 1", "k = 0")],
        findings=findings_of(results),
        output=args.output,
    )


if __name__ == "__main__":
    main()
