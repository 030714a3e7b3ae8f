"""How well a recipe learns from samples of older weights: the held-out score by `algorithm.max_staleness`.

    python -m benchmarks.learning.staleness sort-grpo FOLDER --uncorrected
    python -m benchmarks.learning.staleness reach-pi0-ppo FOLDER --staleness 0 1

Every run is disaggregated on two CPU slots and takes as many steps as the recipe says. Run folders are kept in FOLDER:
the script started again goes on with those that are missing. Arguments that it does not know are overrides.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.learning.run import result_of, train

from rlinf.run_folder import read_rows

COMMON = {
    "mode": "disaggregated",
    "cluster.num_devices": 2,
    "run.max_minutes": "null",
    "run.stop_at_score": "null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    recipe: str
    staleness: int
    correction: bool
    """Whether the recipe's correction for older weights is on."""

    seed: int

    @property
    def setting(self) -> str:
        return f"k={self.staleness}" + ("" if self.correction else " without correction")

    @property
    def flags(self) -> list[str]:
        keys = COMMON | {"seed": self.seed, "algorithm.max_staleness": self.staleness}
        if not self.correction:
            keys["algorithm.correction"] = "null"
        return [part for key, value in keys.items() for part in (f"--{key}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--uncorrected", action="store_true", help="each k above 0 also without correction")
    args, overrides = parser.parse_known_args()
    rows = []
    for run in _runs(args.recipe, args.staleness, args.seeds, with_uncorrected=args.uncorrected):
        rows.append(trained(run, args.folder, overrides))
        print(
            json.dumps({key: rows[-1][key] for key in ("setting", "seed", "before", "after", "training_s")}), flush=True
        )
    report(
        f"learning-{args.recipe}-staleness",
        settings={"recipe": args.recipe, "overrides": overrides, **COMMON},
        samples_s={},
        comparisons=[],
        findings={"settings": summary(rows), "runs": rows},
    )


def _runs(recipe: str, staleness: Sequence[int], seeds: Sequence[int], *, with_uncorrected: bool) -> Iterator[Run]:
    for seed in seeds:
        for k in staleness:
            yield Run(recipe=recipe, staleness=k, correction=True, seed=seed)
            if k and with_uncorrected:
                yield Run(recipe=recipe, staleness=k, correction=False, seed=seed)


def trained(run: Run, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Does the run, unless its folder holds a result.

    Raises: SystemExit with what the run has printed, when it fails.
    """
    output = folder / f"{run.setting.replace(' ', '-')}-{run.seed}"
    if not (output / "result.json").exists():
        train(run.recipe, output, [*run.flags, *overrides])
    result, evaluations = result_of(output)
    rows = [row["metrics"] for row in read_rows(output / "metrics.jsonl")]
    return {
        "setting": run.setting,
        "seed": run.seed,
        "before": result["before"],
        "after": result["after"],
        "num_steps": result["num_steps"],
        "training_s": result["training_s"],
        "median_step_s": round(statistics.median(row["time/step_s"] for row in rows), 4),
        "staleness_mean": round(statistics.mean(row.get("rollout/staleness_mean", 0.0) for row in rows), 3),
        "evaluations": evaluations,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, float]]:
    """Mean score of the last evaluation by setting, its standard error over the seeds, and the mean training time."""
    summaries = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        of_setting = [row for row in rows if row["setting"] == setting]
        scores = [row["evaluations"][-1] for row in of_setting]
        last = [next(value for key, value in score.items() if key not in ("step", "training_s")) for score in scores]
        summaries[setting] = {
            "score": round(statistics.mean(last), 4),
            "standard_error": round(statistics.stdev(last) / len(last) ** 0.5, 4) if len(last) > 1 else 0.0,
            "lowest": min(last),
            "training_s": round(statistics.mean(row["training_s"] for row in of_setting), 1),
        }
    return summaries


if __name__ == "__main__":
    main()
