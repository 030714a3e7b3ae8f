"""Action distributions against torch.distributions and against counts of what is drawn."""

import pytest
import torch
from torch.distributions import Categorical, Normal

from rlinf_workers.policies.heads.categories import CategoriesHead
from rlinf_workers.policies.heads.gaussian import GaussianHead
from rlinf_workers.testing.policies import check_head

CHOICES = (3, 2)


def test_categories_are_those_of_torch():
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actions = torch.stack([torch.arange(7) % 3, torch.arange(7) % 2], dim=-1)
    parts = [Categorical(logits=part) for part in logits.split(CHOICES, dim=-1)]
    head = CategoriesHead(CHOICES)
    torch.testing.assert_close(
        head.log_prob(logits, actions), torch.stack([p.log_prob(actions[:, i]) for i, p in enumerate(parts)], dim=-1)
    )
    torch.testing.assert_close(head.entropy(logits), torch.stack([part.entropy() for part in parts], dim=-1))
    assert torch.equal(head.mode(logits), torch.stack([part.probs.argmax(-1) for part in parts], dim=-1))


def test_a_gaussian_is_that_of_torch():
    mean, actions = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    head = GaussianHead(3, 0.0).double()
    head.log_std.data = torch.tensor([-0.5, 0.0, 0.3], dtype=torch.float64)
    expected = Normal(mean, head.log_std.exp())
    torch.testing.assert_close(head.log_prob(mean, actions), expected.log_prob(actions))
    torch.testing.assert_close(head.entropy(mean), expected.entropy())


def test_categories_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([0.3, -1.0, 0.7, 1.2, -0.4])
    noise = torch.randn(40_000, 5, generator=torch.Generator().manual_seed(1))
    drawn = CategoriesHead(CHOICES).sample(logits.expand(40_000, 5), noise)
    for i, part in enumerate(logits.split(CHOICES)):
        shares = torch.bincount(drawn[:, i], minlength=len(part)) / len(drawn)
        torch.testing.assert_close(shares, part.softmax(-1), rtol=0, atol=0.01)  # 4 standard errors


@pytest.mark.parametrize("head", [GaussianHead(4, -0.3), CategoriesHead((3, 2, 3, 2))], ids=["gaussian", "categories"])
def test_heads_conform(head):
    check_head(head)
