"""The plans of the shipped robots' recipes of published size, mode by mode: benchmarks/results/robot-plans.json.

    python benchmarks/sched/robot_plans.py

The table of docs/scheduling-limits.md. Nothing is measured: times are those that `rlinf plan` prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.planning.problems import problem_of_recipe
from rlinf_sched.explain import explain_problem

RESULT = Path(__file__).parents[1] / "results" / "robot-plans.json"
GPU = "H100"
RECIPES = ("maniskill-openvla-ppo", "libero-oft-grpo", "libero-pi0-ppo", "libero-pi05-ppo")
SETTINGS = {
    name: ["--actor.lora=null"] if name.startswith("maniskill") else ["--env.options.image_size=224"]
    for name in RECIPES
}
"""Those of the table, where they are not the recipe's."""
CLUSTERS = (8, 16, 32)
"""GPUs of the clusters of arXiv:2509.15965."""


def plan(recipe: str, num_devices: int) -> dict[str, Any]:
    """Seconds of a step in each mode, and what the best one waits for. Every GPU gets a shard of the batch."""
    overrides = [f"--cluster.num_devices={num_devices}", f"--actor.num_shards={num_devices}"]
    problem = problem_of_recipe(load_config(recipe, parse_overrides([*overrides, *SETTINGS[recipe]])), gpu=GPU)
    explanation = explain_problem(problem)
    return {
        "mode": explanation.plan.mode,
        "step_s": {mode.mode: mode.step_s for mode in explanation.modes},
        "waits_for": {part.label: round(part.share, 3) for part in explanation.path},
        "num_env_ranks": explanation.plan.stage("env").num_ranks,
    }


def main() -> None:
    plans = {recipe: {num: plan(recipe, num) for num in CLUSTERS} for recipe in RECIPES}
    RESULT.write_text(json.dumps({"gpu": GPU, "plans": plans}, indent=2) + "\n")


if __name__ == "__main__":
    main()
