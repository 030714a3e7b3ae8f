"""A reward from pictures beside the environment's own: `faucet-rlpd` with a success classifier as its only reward, and
with the sparse reward of the simulator, of the same seeds and number of steps. A third run has a classifier that is
trained too little, whose metrics show that it is deceived.

    python -m benchmarks.learning.success_classifier --seeds 0 1
    python -m benchmarks.learning.success_classifier --seeds 2 --rewards classifier --add

Success is that of the simulator in all runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS_FOLDER, report
from benchmarks.learning.run import result_of, train

from rlinf.run_folder import read_rows

NAME = "success-classifier"
CAMERAS = ["--env.options.cameras", "[corner]", "--policy.options.cameras", '""']
REWARDS = {
    "classifier": [*CAMERAS, "--success_classifier.source", "experts"],
    "sparse": [],
    "weak classifier": [
        *CAMERAS,
        *("--success_classifier.source", "experts", "--success_classifier.num_steps", "20"),
        *("--success_classifier.num_episodes", "8", "--success_classifier.num_failures", "8"),
    ],
}
METRICS = (
    "env/success_once",
    "env/classifier_success",
    "env/classifier_false_positive",
    "env/classifier_false_negative",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--num-steps", type=int, default=80)
    parser.add_argument("--add", action="store_true", help="keep the other runs that the result has")
    args = parser.parse_args()
    path = RESULTS_FOLDER / f"{NAME}.json"
    runs = json.loads(path.read_text())["findings"]["runs"] if args.add and path.exists() else []
    for seed in args.seeds:
        for reward in args.rewards:
            runs = [run for run in runs if (run["reward"], run["seed"]) != (reward, seed)]
            with tempfile.TemporaryDirectory() as scratch:
                runs.append(_run(reward, seed, args.num_steps, Path(scratch) / "run"))
            report(NAME, settings={"recipe": "faucet-rlpd"}, samples_s={}, comparisons=[], findings={"runs": runs})


def _run(reward: str, seed: int, num_steps: int, folder: Path) -> dict[str, Any]:
    fixed = ["--seed", str(seed), "--run.num_steps", str(num_steps)]
    train("faucet-rlpd", folder, [*fixed, *REWARDS[reward]])
    result, evaluations = result_of(folder)
    state = folder / "success_classifier" / "state.json"
    rows = read_rows(folder / "metrics.jsonl")
    print(f"{reward}, seed {seed}: {result['before']:.2f} -> {result['after']:.2f} in {result['num_steps']} steps")
    return {
        "reward": reward,
        "seed": seed,
        "flags": REWARDS[reward],
        **result,
        "evaluations": evaluations,
        "held_out_pictures": json.loads(state.read_text()) if state.exists() else None,
        "training": [{"step": row["step"]} | _shares(row["metrics"]) for row in rows],
    }


def _shares(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if name in metrics}


if __name__ == "__main__":
    main()
