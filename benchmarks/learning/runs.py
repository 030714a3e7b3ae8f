"""One training run from the command line, and its curve as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "learning"
RLINF = Path(sys.executable).with_name("rlinf")
KEPT = ("actor/clip_fraction", "actor/groups_without_advantage", "critic/explained", "reward/mean")
"""Metrics of training that are kept beside the evaluations, as a mean over the steps before each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recipe, an algorithm and a seed."""

    job: str
    recipe: str
    algorithm: str
    seed: int
    overrides: dict[str, Any]

    @property
    def file_name(self) -> str:
        return f"{self.job}-{self.algorithm}-{self.seed}.json"


def run_once(run: Run, folder: Path, results: Path) -> None:
    """Trains and writes the curve, unless it is there already.

    Raises: subprocess.CalledProcessError when the run fails; what it printed is shown.
    """
    file = results / run.file_name
    if file.exists():
        return
    flags = [part for key, value in run.overrides.items() for part in (f"--{key}", str(value))]
    subprocess.run([RLINF, "train", run.recipe, "--output", folder, *flags], check=True)
    results.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(curve(run, folder), indent=1) + "\n")
    print(f"{run.job} {run.algorithm} seed {run.seed}: {file.name}", flush=True)


def curve(run: Run, folder: Path) -> dict[str, Any]:
    """The evaluations of a run folder, with the training metrics up to each."""
    evaluations, steps = _rows(folder / "evaluations.jsonl"), _rows(folder / "metrics.jsonl")
    score = json.loads((folder / "result.json").read_text())["score"]
    rows, begin = [], 0
    for evaluation in evaluations:
        end = evaluation["step"]
        window = [row["metrics"] for row in steps if begin <= row["step"] < end]
        means = {
            name: round(sum(found) / len(found), 6)
            for name in KEPT
            if (found := [metrics[name] for metrics in window if name in metrics])
        }
        rows.append({"step": end, score: evaluation["metrics"][score], **means})
        begin = end
    return {"recipe": run.recipe, "score": score, "overrides": run.overrides, "evaluations": rows}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
