"""A reference that follows the policy: what it becomes, and that a run that is resumed goes on with the right one."""

import pytest
import torch
from safetensors.torch import load_file

from command_line import TINY_SORT, rows, train

FOLLOWS = TINY_SORT | {
    "sft_warm_up": "null",
    "reward.kind": "random",
    "task.num_held_out": 4,
    "rollout.num_prompts": 4,
    "run.evaluate_every": 100,
    "run.checkpoint_every": 1,
    "run.keep_checkpoints": 9,
    "algorithm.kl_coef": 0.1,
    "reference.sync_every": 2,
}
FOLLOWS = {key: value for key, value in FOLLOWS.items() if not key.startswith("sft_warm_up.")}


def tensors(folder):
    return {name: part for file in sorted(folder.glob("*.safetensors")) for name, part in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "collocated", "cluster.num_devices": 1, "reference.sync_weight": 1.0},
        {"actor.backend": "fsdp2", "actor.num_shards": 2, "mode": "collocated", "reference.sync_weight": 0.25},
    ],
    ids=["replicated", "fsdp2"],
)
def test_a_reference_that_follows_the_policy(tmp_path, changes):
    """Every second step a share of the policy; the third step of the resumed run is about the reference of the second
    although the first run, which ended after the fourth, had a later one."""
    straight = train("sort-grpo", tmp_path / "straight", FOLLOWS | changes | {"run.num_steps": 5})
    folders = [straight / "reference_model", *(straight / f"reference_models/step-00000{step}" for step in (2, 4))]
    weight = changes["reference.sync_weight"]
    models = [tensors(folder) for folder in folders]
    for before, after, step in zip(models, models[1:], (2, 4), strict=False):
        policy = tensors(straight / f"checkpoints/step-00000{step}/model")
        assert before.keys() == after.keys() == policy.keys()
        for name, tensor in after.items():
            torch.testing.assert_close(tensor, (1 - weight) * before[name] + weight * policy[name])
    kls = [row["actor/ref_kl"] for row in rows(straight)]
    assert kls[1] > 1e-7 and kls[3] > 1e-7, "the policy has moved away by then"
    assert (max(kls[2], kls[4]) < 1e-9) == (weight == 1.0), "a reference that is the policy"
    assert not (straight / "reference_models/policy").exists()

    stopped = train("sort-grpo", tmp_path / "stopped", FOLLOWS | changes | {"run.num_steps": 3})
    resumed = train(None, stopped, {"run.num_steps": 5})
    resumed_kls = [row["actor/ref_kl"] for row in rows(resumed)]
    assert resumed_kls == kls
