"""`actor.backend: fsdp2` in a recipe: the numbers of `replicated`, and checkpoints of one go on under the other."""

import shutil

import pytest

from command_line import SHORT_SORT, last_checkpoint, rows, tensors, train

pytestmark = pytest.mark.slow
TWO = SHORT_SORT | {"cluster.num_devices": 2, "run.num_steps": 2, "run.evaluate_every": 100, "run.checkpoint_every": 2}
MODES = [
    {"mode": "collocated"},
    {
        "mode": "hybrid",
        "plan.granularity": "{rollout: 4, reward: 2, actor: 3}",
        "algorithm.name": "dapo",
        "algorithm.oversampling": 1.5,
        "algorithm.overlong_buffer_tokens": 1,
        "algorithm.kl_coef": 0.1,
    },
    {"mode": "collocated", "algorithm.name": "ppo", "algorithm.num_epochs": 2},
    {"mode": "disaggregated", "rollout.num_prompts": 7},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["fsdp2", "replicated"])
def test_a_checkpoint_of_one_goes_on_under_the_other(tmp_path, mode, first):
    train("sort-grpo", tmp_path / "first", TWO | mode | {"actor.backend": first})
    runs = {}
    for name in ("replicated", "fsdp2"):
        shutil.copytree(tmp_path / "first", tmp_path / name, symlinks=True)
        runs[name] = train(None, tmp_path / name, {"actor.backend": name, "run.num_steps": 4})
    expected, other = (rows(runs[name])[2:] for name in ("replicated", "fsdp2"))
    assert any(row["actor/grad_norm"] > 0 for row in expected)
    for row, expected_row in zip(other, expected, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert row.get(key) == pytest.approx(expected_row.get(key), rel=1e-6, abs=1e-7), key
    expected_weights = tensors(last_checkpoint(runs["replicated"]) / "model")
    for name, tensor in tensors(last_checkpoint(runs["fsdp2"]) / "model").items():
        assert (tensor - expected_weights[name]).abs().max() <= 1e-5 * expected_weights[name].abs().max(), name
