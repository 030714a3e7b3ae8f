"""The time of a step against another commit: benchmarks/results/against-commit-NAME.json.

    git worktree add ../earlier COMMIT          then make an environment in it, ../earlier/.venv
    python -m benchmarks.throughput.against_commit ../earlier --name before-overlap

Both commits train the same recipes from the same SFT warm-up, run by run in turn, in mode collocated on one CPU slot.
What counts is the median time of a step without the first few; metrics of both are compared, too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, interleave, report

from rlinf.run_folder import read_rows

OURS, EARLIER = "this commit", "earlier commit"
NUM_LEFT_OUT = 3
COMMON = {"mode": "collocated", "cluster.num_devices": 1, "run.max_minutes": "null", "run.stop_at_score": "null"}
RECIPES = {"sort-grpo": {"run.num_steps": 30}, "pushcube-ppo": {"run.num_steps": 12}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="of the other commit, with its environment in .venv")
    parser.add_argument("--name", required=True, help="of the result")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    commands = {OURS: Path(sys.executable).with_name("rlinf"), EARLIER: options.checkout / ".venv/bin/rlinf"}
    samples_s: dict[str, list[float]] = {}
    are_equal: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            metrics: dict[str, list[Any]] = {}

            def step(side: str, index: int, recipe: str = recipe, metrics: dict[str, list[Any]] = metrics) -> float:
                output = Path(folder) / f"{recipe}-{side[:4]}-{index}"
                metrics[side], seconds = trained(commands[side], recipe, output)
                return seconds

            sides = {f"{recipe}, {side}": (lambda index, side=side, step=step: step(side, index)) for side in commands}
            samples_s |= in_both_orders(sides, options.rounds)
            are_equal[recipe] = metrics[OURS] == metrics[EARLIER]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.checkout, check=True, capture_output=True, text=True
    ).stdout.strip()
    report(
        f"against-commit-{options.name}",
        settings={"earlier": commit, "recipes": RECIPES, **COMMON},
        samples_s=samples_s,
        comparisons=[compare(samples_s, f"{one}, {OURS}", f"{one}, {EARLIER}") for one in options.recipes],
        findings={
            "metrics_are_equal": are_equal,
            "ratio_in_pairs": {
                one: in_pairs(samples_s[f"{one}, {OURS}"], samples_s[f"{one}, {EARLIER}"]) for one in options.recipes
            },
        },
    )


def in_pairs(ours: Sequence[float], earlier: Sequence[float]) -> dict[str, float]:
    """The geometric mean of our seconds over theirs, round by round, and its standard error."""
    logs = [math.log(a / b) for a, b in zip(ours, earlier, strict=True)]
    mean = math.exp(statistics.mean(logs))
    error = mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return {"mean": mean, "standard_error": error, "num_rounds": len(logs)}


def in_both_orders(sides: dict[str, Callable[[int], float]], num_rounds: int) -> dict[str, list[float]]:
    """Rounds of which the second half begins with the last side, since the place in a round makes a difference."""
    forward = interleave(sides, num_warmup=1, num_rounds=num_rounds - num_rounds // 2)
    later = {name: (lambda index, step=step: step(index + num_rounds + 1)) for name, step in reversed(sides.items())}
    backward = interleave(later, num_warmup=0, num_rounds=num_rounds // 2)
    return {name: forward[name] + backward[name] for name in sides}


def trained(command: Path, recipe: str, output: Path) -> tuple[list[Any], float]:
    """Runs a recipe. Returns the metrics of its steps without times, and the median time of a step."""
    overrides = COMMON | RECIPES[recipe]
    overrides |= {"run.evaluate_every": overrides["run.num_steps"], "run.checkpoint_every": overrides["run.num_steps"]}
    flags = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    subprocess.run(
        [str(command), "train", recipe, "--output", str(output), *flags], check=True, capture_output=True, text=True
    )
    rows = read_rows(output / "metrics.jsonl")
    times = [row["metrics"]["time/step_s"] for row in rows[NUM_LEFT_OUT:]]
    values = [
        {name: value for name, value in row["metrics"].items() if not name.startswith(("time/", "perf/"))}
        for row in rows
    ]
    return values, statistics.median(times)


if __name__ == "__main__":
    main()
