"""Does an adapter learn what a model learns? JSON under benchmarks/results.

    python -m benchmarks.learning.lora --seeds 0 1 2

The SFT warm-up of `sort-grpo` leaves a model folder; GRPO goes on from there with `actor.lora`, on several seeds.
Arguments that this script does not know are overrides of the second run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.learning.run import train

from rlinf.run_folder import read_rows

WARM = {"run.num_steps": 1, "run.evaluate_every": 1000}
LORA = {
    "model.architecture": "null",
    "sft_warm_up": "null",
    "run.max_minutes": "null",
    "actor.lora.rank": 16,
    "actor.learning_rate": 3e-3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [learn(seed, overrides, Path(scratch) / str(seed)) for seed in args.seeds]
    report(
        "learning-lora", settings={**LORA, "further": overrides}, samples_s={}, comparisons=[], findings={"runs": runs}
    )


def learn(seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The accuracies of one seed, before and after."""
    _train(folder / "warm", WARM | {"seed": seed})
    model = folder / "warm" / "checkpoints" / "step-000000" / "model"
    _train(folder / "lora", LORA | {"seed": seed, "model.path": model}, overrides)
    result = json.loads((folder / "lora" / "result.json").read_text())
    evaluations = read_rows(folder / "lora" / "evaluations.jsonl")
    summary = {
        "seed": seed,
        "before": result["before"],
        "after": result["after"],
        "num_steps": result["num_steps"],
        "training_s": result["training_s"],
        "evaluations": [{"step": row["step"], "accuracy": row["metrics"]["accuracy"]} for row in evaluations],
    }
    print(json.dumps(summary), flush=True)
    return summary


def _train(output: Path, settings: Mapping[str, object], overrides: Sequence[str] = ()) -> None:
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    train("sort-grpo", output, [*flags, *overrides])


if __name__ == "__main__":
    main()
