"""Shipped recipes that generate by SGLang or vLLM, with tiny models of their architecture, through the command line as
a user starts it: the rollout is in this venv, all other roles in that of the driver."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from listeners import nothing_exposed  # pyright: ignore[reportMissingImports]
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.testing.engines import tiny_mixture, tiny_model
from served_checks import ENGINE
from staleness_checker import check  # pyright: ignore[reportMissingImports]

TIMEOUT_S = 600
NUM_STEPS = 10
ROUNDING = 1e-4
"""Nats between two float32 computations of a token; ten steps with a wrong weight anywhere are far from it."""
SORT = {
    "run.num_steps": NUM_STEPS,
    "run.evaluate_every": NUM_STEPS,
    "run.stop_at_score": "null",
    "task.num_digits": 3,
    "model.architecture.hidden_size": 128,  # heads of 32, the smallest that vLLM computes on a CPU
    "task.num_held_out": 32,
    "rollout.max_new_tokens": 4,
    "rollout.num_prompts": 8,
    "sft_warm_up.max_steps": 20,
    "sft_warm_up.batch_size": 32,
    "sft_warm_up.reuse": "false",
}
MATH = {
    "run.num_steps": 2,
    "run.evaluate_every": 2,
    "task.num_held_out": 4,
    "model.dtype": "float32",
    "rollout.dtype": "float32",
    "rollout.num_prompts": 4,
    "rollout.max_new_tokens": 6,
    "rollout.max_prompt_tokens": 48,
    "rollout.tensor_parallel_size": 1,
    "algorithm.group_size": 4,
    "actor.num_shards": 1,
    "actor.learning_rate": 1e-3,
    "reward.kind": "exact",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
}
KEEPS = {
    "sglang": "{disable_radix_cache: true, disable_overlap_schedule: true}",
    "vllm": "{enable_prefix_caching: false}",
}
"""Options with which completions keep their KV cache when new weights arrive."""
ACROSS = {"tensor_parallel": 2, "pipeline_parallel": 1, "compute_dtype": "float32"}


def train(driver: str, recipe: str, output: Path, overrides: Mapping[str, object]) -> list[dict[str, float]]:
    """A run to its end; the metrics of its steps."""
    elsewhere = {} if driver == sys.executable else {"venvs.rollout": sys.executable}
    settings = {"mode": "collocated", "cluster.device": "cpu", "rollout.engine": ENGINE, **elsewhere, **overrides}
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [str(Path(driver).with_name("rlinf")), "train", recipe, "--output", str(output), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with nothing_exposed(env):
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["metrics"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_pictures_are_counted(driver, tmp_path):
    """The tower is trained, and each sync carries it; then an adapter of decoder and tower is, from that model on."""
    small = {"rollout.num_prompts": 8, "task.num_held_out": 8, "run.stop_at_score": "null"}
    small |= {"cluster.num_devices": 1, "run.num_steps": 4, "run.evaluate_every": 4}
    warm_up = {"sft_warm_up.max_steps": 20, "sft_warm_up.reuse": "false", "model.architecture.hidden_size": 128}
    runs = [train(driver, "count-shapes-grpo", tmp_path / "whole", small | warm_up)]
    base = {
        "model.path": max((tmp_path / "whole" / "checkpoints").glob("step-*")) / "model",
        "model.architecture": "null",
    }
    adapter = {"sft_warm_up": "null", "actor.lora.rank": 4, "actor.lora.targets": "all-linear"}
    runs.append(train(driver, "count-shapes-grpo", tmp_path / "adapter", small | base | adapter))
    assert "a sync moves the adapter, " in (tmp_path / "adapter" / "manifest.json").read_text()
    for steps in runs:
        trained = [step for step in steps if "rollout/logprob_gap_max" in step]
        assert len(steps) == 4 and trained, "no group had an advantage"
        assert max(step["rollout/logprob_gap_max"] for step in trained) < ROUNDING


def test_ten_steps_with_a_sync_before_each(driver, tmp_path):
    steps = train(driver, "sort-grpo", tmp_path / "run", SORT | {"cluster.num_devices": 1})
    assert len(steps) == NUM_STEPS
    trained = [step for step in steps if "rollout/logprob_gap_max" in step]
    assert trained, "the gap is measured in groups with an advantage, and the engine's draws decide which have one"
    assert max(step["rollout/logprob_gap_max"] for step in trained) < ROUNDING


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_completions_go_on_with_weights_that_are_published_meanwhile(driver, tmp_path, how):
    """Generation takes much longer than training, so each version arrives while the next step's completions run."""
    settings = {
        "mode": "disaggregated",
        "cluster.num_devices": 2,
        "cluster.oversubscribe": "true",
        "rollout.engine_options": KEEPS[ENGINE] if how == "keep" else "{}",
        "rollout.on_new_weights": how,
        "rollout.max_new_tokens": 48,
        "algorithm.max_staleness": 1,
        "sft_warm_up.max_steps": 5,
        "run.record": "true",
        "run.num_steps": 5,
        "run.evaluate_every": 5,
    }
    train(driver, "sort-grpo", tmp_path / "run", SORT | settings)
    outcome = check(tmp_path / "run")
    assert outcome.mistakes == [] and outcome.num_takes and outcome.num_mixed_groups


