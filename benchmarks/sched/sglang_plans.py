"""The plans of the shipped SGLang recipes for GPUs that need not be there: benchmarks/results/sglang-plans.json.

    python benchmarks/sched/sglang_plans.py

The tables of docs/sglang.md. Nothing is measured: times and memory are those that `rlinf plan` prints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.reasoning.flow import job_shape
from rlinf.jobs.reasoning.memory import named_shape
from rlinf.jobs.spec import job_spec
from rlinf.planning.problems import problem_of_recipe
from rlinf_sched.derive import find_gpu
from rlinf_sched.explain import explain_problem
from rlinf_workers.engines.sglang.memory import kv_tokens

RESULT = Path(__file__).parents[1] / "results" / "sglang-plans.json"
GPU = "H100"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe, the public model that it is planned for, and how many GPUs."""

    recipe: str
    model: str
    num_devices: int


CASES = (
    Case(recipe="gsm8k-grpo-sglang", model="Qwen2.5-1.5B", num_devices=8),
    Case(recipe="math-grpo-1.5b", model="DeepSeek-R1-Distill-Qwen-1.5B", num_devices=64),
    Case(recipe="math-grpo-1.5b-128k", model="DeepSeek-R1-Distill-Qwen-1.5B", num_devices=64),
    Case(recipe="math-grpo-7b", model="DeepSeek-R1-Distill-Qwen-7B", num_devices=64),
    Case(recipe="math-grpo-qwen3-30b-a3b", model="Qwen3-30B-A3B", num_devices=128),
)


def plan(case: Case) -> dict[str, Any]:
    """What a collocated plan of the recipe comes to."""
    overrides = [f"--model.path={case.model}", f"--cluster.num_devices={case.num_devices}"]
    data = ["--task.train_files=[unread]", "--task.eval_files=[unread]"]
    config = load_config(case.recipe, parse_overrides([*overrides, *data]))
    assert isinstance(config, ReasoningConfig), "a recipe of job reasoning"
    problem = problem_of_recipe(config, gpu=GPU)
    explanation = explain_problem(problem, modes=("collocated",))
    loads = {load.group: load for load in job_spec(config).loads(config, explanation.plan, problem.cluster)}
    shape, generates = named_shape(config.model.path or Path()), problem.profiles.stages["rollout"].instances[0]
    resolved = config.model_copy(update={"actor": config.actor.model_copy(update={"num_shards": 1})})
    job = job_shape(resolved, device_bytes=find_gpu(GPU).memory_bytes)
    prediction = explanation.plan.prediction
    assert prediction is not None, "the planner predicts"
    return {
        "model": case.model,
        "gpus": f"{case.num_devices} x {GPU}",
        "backend": config.actor.backend,
        "num_prompts": config.rollout.num_prompts,
        "group_size": config.algorithm.group_size,
        "sequence_tokens": config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        "num_engines": explanation.plan.stage("rollout").num_ranks,
        "devices_per_engine": generates.num_devices,
        "kv_pool_tokens": kv_tokens(shape, job),
        "groups_at_once": generates.max_items,
        "engine_weights_bytes": loads["rollout"].memory.weights,
        "engine_kv_pool_bytes": loads["rollout"].memory.kv_pool,
        "engine_peak_bytes": loads["rollout"].peak,
        "actor_peak_bytes": loads["actor"].peak,
        "rollout_busy_s": prediction.stages["rollout"].busy_s,
        "step_s": prediction.step_s,
    }


def main() -> None:
    RESULT.write_text(json.dumps({"plans": {case.recipe: plan(case) for case in CASES}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
