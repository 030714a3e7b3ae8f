"""A success classifier as the only reward, beside the sparse reward of the simulator, of the same seeds and number of
steps. A third run has a classifier that is trained too little.

    python -m benchmarks.learning.success_classifier reach --seeds 0 1 2
    python -m benchmarks.learning.success_classifier faucet --seeds 0 --rewards classifier sparse --num-steps 80

`reach` is `picture_reach.py` with PPO, a minute of a core each; `faucet` is the recipe `faucet-rlpd`, about ten.
Success is that of the simulator in all runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.learning.run import result_of, train

from rlinf.run_folder import read_rows

TASKS = {
    "reach": [
        "env-ppo",
        *("--env.kind", "benchmarks.learning.picture_reach:KIND", "--env.id", "reach", "--policy.name", "actor_critic"),
        *("--env.max_episode_steps", "15", "--env.num_steps", "32", "--env.num_eval_episodes", "100"),
        *("--algorithm.gamma", "0.9", "--run.evaluate_every", "5"),
    ],
    "faucet": ["faucet-rlpd", "--env.options.cameras", "[corner]", "--policy.options.cameras", '""'],
}
EXPERTS = ["--success_classifier.source", "experts"]
FEW = ("num_episodes", "num_failures", "num_steps")
REWARDS = {
    "classifier": EXPERTS,
    "sparse": [],
    "weak classifier": [*EXPERTS, *(word for key in FEW for word in (f"--success_classifier.{key}", "8"))],
}
METRICS = (
    "env/success_once",
    "env/classifier_success",
    "env/classifier_false_positive",
    "env/classifier_false_negative",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--num-steps", type=int, default=30)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for reward in args.rewards:
            with tempfile.TemporaryDirectory() as scratch:
                runs.append(_run(args.task, reward, seed, args.num_steps, Path(scratch) / "run"))
            settings = {"task": TASKS[args.task], "rewards": REWARDS, "num_steps": args.num_steps}
            name = f"success-classifier-{args.task}"
            report(name, settings=settings, samples_s={}, comparisons=[], findings={"runs": runs})


def _run(task: str, reward: str, seed: int, num_steps: int, folder: Path) -> dict[str, Any]:
    recipe, *flags = [*TASKS[task], *REWARDS[reward], "--seed", str(seed), "--run.num_steps", str(num_steps)]
    train(recipe, folder, flags)
    result, evaluations = result_of(folder)
    state = folder / "success_classifier" / "state.json"
    rows = read_rows(folder / "metrics.jsonl")
    print(f"{reward}, seed {seed}: {result['before']:.2f} -> {result['after']:.2f} in {result['num_steps']} steps")
    return {
        "reward": reward,
        "seed": seed,
        **result,
        "evaluations": evaluations,
        "held_out_pictures": json.loads(state.read_text()) if state.exists() else None,
        "training": [{"step": row["step"]} | _shares(row["metrics"]) for row in rows],
    }


def _shares(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if name in metrics}


if __name__ == "__main__":
    main()
