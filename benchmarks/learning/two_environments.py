"""A run with its rollout in other Python environments: `python -m benchmarks.learning.two_environments PYTHON...`.

20 steps of `sort-grpo` with all roles in this environment, twice, and once with the rollout under each of the
interpreters that are named. Every metric of every step and evaluation is compared with the first run's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import report

NUM_STEPS = 20
SETTINGS = {
    "mode": "collocated",
    "run.num_steps": NUM_STEPS,
    "run.evaluate_every": 10,
    "run.stop_at_score": "null",
    "sft_warm_up.max_steps": 40,
    "sft_warm_up.reuse": "false",
}
FILES = ("metrics.jsonl", "evaluations.jsonl")
Metrics = dict[tuple[str, int], dict[str, float]]
"""(file, step) -> metrics."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="interpreter of an environment with rlinf-workers")
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/two-environments.json)")
    arguments = parser.parse_args()
    expected, _ = run(None)
    findings: dict[str, Any] = {"again, one environment": differences(expected, run(None)[0])}
    for python in arguments.pythons:
        metrics, environment = run(python)
        name = ", ".join(f"{key} {environment[key]}" for key in ("python", "torch", "transformers"))
        findings[f"rollout in {name}"] = differences(expected, metrics)
    for name, finding in findings.items():
        print(f"{name}: {finding['num_equal']} of {finding['num_compared']} values equal to the bit")
        for metric, difference in finding["largest"].items():
            print(f"  {metric:<32} {difference['absolute']:.3g} absolute, {difference['relative']:.3g} relative")
    settings = {"recipe": "sort-grpo", **SETTINGS}
    report(
        "two-environments", settings=settings, samples_s={}, comparisons=[], findings=findings, output=arguments.output
    )


def run(python: str | None) -> tuple[Metrics, Mapping[str, Any]]:
    """The metrics of a run, and the environment of its rollout as the manifest has it."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "run"
        flags = [part for key, value in SETTINGS.items() for part in (f"--{key}", str(value))]
        flags += ["--venvs.rollout", python] if python else []
        rlinf = str(Path(sys.executable).with_name("rlinf"))
        subprocess.run([rlinf, "train", "sort-grpo", "--output", str(output), *flags], check=True)
        manifest = json.loads((output / "manifest.json").read_text())
        metrics: Metrics = {}
        for name in FILES:
            for row in map(json.loads, (output / name).read_text().splitlines()):
                metrics[name, row["step"]] = {
                    key: math.nan if value is None else value
                    for key, value in row["metrics"].items()
                    if not key.startswith(("time/", "perf/"))
                }
        return metrics, manifest["sessions"][-1].get("venvs", {}).get("rollout", {})


def differences(expected: Metrics, actual: Metrics) -> dict[str, Any]:
    """The largest difference of each metric that has one, and how many values are equal to the bit."""
    assert expected.keys() == actual.keys(), "the runs have other steps"
    num_compared, num_equal, largest = 0, 0, {}
    first: int | None = None
    for place, metrics in expected.items():
        for metric, value in metrics.items():
            other = actual[place][metric]
            num_compared += 1
            if value == other or (math.isnan(value) and math.isnan(other)):
                num_equal += 1
                continue
            first = place[1] if first is None else min(first, place[1])
            absolute = abs(value - other)
            if absolute > largest.get(metric, {"absolute": -1.0})["absolute"]:
                relative = absolute / max(abs(value), abs(other))
                largest[metric] = {"absolute": absolute, "relative": relative, "file": place[0], "step": place[1]}
    return {"num_compared": num_compared, "num_equal": num_equal, "first_step": first, "largest": largest}


if __name__ == "__main__":
    main()
