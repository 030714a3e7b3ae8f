"""An ensemble of critics over states and pictures, computed as batched matrix products: one pass over all of them.

With layer norm, each hidden layer is linear, norm, ReLU, as in RLPD's code; without it, linear and ReLU.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf_algos import follow_
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields
from rlinf_workers.policies.soft import CriticSettings, SoftCritics
from rlinf_workers.policies.soft_actor.inputs import (
    SoftActorOptions,
    SoftInputs,
    encoded,
    fields_to_read,
    make_encoder,
)

CRITIC_SEED_BIT = 1 << 32
"""So that critics begin with other weights than the policy of the same seed."""


class CriticEnsemble(SoftCritics):
    """Values of actions, given the fields that the policy reads."""

    action_center: Tensor
    action_half_range: Tensor

    def __init__(
        self,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        settings: CriticSettings,
        *,
        options: SoftActorOptions,
        seed: int,
    ) -> None:
        super().__init__()
        low, high = actions.low.flatten(), actions.high.flatten()
        self.register_buffer("action_center", (low + high) / 2)
        self.register_buffer("action_half_range", (high - low) / 2)
        reads, hidden = fields_to_read(fields, options), [options.hidden_size] * options.num_layers
        with torch.random.fork_rng():
            torch.manual_seed(seed | CRITIC_SEED_BIT)
            self.encoder = make_encoder(fields, reads)
            self.inputs = SoftInputs(fields, reads, self.encoder)
            sizes = [self.inputs.size + options.chunk_size * low.numel(), *hidden, 1]
            self.online = ParallelLayers(sizes, settings.num_critics, layer_norm=settings.layer_norm)
        self.target_inputs = copy.deepcopy(self.inputs).requires_grad_(False)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def encoded(self, fields: Fields) -> Fields:
        return encoded(fields, self.encoder)

    def forward(self, fields: Fields, actions: Tensor) -> Tensor:
        return self.online(self._beside(self.inputs(self.encoded(fields)), actions))

    def target_values(self, fields: Fields, actions: Tensor, subset: Tensor | None) -> Tensor:
        return self.target(self._beside(self.target_inputs(self.encoded(fields)), actions), subset)

    def follow(self, rate: float) -> None:
        for target, online in ((self.target_inputs, self.inputs), (self.target, self.online)):
            follow_(list(target.parameters()), list(online.parameters()), rate=rate)

    def _beside(self, inputs: Tensor, actions: Tensor) -> Tensor:
        """[n, size + K A], actions scaled to -1..1."""
        scaled = (actions - self.action_center) / self.action_half_range
        return torch.cat([inputs, scaled.flatten(1)], dim=-1)


class ParallelLayers(nn.Module):
    """E networks of the same shape with one output each; every parameter has all of them, [E, ...]."""

    def __init__(self, sizes: Sequence[int], num_networks: int, *, layer_norm: bool) -> None:
        super().__init__()
        layers = [[nn.Linear(size, out) for size, out in pairwise(sizes)] for _ in range(num_networks)]
        of_depth = list(zip(*layers, strict=True))
        self.weights = nn.ParameterList(torch.stack([layer.weight.detach().T for layer in one]) for one in of_depth)
        self.biases = nn.ParameterList(torch.stack([layer.bias.detach()[None] for layer in one]) for one in of_depth)
        widths = sizes[1:-1] if layer_norm else []
        self.gains = nn.ParameterList(torch.ones(num_networks, 1, width) for width in widths)
        self.shifts = nn.ParameterList(torch.zeros(num_networks, 1, width) for width in widths)

    def forward(self, inputs: Tensor, subset: Tensor | None = None) -> Tensor:
        """[n, size] -> [n, E], or [n, E'] of the networks with the indices `subset` [E']."""

        def chosen(parameter: Tensor) -> Tensor:
            return parameter if subset is None else parameter[subset]

        num_networks = len(self.weights[0]) if subset is None else len(subset)
        values = inputs.expand(num_networks, *inputs.shape)
        last = len(self.weights) - 1
        for depth, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(chosen(bias), values, chosen(weight))
            if depth == last:
                break
            if len(self.gains):
                values = F.layer_norm(values, values.shape[-1:])
                values = torch.addcmul(chosen(self.shifts[depth]), values, chosen(self.gains[depth]))
            values = values.relu_()
        return values[..., 0].T
