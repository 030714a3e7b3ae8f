"""Draws one SVG for each algorithm from benchmarks/results/learning: `python -m benchmarks.learning.curves`.

PPO on PushCube is the recipe as it stands (`python -m benchmarks.learning.run pushcube-ppo`), which stops once it is
good enough.

Every seed is a line of its own; nothing is smoothed or averaged.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.learning.algorithms import RESULTS

IMAGES = Path(__file__).parents[2] / "docs" / "algorithms"
LABELS = {
    "sorting": "sorting eight digits: greedy accuracy on 500 held-out problems",
    "pushcube": "PushCube-v1: success on 100 held-out reset seeds",
}


def main() -> None:
    runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for file in sorted(RESULTS.glob("*.json")):
        job, algorithm, seed = file.stem.split("-")
        runs[job, algorithm][int(seed)] = json.loads(file.read_text())
    recipe = json.loads((RESULTS.parent / "learning-pushcube-ppo.json").read_text())
    runs["pushcube", "ppo"] = {run["seed"]: run for run in recipe["findings"]["runs"]}
    for (job, algorithm), by_seed in runs.items():
        name = algorithm if job == "sorting" else f"{algorithm}-{job}"
        draw(job, by_seed, IMAGES / f"{name}.svg")
        ends = [[row[run["score"]] for row in run["evaluations"]] for run in by_seed.values()]
        print(
            f"{job} {algorithm}: " + ", ".join(f"{end[0]:.3f} -> {end[-1]:.3f} (best {max(end):.3f})" for end in ends)
        )


def draw(job: str, by_seed: dict[int, dict[str, Any]], path: Path) -> None:
    """One line a seed."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rlinf"  # the same file from the same numbers
    figure, axes = plt.subplots(figsize=(5.5, 3.0))
    for seed, run in sorted(by_seed.items()):
        rows = run["evaluations"]
        axes.plot([row["step"] for row in rows], [row[run["score"]] for row in rows], marker="o", label=f"seed {seed}")
    axes.set(xlabel="training steps", ylim=(0, 1))
    axes.set_title(LABELS[job], fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
