"""OpenVLA as a policy: [begin | patches | prompt] -> the tokens of an action, one after the other.

For learning, each token is a choice among the action tokens only. The value comes from three layers on the hidden state
that predicts the first of them, which depends on the observation but not on the action, as in arXiv:2505.19789 ("What
Can RL Bring to VLA Generalization?").

Legend: n rows, P positions of the context, A dimensions of an action, B bins, H width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.policies.base import Fields, Needs, PolicyStep
from rlinf_workers.policies.heads.categories import CategoriesHead
from rlinf_workers.policies.openvla.base import (
    PrismaticPolicy,
    SharedOptions,
    acting_facts,
    check_prompts,
    checked_spec,
    checkpoint_notes,
    num_patches,
    positions_of,
    spec_of,
    with_patches,
)
from rlinf_workers.policies.options import options_of
from rlinf_workers.policies.pictures import colour_cameras
from rlinf_workers.trainers.base import ModelOutputs


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVLAOptions(SharedOptions):
    """Options of the policy."""

    camera: str | None = None
    """Camera name, as in "image.<camera>"; None: the only one."""


class OpenVLA(PrismaticPolicy):
    """Acts on one picture [n, H, W, 3] and the instruction."""

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen = options_of(OpenVLAOptions, options)
        camera = _camera(fields, chosen.camera)
        spec = checked_spec(fields, actions, chosen)
        check_prompts(fields, spec, num_patches(spec) + actions.low.numel() - 1)
        return Needs(
            reads=(camera, "instruction"),
            reads_gripper_sign=chosen.opens is not None,
            notes=checkpoint_notes(spec, chosen),
            acting=acting_facts(spec, chosen, [camera]),
        )

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        chosen = options_of(OpenVLAOptions, options)
        super().__init__(spec_of(actions, chosen), chosen, [_camera(fields, chosen.camera)], seed=seed)
        self._token, self._tokens = (CategoriesHead((self._spec.num_bins,) * n) for n in (1, self._num_dims))
        self.noise_size = self._tokens.num_outputs

    @torch.no_grad()
    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        embeddings, mask = self._context(fields)
        positions = positions_of(mask)
        chosen: list[Tensor] = []
        logits: list[Tensor] = []
        values, cache = torch.zeros(()), None
        for dim in range(self._num_dims):
            outputs = self.language_model.model(
                inputs_embeds=embeddings,
                attention_mask=mask,
                position_ids=positions,
                **as_cache(cache),
                use_cache=True,
            )
            cache, state = outputs.past_key_values, outputs.last_hidden_state[:, -1]
            if dim == 0:
                values = self._values(state)
            logits.append(self._logits(state))
            if noise is None:
                bins = self._token.mode(logits[-1])
            else:
                bins = self._token.sample(logits[-1], noise.unflatten(1, (self._num_dims, -1))[:, dim])
            chosen.append(bins[:, 0])
            embeddings = self._embed_bins(bins)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
        all_bins = torch.stack(chosen, dim=1)
        actions, extras = self._acted(all_bins[:, None])
        return PolicyStep(
            actions=actions,
            logprobs=self._tokens.log_prob(torch.cat(logits, dim=-1), all_bins)[:, None],
            values=values,
            extras=extras,
        )

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        bins = self._bins(actions, extras)[:, 0]
        states = self._states(fields, bins)
        logits = self._logits(states).flatten(1)
        return ModelOutputs(
            logprobs=self._tokens.log_prob(logits, bins)[:, None],
            entropies=self._tokens.entropy(logits)[:, None],
            values=self._values(states[:, 0]),
        )

    def imitate(self, fields: Fields, actions: Tensor, noise: Tensor) -> Tensor:
        """The cross entropy of the next token at temperature 1, as in supervised training of language models; acting at
        a lower temperature is less random than the demonstrations."""
        bins = self._bins(actions, {})[:, 0]
        logits = self._temperature * self._logits(self._states(fields, bins)).flatten(1)
        return -self._tokens.log_prob(logits, bins).sum(1)

    def _states(self, fields: Fields, bins: Tensor) -> Tensor:
        """[n, A, H]: the hidden states that predict the tokens of the actions [n, A]."""
        context, mask = self._context(fields)
        mask = torch.cat([mask, mask.new_ones(len(bins), self._num_dims - 1)], dim=1)
        outputs = self.language_model.model(
            inputs_embeds=torch.cat([context, self._embed_bins(bins[:, :-1])], dim=1),
            attention_mask=mask,
            position_ids=positions_of(mask),
            use_cache=False,
        )
        return outputs.last_hidden_state[:, -self._num_dims :]

    def _context(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Embeddings [n, P, H] of the context before the action, and their mask [n, P]."""
        ids, mask = self._prompts(fields["instruction"])
        return with_patches(self._embed(ids), mask, self._see(fields))


def _camera(fields: Mapping[str, FieldSpec], camera: str | None) -> str:
    return colour_cameras(fields, None if camera is None else [camera], at_most=1, option="camera")[0]
