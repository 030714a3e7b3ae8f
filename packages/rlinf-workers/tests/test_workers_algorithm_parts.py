"""The parts of an algorithm that a user writes."""

import sys
from types import ModuleType

import pytest
import torch

from rlinf_algos import check_inputs, measured_loss, preset
from rlinf_workers.algorithm_parts import AdvantagePart, PolicyLossPart


def centred(rewards):
    rewards -= rewards.mean(dim=1, keepdim=True)
    return rewards


def scaled(policy_logprobs, proximal_logprobs, advantages, loss_mask, rollout_logprobs):
    for tensor in (policy_logprobs, proximal_logprobs, advantages, loss_mask, rollout_logprobs):
        tensor *= 2.0
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask.clamp(max=1.0))
    return measured_loss(-inputs.advantages * inputs.policy_logprobs, inputs)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("computes_in_place")
    module.__dict__.update(centred=centred, scaled=scaled)
    monkeypatch.setitem(sys.modules, "computes_in_place", module)


def test_an_advantage_that_computes_in_place_changes_no_reward():
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    inputs = {"rewards": rewards}
    advantages, _ = AdvantagePart(preset("grpo", advantage="computes_in_place:centred"))(inputs, rewards.shape)
    assert advantages.tolist() == [[-0.5, 0.5, 0.5, -0.5]]
    assert rewards.tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_a_loss_that_computes_in_place_is_the_same_in_every_epoch():
    leaf = torch.full((2, 3), -1.0, requires_grad=True)
    proximal, rollout = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    advantages, mask = torch.ones(2), torch.ones(2, 3)
    part = PolicyLossPart(preset("grpo", policy_loss="computes_in_place:scaled"))
    first, second = (part(leaf * 1.0, proximal, rollout, advantages, mask).terms for _ in range(2))
    assert torch.equal(first, second) and first[0, 0].item() == 4.0
    assert [tensor.unique().item() for tensor in (proximal, rollout, advantages, mask)] == [-1.0, -1.5, 1.0, 1.0]