def test_groups_outlive_their_step_and_none_is_lost_old_or_trained_twice(driver, tmp_path):
    """Aborted with the tokens that they have, and continued in the next step with its weights."""
    run = tmp_path / "run"
    keys = {"mode": "disaggregated", "cluster.num_devices": 2, "cluster.oversubscribe": "true", "run.record": "true"}
    late = {"algorithm.max_staleness": 2, "rollout.sampler": "as_finished", "run.evaluate_every": 4}
    train(driver, "sort-grpo", run, SORT | keys | late)
    outcome = check(run)
    assert outcome.mistakes == []
    assert outcome.groups_by_lateness[1] > 0, "every group was whole in its own step"


HARNESS = """
from openai import AsyncOpenAI


async def play(base_url, task, *, session):
    client = AsyncOpenAI(base_url=base_url, api_key=session.api_key)
    hint = await client.chat.completions.create(model="hinter", messages=task["messages"])
    turn = {"role": "user", "content": "!" + (hint.choices[0].message.content or "")[:2] + "="}
    guess = await client.chat.completions.create(model="guesser", messages=[turn])
    return float(guess.choices[0].message.content == task["answer"])
"""


@pytest.mark.parametrize("settings", [{}, {"rollout.agent.run": "harness:play"}], ids=["in the process", "over HTTP"])
def test_the_turns_of_agents(driver, tmp_path, monkeypatch, settings):
    (tmp_path / "harness.py").write_text(HARNESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    keys = {"cluster.num_devices": 1, "rollout.engine_options": "{}", "rollout.num_prompts": 4, "run.num_steps": 4}
    small = {"run.evaluate_every": 4, "run.stop_at_score": "null", "task.num_held_out": 8, "sft_warm_up.max_steps": 20}
    small |= {"model.architecture.hidden_size": 128, **settings}
    steps = train(driver, "guess-team", tmp_path / "run", keys | small)
    trained = [step for step in steps if "rollout/logprob_gap_max" in step]
    assert all(step["agent/turns"] > 1 for step in steps)
    assert max((step["rollout/logprob_gap_max"] for step in trained), default=0.0) < ROUNDING


def test_the_turns_of_agents_that_see(driver, tmp_path):
    """The second turn follows the picture of the task and one that the agent adds."""
    small = {"model.architecture.hidden_size": 128, "sft_warm_up.max_steps": 20, "sft_warm_up.reuse": "false"}
    small |= {"rollout.num_prompts": 4, "task.num_held_out": 8, "run.stop_at_score": "null", "reward.kind": "random"}
    keys = {"cluster.num_devices": 1, "run.num_steps": 4, "run.evaluate_every": 4}
    agent = {"rollout.agent.run": "integration_tests.extensions.zooms:look_again"}
    agent |= {"rollout.agent.max_context_tokens": 48}
    steps = train(driver, "count-shapes-grpo", tmp_path / "run", small | keys | agent)
    trained = [step for step in steps if "rollout/logprob_gap_max" in step]
    assert trained and all(step["agent/turns"] == 2 for step in steps)
    assert max(step["rollout/logprob_gap_max"] for step in trained) < ROUNDING


@pytest.fixture
def files(tmp_path):
    """Overrides with data files for sums, and the folder for a model."""
    for name, numbers in (("train", range(12)), ("test", range(12, 20))):
        lines = [{"question": f"{n}+{n}=", "answer": f"{2 * n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model.path": tmp_path / "model",
        "task.train_files": f"[{tmp_path / 'train.jsonl'}]",
        "task.eval_files": f"[{tmp_path / 'test.jsonl'}]",
    }


def test_a_sync_moves_the_adapter_alone(driver, tmp_path, files):
    tiny_model(tmp_path / "model", hidden_size=128)
    settings = {"actor.lora.rank": 4, "cluster.num_devices": 1, "run.num_steps": 4, "run.evaluate_every": 4}
    settings |= {"task.answer_format": "exact", "task.prompt_template": "{question}"}
    steps = train(driver, "gsm8k-grpo-lora", tmp_path / "run", MATH | files | settings)
    assert "a sync moves the adapter, " in (tmp_path / "run" / "manifest.json").read_text()
    gaps = [step["rollout/logprob_gap_max"] for step in steps if "rollout/logprob_gap_max" in step]
    assert len(steps) == 4 and all(gap < ROUNDING for gap in gaps)


@pytest.mark.parametrize("recipe", ["math-grpo-7b", "math-grpo-qwen3-30b-a3b"])
def test_megatron_trains_what_the_engine_serves(driver, tmp_path, files, recipe):
    """The recipes of a cluster with a tiny model of the architecture, cut over two ranks of the trainer."""
    experts = recipe.endswith("a3b")
    (tiny_mixture if experts else tiny_model)(tmp_path / "model", hidden_size=128)
    options = {**ACROSS, "sequence_parallel": experts, "expert_parallel": 2 if experts else 1}
    cut = {f"actor.backend_options.{key}": str(value).lower() for key, value in options.items()}
    steps = train(driver, recipe, tmp_path / "run", MATH | files | cut)
    assert len(steps) == 2
    gaps = [step["rollout/logprob_gap_max"] for step in steps if "rollout/logprob_gap_max" in step]
    assert all(gap < ROUNDING for gap in gaps)
    last = max((tmp_path / "run" / "checkpoints").iterdir()) / "model"
    assert WeightFiles(last).specs.keys() == WeightFiles(tmp_path / "model").specs.keys()
