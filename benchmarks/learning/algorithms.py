"""Every algorithm on one job, three seeds each from the same start: the held-out score by step, one JSON a run.

    python -m benchmarks.learning.algorithms sorting
    python -m benchmarks.learning.algorithms sorting gspo cispo --seeds 3 4
    python -m benchmarks.learning.algorithms pushcube grpo
    python -m benchmarks.learning.curves

A run is `rlinf train RECIPE --algorithm.name NAME` with a fixed number of steps and a constant learning rate; what else
differs from the recipe and the preset stands in `CHANGES`. Files go to benchmarks/results/learning; a run whose file is
there is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.run_folder import read_rows

RESULTS = Path(__file__).parents[1] / "results" / "learning"
RLINF = Path(sys.executable).with_name("rlinf")
KEPT = ("actor/clip_fraction", "actor/groups_without_advantage", "critic/explained", "reward/mean", "env/return")
"""Metrics of training that are kept beside each evaluation, as means over the steps since the one before."""

RECIPES = {"sorting": "sort-grpo", "pushcube": "pushcube-ppo"}
NUM_STEPS = {"sorting": 60, "pushcube": 120}
COMMON: dict[str, dict[str, Any]] = {
    "sorting": {"run.evaluate_every": 10, "actor.lr_decay_steps": "null"},
    "pushcube": {"run.evaluate_every": 20},
}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "sorting": {
        "ppo": {},
        "grpo": {},
        "dr_grpo": {},
        # room for answers that are too long, so that their penalty has something to do: a right one has 9 tokens
        "dapo": {"rollout.max_new_tokens": 12, "algorithm.overlong_buffer_tokens": 3},
        "rloo": {},
        "reinforce_plus_plus": {},
        "reinforce_plus_plus_baseline": {},
        "gspo": {},
        "cispo": {},
    },
    "pushcube": {
        "grpo": {
            "algorithm.advantage": "grpo_steps",
            "algorithm.num_minibatches": 8,
            "env.num_envs": 16,
            "env.num_groups": 2,
        },
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    job: str
    algorithm: str
    seed: int

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.job}-{self.algorithm}-{self.seed}.json"

    @property
    def overrides(self) -> dict[str, Any]:
        steps = NUM_STEPS[self.job]
        fixed = {
            "seed": self.seed,
            "mode": "collocated",
            "run.num_steps": steps,
            "run.max_minutes": "null",
            "run.checkpoint_every": steps,
            "run.stop_at_score": "null",
        }
        return {"algorithm.name": self.algorithm} | fixed | COMMON[self.job] | CHANGES[self.job][self.algorithm]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=list(RECIPES))
    parser.add_argument("names", nargs="*", help="algorithms; all of the job where none is given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for name in arguments.names or CHANGES[arguments.job]:
            train(Run(job=arguments.job, algorithm=name, seed=seed))


def train(run: Run) -> None:
    """Trains and writes the curve, unless it is there.

    Raises: subprocess.CalledProcessError when the run fails; what it printed is on the terminal.
    """
    if run.file.exists():
        return
    flags = [part for key, value in run.overrides.items() for part in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        subprocess.run([RLINF, "train", RECIPES[run.job], "--output", folder, *flags], check=True)
        record = curve(run, folder)
    RESULTS.mkdir(parents=True, exist_ok=True)
    run.file.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{run.job} {run.algorithm} seed {run.seed}: {[row[record['score']] for row in record['evaluations']]}",
        flush=True,
    )


def curve(run: Run, folder: Path) -> dict[str, Any]:
    """The evaluations of a run folder, with the training metrics up to each."""
    score = json.loads((folder / "result.json").read_text())["score"]
    steps, rows, begin = read_rows(folder / "metrics.jsonl"), [], 0
    for evaluation in read_rows(folder / "evaluations.jsonl"):
        end = evaluation["step"]
        window = [row["metrics"] for row in steps if begin <= row["step"] < end]
        means = {
            name: round(sum(values) / len(values), 6)
            for name in KEPT
            if (values := [metrics[name] for metrics in window if name in metrics])
        }
        rows.append({"step": end, score: evaluation["metrics"][score], **means})
        begin = end
    return {"recipe": RECIPES[run.job], "score": score, "overrides": run.overrides, "evaluations": rows}


if __name__ == "__main__":
    main()
