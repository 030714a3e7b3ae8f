"""DAgger against plain imitation of demonstrations: success by the number of actions that the expert has named.

    python -m benchmarks.learning.dagger faucet-dagger --seeds 0 1 2

For each seed: the recipe, up to its `run.stop_at_score`; then SFT warm-ups on several numbers of demonstrations, with
as many optimizer steps as the first run took in all, the same policy and held-out starts. Nothing follows such a
warm-up but one update, which the score of "before" does not contain. Arguments that this script does not know are
overrides of the recipe. JSON under benchmarks/results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.learning.run import result_of, train

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.run_folder import read_rows

ONE_UPDATE = ("--run.num_steps", "1", "--algorithm.num_updates", "1", "--run.stop_at_score", "null")
ONE_ACTION = ("--algorithm.max_expert_actions", "1")
"""What is left of DAgger in a run that imitates demonstrations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, nargs="+", default=[5, 10, 20])
    args, overrides = parser.parse_known_args()
    config: Any = load_config(args.recipe, parse_overrides(overrides))
    runs = []
    for seed in args.seeds:
        flags = ["--seed", str(seed), *overrides]
        with tempfile.TemporaryDirectory() as scratch:
            dagger = _dagger(args.recipe, Path(scratch) / "dagger", flags)
            dagger["num_updates"] = config.sft_warm_up.num_steps + dagger["num_steps"] * config.algorithm.num_updates
            print(f"seed {seed}, dagger: {dagger}", flush=True)
            imitation = []
            for count in args.demonstrations:
                folder = Path(scratch) / f"imitation-{count}"
                imitation.append(_imitation(args.recipe, folder, flags, count, dagger["num_updates"]))
                print(f"seed {seed}, {count} demonstrations: {imitation[-1]}", flush=True)
        runs.append({"seed": seed, "dagger": dagger, "imitation": imitation})
    settings = {"recipe": args.recipe, "overrides": overrides}
    report(f"dagger-{args.recipe}", settings=settings, samples_s={}, comparisons=[], findings={"runs": runs})


def _dagger(recipe: str, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    train(recipe, folder, flags)
    result, evaluations = result_of(folder)
    names = ("before", "after", "num_steps", "training_s")
    return {**{name: result[name] for name in names}, "expert_actions": _named(folder), "evaluations": evaluations}


def _imitation(recipe: str, folder: Path, flags: Sequence[str], num_demonstrations: int, num_updates: int) -> Any:
    warm_up = ("--sft_warm_up.num_episodes", str(num_demonstrations), "--sft_warm_up.num_steps", str(num_updates))
    train(recipe, folder, [*flags, *warm_up, *ONE_UPDATE, *ONE_ACTION])
    result, _ = result_of(folder)
    return {"demonstrations": num_demonstrations, "score": result["before"], "expert_actions": _named(folder) - 1}


def _named(folder: Path) -> int:
    """Actions that the expert has named in a run."""
    return int(read_rows(folder / "metrics.jsonl")[-1]["metrics"]["actor/expert_actions"])


if __name__ == "__main__":
    main()
