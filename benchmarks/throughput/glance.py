"""A policy that reads every byte of the pictures and computes next to nothing, which leaves the way there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies import Needs, Policy, head_for
from rlinf_workers.policies.base import Fields, PolicyStep
from rlinf_workers.policies.pictures import chosen_cameras
from rlinf_workers.trainers import ModelOutputs


class Glance(Policy):
    """Answers the mean brightness of all pictures, through one layer."""

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        return Needs(reads=chosen_cameras(fields, None), chunk_size=1)

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self._cameras = chosen_cameras(fields, None)
        self.head = head_for(actions, 1)
        self.noise_size = self.head.num_outputs
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layer = nn.Linear(1, self.head.num_outputs + 1)

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        outputs, values = self._outputs(fields)
        actions = self.head.mode(outputs) if noise is None else self.head.sample(outputs, noise)
        logprobs = self.head.log_prob(outputs, actions)
        return PolicyStep(actions=actions[:, None], logprobs=logprobs[:, None], values=values)

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        outputs, values = self._outputs(fields)
        return ModelOutputs(
            logprobs=self.head.log_prob(outputs, actions[:, 0])[:, None],
            entropies=self.head.entropy(outputs)[:, None],
            values=values,
        )

    def _outputs(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """[n, numbers of the head], [n]"""
        pictures = [fields[name].flatten(1) for name in self._cameras]
        sums = sum(picture.sum(1, dtype=torch.int64) for picture in pictures)
        outputs = self.layer(torch.as_tensor(sums)[:, None] / (255 * sum(picture.shape[1] for picture in pictures)))
        return outputs[:, :-1], outputs[:, -1]
