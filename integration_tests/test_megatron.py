"""`actor.backend: megatron` in a recipe: it learns, goes on from other backends' checkpoints, and its recipes run."""

import json
import shutil
from pathlib import Path

import pytest

from command_line import SHORT_SORT, last_checkpoint, rows, tensors, train

pytest.importorskip("megatron.core")  # tools/environment.sh installs it
pytestmark = pytest.mark.slow
ACROSS = {"actor.backend": "megatron", "actor.backend_options": "{tensor_parallel: 2}"}
TWO = {"mode": "collocated", "cluster.num_devices": 2}


def test_two_ranks_of_a_replica_learn_to_sort(tmp_path):
    enough = {"run.stop_at_score": 0.75, "run.num_steps": 100, "run.max_minutes": 8}
    run = train("sort-grpo", tmp_path / "run", TWO | ACROSS | enough)
    result = json.loads((run / "result.json").read_text())
    assert result["after"] >= max(0.75, result["before"] + 0.15)
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert any("megatron-core runs on CPUs" in note for note in notes)


def test_a_run_goes_on_from_fsdp2_to_megatron_to_replicated(tmp_path):
    """Beside it, the same steps under `replicated` alone."""
    short = SHORT_SORT | TWO | {"run.num_steps": 1, "run.evaluate_every": 100, "run.checkpoint_every": 1}
    first = train("sort-grpo", tmp_path / "moves", short | {"actor.backend": "fsdp2"})
    shutil.copytree(first, tmp_path / "stays", symlinks=True)
    replicated = {"actor.backend": "replicated", "actor.backend_options": "{}"}
    for step, backend in ((2, ACROSS), (3, replicated)):
        train(None, tmp_path / "moves", backend | {"run.num_steps": step})
        train(None, tmp_path / "stays", replicated | {"run.num_steps": step})
    actual, expected = rows(tmp_path / "moves")[1:], rows(tmp_path / "stays")[1:]
    assert any(row["actor/grad_norm"] > 0 for row in expected)
    for row, expected_row in zip(actual, expected, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert row[key] == pytest.approx(expected_row[key], rel=1e-6, abs=1e-7), key
    expected_weights = tensors(last_checkpoint(tmp_path / "stays") / "model")
    for name, tensor in tensors(last_checkpoint(tmp_path / "moves") / "model").items():
        assert (tensor - expected_weights[name]).abs().max() <= 1e-5 * expected_weights[name].abs().max(), name


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"distributed_optimizer": "true"}, {"context_parallel": 2}],
    ids=["TP2", "PP2", "DP2", "CP2"],
)
def test_ppo_with_a_critic_goes_on_as_under_replicated(tmp_path, options):
    """From one checkpoint, and back."""
    short = SHORT_SORT | TWO | {"algorithm.name": "ppo", "run.evaluate_every": 100, "run.checkpoint_every": 1}
    if "context_parallel" in options:
        short["actor.max_tokens_per_micro_batch"] = 400
    first = train("sort-grpo", tmp_path / "stays", short | {"run.num_steps": 1})
    shutil.copytree(first, tmp_path / "moves", symlinks=True)
    backend_options = "{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}"
    megatron = {"actor.backend": "megatron", "actor.backend_options": backend_options}
    replicated = {"actor.backend": "replicated", "actor.backend_options": "{}"}
    for step, backend in ((3, megatron), (4, replicated)):
        train(None, tmp_path / "moves", backend | {"run.num_steps": step})
        train(None, tmp_path / "stays", replicated | {"run.num_steps": step})
    actual, expected = rows(tmp_path / "moves")[1:], rows(tmp_path / "stays")[1:]
    for row, expected_row in zip(actual, expected, strict=True):
        for key in ("actor/grad_norm", "critic/loss", "critic/grad_norm", "critic/return", "reward/mean"):
            assert row[key] == pytest.approx(expected_row[key], rel=1e-5, abs=1e-7), key
    for folder in ("model", "critic/model"):
        expected_weights = tensors(last_checkpoint(tmp_path / "stays") / folder)
        for name, tensor in tensors(last_checkpoint(tmp_path / "moves") / folder).items():
            assert (tensor - expected_weights[name]).abs().max() <= 1e-5 * expected_weights[name].abs().max(), name


@pytest.fixture
def experts(tmp_path):
    """A tiny Qwen3 mixture with the tokenizer of characters."""
    from rlinf_workers.testing.engines import tiny_mixture

    return Path(tiny_mixture(tmp_path / "model").folder)


@pytest.mark.parametrize("recipe", ["qwen3-moe-grpo-megatron", "gsm8k-grpo-megatron"])
def test_the_recipes_run_with_a_tiny_model_of_the_architecture(tmp_path, experts, recipe):
    for name, numbers in (("train", range(12)), ("test", range(12, 20))):
        lines = [{"question": f"{n}+{n}=", "answer": f"\n#### {2 * n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    short = {
        "model.path": experts,
        "task.train_files": f"[{tmp_path / 'train.jsonl'}]",
        "task.eval_files": f"[{tmp_path / 'test.jsonl'}]",
        "task.num_held_out": 4,
        "run.num_steps": 2,
        "run.evaluate_every": 2,
        "rollout.num_prompts": 4,
        "rollout.max_new_tokens": 6,
        "rollout.max_prompt_tokens": 128,
        "algorithm.group_size": 4,
        "cluster.num_devices": 2,
        "actor.backend_options.tensor_parallel": 2,
        "actor.num_shards": 2,
    }
    if recipe.startswith("qwen3"):
        short |= {"actor.backend_options.expert_parallel": 2, "actor.backend_options.context_parallel": 1}
    run = train(recipe, tmp_path / "run", short)
    assert len(rows(run)) == 2
    first, last = (tensors(folder) for folder in (experts, last_checkpoint(run) / "model"))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in last and last.keys() == first.keys()
