"""Runs through Ray on two pretended nodes against runs of the local launcher.

    python -m benchmarks.throughput.ray_nodes

Jobs of a few steps of sort-grpo and pushcube-ppo on four slots, in the three modes. Ray has two nodes with two CPUs
each, and each counts as a host of its own: items and weights go over the network. The launchers take turns, on the same
cores. Metrics, evaluations and weights have to be equal to the bit. What is timed is a training step: the median of
those of a run but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, report

sys.path.append(str(Path(__file__).parents[2] / "integration_tests"))
from command_line import SHORT_PUSH, SHORT_SORT, numbers, train  # pyright: ignore[reportMissingImports]

WARM_START = {key: value for key, value in SHORT_SORT.items() if key.startswith("sft_warm_up.")}
RECIPES: dict[str, dict[str, Any]] = {
    "sort-grpo": WARM_START | {"run.num_steps": 6, "run.evaluate_every": 6, "task.num_held_out": 64},
    "pushcube-ppo": SHORT_PUSH | {"run.num_steps": 5, "run.evaluate_every": 5, "env.num_steps": 50},
}
MODES = ("collocated", "disaggregated", "hybrid")
SLOTS = {"cluster.num_devices": 4, "cluster.oversubscribe": "true"}
NODE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    samples_s: dict[str, list[float]] = {}
    try:
        for _ in range(2):
            nodes.add_node(**NODE)
        by_ray = {"cluster.launcher": "ray", "cluster.launcher_options": f"{{address: '{nodes.address}'}}"}
        for _ in range(arguments.rounds):
            for recipe in arguments.recipes:
                for mode in MODES:
                    settings = RECIPES[recipe] | SLOTS | {"mode": mode}
                    local = _run(recipe, settings, f"{recipe}, {mode}, local", samples_s)
                    there = _run(recipe, settings | by_ray, f"{recipe}, {mode}, Ray", samples_s)
                    assert there == local, f"{recipe}, {mode}: other numbers than on one machine"
    finally:
        nodes.shutdown()
    cases = [side.removesuffix(", Ray") for side in samples_s if side.endswith(", Ray")]
    report(
        "ray-nodes",
        settings={"nodes": 2, "slots_of_a_node": 2, "rounds": arguments.rounds},
        samples_s=samples_s,
        comparisons=[compare(samples_s, f"{case}, Ray", f"{case}, local") for case in cases],
        findings={"numbers_are_equal": True},
        output=arguments.output,
    )


def _run(recipe: str, settings: dict[str, Any], side: str, samples_s: dict[str, list[float]]) -> Any:
    """Its numbers; the time of its steps is added to the samples."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = train(recipe, Path(scratch) / "run", settings)
        steps = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        samples_s.setdefault(side, []).append(statistics.median(step["time/step_s"] for step in steps[1:]))
        print(f"{side:<40} {samples_s[side][-1]:.3f} s", flush=True)
        return numbers(folder)


if __name__ == "__main__":
    main()
