"""Action distributions against torch.distributions and against counts of what is drawn."""

import torch
from torch.distributions import Categorical

from rlinf_workers.policies.actor_critic import ActorCritic, ActorCriticSettings
from rlinf_workers.policies.heads.categories import Categories

CHOICES = (3, 2)


def test_categories_are_those_of_torch():
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actions = torch.stack([torch.arange(7) % 3, torch.arange(7) % 2], dim=-1)
    parts = [Categorical(logits=part) for part in logits.split(CHOICES, dim=-1)]
    found = Categories(logits, CHOICES)
    torch.testing.assert_close(found.log_prob(actions), sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(found.entropy(), sum(part.entropy() for part in parts))
    assert torch.equal(found.mode(), torch.stack([part.probs.argmax(-1) for part in parts], dim=-1))


def test_categories_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([0.3, -1.0, 0.7, 1.2, -0.4])
    noise = torch.randn(40_000, 5, generator=torch.Generator().manual_seed(1))
    drawn = Categories(logits.expand(40_000, 5), CHOICES).sample(noise)
    for i, part in enumerate(logits.split(CHOICES)):
        shares = torch.bincount(drawn[:, i], minlength=len(part)) / len(drawn)
        torch.testing.assert_close(shares, part.softmax(-1), rtol=0, atol=0.01)  # 4 standard errors


def test_an_actor_critic_of_discrete_actions_scores_what_it_drew():
    settings = ActorCriticSettings(observation_size=4, action_size=2, num_choices=CHOICES, hidden_sizes=(8,))
    model, states = ActorCritic(settings), torch.randn(6, 4)
    drawn = model(states, noise=torch.randn(6, settings.head_size))
    assert drawn.actions.dtype == torch.int64
    torch.testing.assert_close(model(states, actions=drawn.actions).logprobs, drawn.logprobs)
    assert "log_std" not in model.state_dict(), "a parameter without a gradient"
