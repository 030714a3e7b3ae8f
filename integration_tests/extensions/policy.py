"""A policy of one's own: one small network that answers a state with two discrete actions at once."""

import torch
from torch import nn

from rlinf_workers.policies import Needs, Policy, PolicyError, PolicyStep, head_for
from rlinf_workers.trainers import ModelOutputs

CHUNK_SIZE = 2


class Pairs(Policy):
    @classmethod
    def needs(cls, fields, actions, **options):
        if actions.kind != "discrete":
            raise PolicyError("it chooses among discrete actions, and these are continuous")
        return Needs(reads=("state",), chunk_size=CHUNK_SIZE)

    def __init__(self, fields, actions, *, width=32, seed):
        super().__init__()
        self.head = head_for(actions, CHUNK_SIZE)
        self.noise_size = self.head.num_outputs
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.trunk = nn.Sequential(nn.Linear(fields["state"].shape[0], width), nn.Tanh())
            self.logits = nn.Linear(width, self.head.num_outputs)
            self.value = nn.Linear(width, 1)

    def act(self, fields, noise):
        hidden = self.trunk(fields["state"])
        logits = self.logits(hidden)
        actions = self.head.mode(logits) if noise is None else self.head.sample(logits, noise)
        return PolicyStep(
            actions=actions.unflatten(-1, (CHUNK_SIZE, -1)),
            logprobs=self.head.log_prob(logits, actions).unflatten(-1, (CHUNK_SIZE, -1)),
            values=self.value(hidden)[:, 0],
        )

    def evaluate(self, fields, actions, extras):
        hidden = self.trunk(fields["state"])
        logits = self.logits(hidden)
        return ModelOutputs(
            logprobs=self.head.log_prob(logits, actions.flatten(-2)).unflatten(-1, (CHUNK_SIZE, -1)),
            entropies=self.head.entropy(logits).unflatten(-1, (CHUNK_SIZE, -1)),
            values=self.value(hidden)[:, 0],
        )
