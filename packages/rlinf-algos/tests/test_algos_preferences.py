"""Losses of pairs against their formulas, written out for one pair in Python's floats."""

import math

import pytest
import torch

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, bradley_terry_loss, dpo_loss

POLICY = [[-12.5, -30.0], [-3.25, -2.0], [-8.0, -8.0], [-400.0, -1.0]]
REF = [[-13.0, -29.0], [-3.0, -4.5], [-8.0, -8.0], [-390.0, -2.0]]
NUM_TOKENS = [[10, 25], [3, 2], [4, 8], [100, 1]]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def expected_dpo(pair, ref, beta, smoothing):
    """Loss, and its derivative by the preferred completion's log-probability."""
    x = beta * ((pair[0] - ref[0]) - (pair[1] - ref[1]))
    loss = -(1 - smoothing) * math.log(sigmoid(x)) - smoothing * math.log(sigmoid(-x))
    return loss, -beta * ((1 - smoothing) * sigmoid(-x) - smoothing * sigmoid(x))


@pytest.mark.parametrize("beta", [0.05, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_is_its_formula(beta, smoothing, dtype):
    policy = torch.tensor(POLICY, dtype=dtype, requires_grad=True)
    loss = dpo_loss(policy, torch.tensor(REF, dtype=dtype), beta=beta, label_smoothing=smoothing)
    loss.loss_terms.sum().backward()
    pairs = [expected_dpo(pair, ref, beta, smoothing) for pair, ref in zip(POLICY, REF, strict=True)]
    rel = 1e-5 if dtype == torch.float32 else 1e-12
    assert loss.loss_terms.tolist() == pytest.approx([loss for loss, _ in pairs], rel=rel)
    assert policy.grad is not None
    assert policy.grad[:, 0].tolist() == pytest.approx([slope for _, slope in pairs], rel=rel)
    assert policy.grad[:, 1].tolist() == pytest.approx([-slope for _, slope in pairs], rel=rel)
    rewards = [[beta * (p - r) for p, r in zip(pair, ref, strict=True)] for pair, ref in zip(POLICY, REF, strict=True)]
    assert loss.chosen_rewards.tolist() == pytest.approx([chosen for chosen, _ in rewards], rel=1e-6)
    assert loss.rejected_rewards.tolist() == pytest.approx([rejected for _, rejected in rewards], rel=1e-6)


def test_at_the_reference_the_loss_is_the_logarithm_of_two():
    loss = dpo_loss(torch.tensor(REF), torch.tensor(REF))
    assert loss.loss_terms.tolist() == pytest.approx([math.log(2)] * 4)


def test_ipo_is_its_formula_for_means_over_tokens():
    beta, policy = 0.2, torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(policy, torch.tensor(REF), beta=beta, kind="ipo", num_tokens=torch.tensor(NUM_TOKENS))
    loss.loss_terms.sum().backward()
    assert policy.grad is not None
    for row, (pair, ref, counts) in enumerate(zip(POLICY, REF, NUM_TOKENS, strict=True)):
        h = (pair[0] - ref[0]) / counts[0] - (pair[1] - ref[1]) / counts[1]
        assert loss.loss_terms[row].item() == pytest.approx((h - 1 / (2 * beta)) ** 2)
        assert policy.grad[row, 0].item() == pytest.approx(2 * (h - 1 / (2 * beta)) / counts[0])


def test_a_reward_model_learns_the_difference_of_scores():
    scores = torch.tensor([[1.0, -2.0], [0.5, 3.0]], requires_grad=True)
    expected = [-math.log(sigmoid(3.0)), -math.log(sigmoid(-2.5))]
    assert bradley_terry_loss(scores).tolist() == pytest.approx(expected, rel=1e-6)
    with_margins = bradley_terry_loss(scores, torch.tensor([1.0, 0.0]))
    assert with_margins.tolist() == pytest.approx([-math.log(sigmoid(2.0)), expected[1]], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beta": 0.0}, "beta=0"),
        ({"beta": math.inf}, "beta=inf"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        ({"kind": "hinge"}, "sigmoid or ipo"),
        ({"kind": "ipo"}, "give num_tokens"),
        ({"kind": "ipo", "label_smoothing": 0.1, "num_tokens": torch.ones(4, 2)}, "not used by kind='ipo'"),
    ],
)
def test_wrong_settings(options, text):
    with pytest.raises(AlgosError, match=text):
        dpo_loss(torch.tensor(POLICY), torch.tensor(REF), **options)


def test_wrong_tensors():
    with pytest.raises(ShapeError):
        dpo_loss(torch.tensor(POLICY), torch.tensor(REF)[:2])
    with pytest.raises(NonFiniteError, match=r"ref_logprobs\[0, 0\]"):
        dpo_loss(torch.tensor(POLICY), torch.full((4, 2), math.nan))
    with pytest.raises(ShapeError):
        bradley_terry_loss(torch.tensor(POLICY), torch.zeros(3))
