"""Supervised jobs through the command line: a run, its resumed twin, and the same numbers on two ranks."""

import json
import math
import re
import shutil

import pytest
from safetensors.torch import load_file

from command_line import last_checkpoint, rows, train, train_here
from rlinf_workers.testing.engines import tiny_model

SFT = {
    "task.num_held_out": 8,
    "task.max_tokens": 48,
    "actor.batch_size": 6,
    "actor.learning_rate": 1e-2,
    "actor.max_tokens_per_micro_batch": 64,
    "actor.num_shards": 2,
    "cluster.num_devices": 1,
    "run.num_steps": 4,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model")
    examples = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(1, 7) for b in range(1, 7)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in examples]
    for name, data in (("train", examples), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return {"model.path": folder / "model", "task.train_files": folder / "train.jsonl"}


@pytest.fixture
def pair_inputs(inputs):
    return inputs | {"task.train_files": inputs["model.path"].with_name("pairs.jsonl")}


def numbers(run):
    return [{key: value for key, value in row.items() if "time" not in key} for row in rows(run)]


@pytest.mark.slow
def test_a_resumed_run_ends_as_the_whole_one(inputs, tmp_path):
    whole = train("sft", tmp_path / "whole", SFT | inputs)
    half = tmp_path / "half"
    shutil.copytree(whole, half, symlinks=True)
    shutil.rmtree(last_checkpoint(half))
    (half / "result.json").unlink()
    train_here(None, half, {})
    assert numbers(half) == numbers(whole)
    mine, theirs = (load_file(last_checkpoint(run) / "model" / "model.safetensors") for run in (half, whole))
    assert all((mine[name] == theirs[name]).all() for name in theirs)
    losses = [row["loss"] for row in rows(whole, "evaluations.jsonl")]
    assert losses == sorted(losses, reverse=True), "it learns"
    assert (whole / "checkpoints" / "best").resolve() == last_checkpoint(whole).resolve(), "lower is better"
    assert json.loads((whole / "result.json").read_text())["after"] == losses[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"cluster.num_devices": 2},
        {"actor.max_tokens_per_micro_batch": "null"},
        {"cluster.num_devices": 2, "actor.backend": "fsdp2"},
        {"actor.backend": "megatron", "actor.backend_options": "{context_parallel: 2}", "cluster.num_devices": 2},
    ],
)
def test_ranks_packing_and_backends_change_no_number(inputs, tmp_path, changed):
    whole = train("sft", tmp_path / "whole", SFT | inputs)
    other = train("sft", tmp_path / "other", SFT | inputs | {"cluster.oversubscribe": "true"} | changed)
    if changed == {"cluster.num_devices": 2}:
        assert numbers(other) == numbers(whole)
    for row, expected in zip(rows(other), rows(whole), strict=True):
        for key in ("sft/loss", "actor/grad_norm", "sft/trained_tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4), key


@pytest.mark.slow
def test_epochs_and_an_adapter(inputs, tmp_path):
    overrides = {**SFT, **inputs, "run.num_steps": 0, "run.num_epochs": 0.5, "actor.lora.rank": 2}
    run = train("sft", tmp_path / "run", overrides)
    assert len(rows(run)) == 3, "half of 28 examples, 6 a step"
    assert re.search(r"num_steps: 3\n", (run / "config.yaml").read_text())
    assert (last_checkpoint(run) / "model" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_loss_to_stop_at(inputs, tmp_path):
    run = train("sft", tmp_path / "run", {**SFT, **inputs, "run.stop_at_score": 100.0})
    assert rows(run) == []


@pytest.mark.slow
def test_preferences_resume_with_the_first_reference(pair_inputs, tmp_path):
    whole = train("dpo", tmp_path / "whole", SFT | pair_inputs)
    half = train("dpo", tmp_path / "half", SFT | pair_inputs | {"run.num_steps": 2})
    train(None, half, {"run.num_steps": 4})
    assert numbers(half) == numbers(whole)
    evaluations = rows(whole, "evaluations.jsonl")
    assert evaluations[0]["loss"] == pytest.approx(math.log(2), rel=1e-6), "the model is its own reference at first"
    assert evaluations[-1]["loss"] < 0.69


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"cluster.num_devices": 2},
        {"actor.max_tokens_per_micro_batch": "null"},
        {"cluster.num_devices": 2, "actor.backend": "fsdp2", "dpo.loss": "ipo"},
        {"actor.max_tokens_per_micro_batch": "null", "actor.backend": "megatron", "cluster.num_devices": 2},
        {"actor.backend": "megatron", "cluster.num_devices": 2},
        {"actor.lora.rank": 2},
    ],
)
def test_preferences_on_other_backends(pair_inputs, tmp_path, changed):
    same = {key: value for key, value in changed.items() if key.startswith(("dpo.", "actor.lora"))}
    whole = train("dpo", tmp_path / "whole", SFT | pair_inputs | same)
    other = train("dpo", tmp_path / "other", SFT | pair_inputs | {"cluster.oversubscribe": "true"} | changed)
    if changed == {"cluster.num_devices": 2}:
        assert numbers(other) == numbers(whole)
    for row, expected in zip(rows(other), rows(whole), strict=True):
        for key in ("dpo/loss", "actor/grad_norm", "rewards/margin"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def test_a_reward_model_serves_as_a_reward(pair_inputs, tmp_path):
    from rlinf_algos.rewards import RewardModel

    run = train_here("reward-model", tmp_path / "run", SFT | pair_inputs)
    assert rows(run, "evaluations.jsonl")[-1]["loss"] < math.log(2)
    reward = RewardModel(last_checkpoint(run) / "model")
    results = reward.score_batch(["12", "0"], ["", ""], ["6+6=", "6+6="])
    assert results[0].value > results[1].value


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"actor.backend": "fsdp2"}])
def test_reward_models_on_two_ranks(pair_inputs, tmp_path, changed):
    whole = train("reward-model", tmp_path / "whole", SFT | pair_inputs)
    two = {"cluster.num_devices": 2, "cluster.oversubscribe": "true"}
    other = train("reward-model", tmp_path / "other", SFT | pair_inputs | two | changed)
    for row, expected in zip(rows(other), rows(whole), strict=True):
        for key in ("reward_model/loss", "actor/grad_norm", "rewards/margin"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
