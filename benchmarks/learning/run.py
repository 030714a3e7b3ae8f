"""Does it learn? A recipe on several seeds, from its first evaluation to its last; JSON under benchmarks/results.

    python -m benchmarks.learning.run sort-grpo --seeds 0 1 2
    python -m benchmarks.learning.run sort-grpo --seeds 0 1 2 --name sort-control --reward.kind random
    python -m benchmarks.learning.run pushcube-ppo --seeds 0 1 2
    python -m benchmarks.learning.run env-ppo --seeds 0 1 2 --run.num_steps 25
    python -m benchmarks.learning.run reach-openvla-ppo --seeds 0 1 2
    python -m benchmarks.learning.run reach-pi0-ppo --seeds 0 1 2
    python -m benchmarks.learning.run reach-pi0-ppo --name reach-pi0-ppo-flow-noise --policy.options.noise flow-noise
    python -m benchmarks.learning.run reach-openvla-ppo --name reach-openvla-ppo-random-rewards \\
        --env.options.reward_mode random
    python -m benchmarks.learning.run tool-calculator --seeds 1 2 --add

Arguments that this script does not know are overrides of the recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS_FOLDER, report

from rlinf.run_folder import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", help="of the result; the recipe's by default")
    parser.add_argument("--add", action="store_true", help="keep runs of other seeds that the result has already")
    args, overrides = parser.parse_known_args()
    name, settings = f"learning-{args.name or args.recipe}", {"recipe": args.recipe, "overrides": overrides}
    earlier = earlier_runs(name, settings, [(None, seed) for seed in args.seeds]) if args.add else []
    with tempfile.TemporaryDirectory() as scratch:
        runs = [_run(args.recipe, seed, overrides, Path(scratch) / str(seed)) for seed in args.seeds]
    runs = sorted([*earlier, *runs], key=lambda run: run["seed"])
    report(name, settings=settings, samples_s={}, comparisons=[], findings={"runs": runs})


def earlier_runs(
    name: str, settings: dict[str, Any], replaced: Sequence[tuple[str | None, int]]
) -> list[dict[str, Any]]:
    """The runs of a result, without those of these (engine, seed). Raises: SystemExit if they had other settings.

    Args:
        replaced: with None, where the result does not compare engines.
    """
    path = RESULTS_FOLDER / f"{name}.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["settings"] != settings:
        sys.exit(f"{path} has runs with {result['settings']}, so runs with {settings} cannot be added to it")
    return [run for run in result["findings"]["runs"] if (run.get("engine"), run["seed"]) not in replaced]


def _run(recipe: str, seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    started_s = time.monotonic()
    train(recipe, folder, ["--seed", str(seed), *overrides])
    result, evaluations = result_of(folder)
    print(
        f"{recipe} seed {seed}: {result['score']} {result['before']:.3f} -> {result['after']:.3f} "
        f"in {result['num_steps']} steps, {result['training_s']:.0f} s",
        flush=True,
    )
    wall_s = time.monotonic() - started_s
    return {"seed": seed, "wall_s": wall_s, **result, "evaluations": evaluations}


def train(recipe: str, output: Path, flags: Sequence[str]) -> None:
    """A run of the recipe in the folder. Raises: SystemExit with what it has printed, when it fails."""
    command = [str(Path(sys.executable).with_name("rlinf")), "train", recipe, "--output", str(output), *flags]
    log = subprocess.run(command, text=True, capture_output=True)
    if log.returncode:
        sys.exit(f"{' '.join(command)} ended with {log.returncode}:\n{log.stdout}\n{log.stderr}")


def result_of(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of the run in a folder, and its evaluations: step, seconds of training, score."""
    result = json.loads((output / "result.json").read_text())
    evaluations = [
        {"step": row["step"], "training_s": row["time_s"], result["score"]: row["metrics"][result["score"]]}
        for row in read_rows(output / "evaluations.jsonl")
    ]
    return result, evaluations


if __name__ == "__main__":
    main()
