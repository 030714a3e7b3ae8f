"""`actor.lora` in a recipe: an adapter learns, the reference is the model without it, and modes and backends agree."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from command_line import last_checkpoint, rows, train, train_here, weights
from rlinf_workers.testing.engines import tiny_model

LORA = {
    "task.num_digits": 3,
    "task.num_held_out": 16,
    "reward.kind": "random",
    "model.architecture": "null",
    "sft_warm_up": "null",
    "rollout.num_prompts": 8,
    "rollout.max_new_tokens": 4,
    "actor.learning_rate": 1e-2,
    "actor.micro_batch_groups": 2,
    "actor.lora.rank": 4,
    "algorithm.kl_coef": 0.1,
    "mode": "collocated",
    "cluster.num_devices": 1,
    "run.num_steps": 3,
    "run.evaluate_every": 100,
    "run.checkpoint_every": 2,
    "run.stop_at_score": "null",
}
TWO = {"cluster.num_devices": 2, "cluster.oversubscribe": "true"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base")).folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return train_here("sort-grpo", tmp_path_factory.mktemp("runs") / "run", LORA | {"model.path": base})


def close(actual, expected, rel=1e-6):
    for row, other in zip(actual, expected, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/ref_kl", "reward/mean"):
            assert row.get(key) == pytest.approx(other.get(key), rel=rel, abs=1e-6), key


def test_no_worker_holds_a_reference(run):
    metrics = rows(run)
    assert metrics[0]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["actor/ref_kl"] > 1e-4
    assert sorted(log.name for log in (run / "logs").iterdir()) == ["actor", "reward", "rollout"]
    names = {file.name for file in (last_checkpoint(run) / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json"} <= names
    assert "model.safetensors" not in names
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert any("weights actor -> rollout: a sync moves the adapter" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{}, {"algorithm.name": "rloo"}, {"algorithm.name": "ppo"}])
def test_the_model_without_its_adapter_says_what_a_reference_of_its_own_says(tmp_path, base, algorithm):
    """A KL in the loss, in the reward of groups, and in that of tokens beside a critic."""
    settings = LORA | algorithm | {"model.path": base, "algorithm.kl_coef": 0.1}
    plain_run = train("sort-grpo", tmp_path / "found", settings)
    reference_run = train("sort-grpo", tmp_path / "wanted", settings | {"reference.path": base})
    assert (reference_run / "logs" / "reference").is_dir()
    assert not (plain_run / "logs" / "reference").exists()
    close(rows(plain_run), rows(reference_run), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_modes_have_the_same_bits(tmp_path, base, run, mode):
    other = train("sort-grpo", tmp_path / mode, LORA | TWO | {"model.path": base, "mode": mode})
    assert rows(other) == rows(run)
    assert weights(other) == weights(run)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["replicated", "fsdp2"])
def test_a_run_goes_on_under_either_backend(tmp_path, run, backend):
    """From the checkpoint after two of its three steps; under the same backend to the bit."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(last_checkpoint(copy))
    (copy / "result.json").unlink(missing_ok=True)
    train(None, copy, {"actor.backend": backend})
    if backend == "replicated":
        assert rows(copy) == rows(run)
        assert weights(copy) == weights(run)
    close(rows(copy), rows(run))
    expected_weights = load_file(last_checkpoint(run) / "model" / "adapter_model.safetensors")
    for name, tensor in load_file(last_checkpoint(copy) / "model" / "adapter_model.safetensors").items():
        assert (tensor - expected_weights[name]).abs().max() <= 1e-5 * expected_weights[name].abs().max(), name


@pytest.mark.slow
def test_ranks_of_megatron_train_the_same_adapter(tmp_path, base, run):
    pytest.importorskip("megatron.core")
    megatron = {"actor.backend": "megatron", "actor.backend_options.tensor_parallel": 2}
    close(
        rows(train("sort-grpo", tmp_path / "megatron", LORA | TWO | megatron | {"model.path": base})), rows(run), 1e-4
    )


@pytest.mark.slow
def test_two_ranks_that_share_a_model_go_on_as_one(tmp_path, base, run):
    shared = train("sort-grpo", tmp_path / "shared", LORA | TWO | {"model.path": base, "actor.backend": "fsdp2"})
    close(rows(shared), rows(run), rel=1e-5)
