"""OpenVLA-OFT (arXiv:2502.19645) as a policy: a chunk of K actions from one forward pass of OpenVLA's model.

    [begin | patches of the pictures | state | prompt | K A empty positions | end]

All positions attend to each other. The hidden state at a position predicts the next number, as in a language model, so
that the last prompt position and all empty positions but the last predict the chunk: either one of 256 bins for each
number, or the numbers themselves through a separate head (`l1`). For learning, `l1` samples from a Laplace distribution
around them.

The value is computed from the hidden state that predicts the first number, as in RLinf's research code.

Legend: n rows, P positions, K actions of a chunk, A dimensions of an action, B bins, H width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Fields, Needs, PolicyError, PolicyStep
from rlinf_workers.policies.heads.categories import CategoriesHead
from rlinf_workers.policies.layers import in_own_dtype
from rlinf_workers.policies.openvla.actions import act_with_gripper, learn_with_gripper
from rlinf_workers.policies.openvla.base import (
    PrismaticPolicy,
    acting_facts,
    check_prompts,
    checked_spec,
    checkpoint_notes,
    num_patches,
    positions_of,
    spec_of,
    with_patches,
)
from rlinf_workers.policies.openvla.checkpoint import ModelSpec
from rlinf_workers.policies.openvla.model import shapes_of
from rlinf_workers.policies.openvla_oft.files import check_part, read_part, read_vision_backbone, write_part
from rlinf_workers.policies.openvla_oft.heads import (
    ContinuousHead,
    ProprioProjector,
    laplace_draw,
    laplace_entropy,
    laplace_log_prob,
)
from rlinf_workers.policies.openvla_oft.options import OftOptions
from rlinf_workers.policies.openvla_oft.scaling import Scaling
from rlinf_workers.policies.pictures import colour_cameras
from rlinf_workers.trainers.base import ModelOutputs

END = 2
"""The end-of-sequence token, both in Llama's vocabulary and for a model without a tokenizer."""


class OpenVLAOFT(PrismaticPolicy):
    """Acts on one to three pictures [n, H, W, 3], the instruction and, on request, the state [n, D]."""

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen = OftOptions.of(options)
        cameras = colour_cameras(fields, chosen.cameras)
        state_size = chosen.state_size(fields)
        spec = checked_spec(fields, actions, chosen)
        num_empty = chosen.chunk_size * actions.low.numel()
        num_others = len(cameras) * num_patches(spec) + bool(state_size) + num_empty + chosen.end_token
        check_prompts(fields, spec, num_others)
        _check_states(spec, chosen, state_size)
        _check_parts(_with_film(spec, chosen), chosen, state_size)
        reads = (*cameras, "instruction", *(["state"] if state_size else []))
        return Needs(
            reads=reads,
            chunk_size=chosen.chunk_size,
            values_of_actions=chosen.values == "action",
            reads_gripper_sign=chosen.opens is not None,
            notes=checkpoint_notes(spec, chosen),
            acting=acting_facts(spec, chosen, cameras, ("head", "proprio", "film", "end_token")),
        )

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        self._options = chosen = OftOptions.of(options)
        self._state_size = chosen.state_size(fields)
        spec, several = _with_film(spec_of(actions, chosen), chosen), chosen.values == "action"
        super().__init__(
            spec,
            chosen,
            colour_cameras(fields, chosen.cameras),
            seed=seed,
            num_values=chosen.chunk_size if several else 1,
        )
        self._several_values = several
        self.scale_actions = Scaling(spec.statistics)
        self.scale_state = None if spec.state_statistics is None else Scaling(spec.state_statistics)
        self._load_parts()
        self._token = CategoriesHead((spec.num_bins,))
        numbers = chosen.chunk_size * self._num_dims
        self.noise_size = numbers * (spec.num_bins if self.action_head is None else 1)

    def make_more(self) -> None:
        num_dims = len(self._spec.statistics.low)
        self.proprio_projector = ProprioProjector(self._state_size, self._width) if self._state_size else None
        self.action_head = ContinuousHead(self._width, num_dims) if self._options.head == "l1" else None
        if self.action_head is not None:
            self.language_model.lm_head.requires_grad_(False)  # its output is not used

    @torch.no_grad()
    def _load_parts(self) -> None:
        for part, path in self._options.part_files().items() if not self.is_outline else ():
            mine = getattr(self, part).state_dict(prefix=_prefix_of(part))
            for name, tensor in _read(part, path, self._spec).items():
                mine[name].copy_(tensor)

    def write_published(self, output: Path, dtype: torch.dtype | None = None) -> Sequence[str]:
        others, parts = super().write_published(output, dtype), self._options.part_files()
        for part, path in parts.items():
            write_part(path, output / path.name, getattr(self, part).state_dict(prefix=_prefix_of(part)), dtype)
        return [name for name in others if name.partition(".")[0] not in parts]

    # -- answers ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        states = self._states(fields)
        values = self._values_of(states)
        if self.action_head is not None:
            centre = self._predicted(states)
            scaled = centre
            if noise is not None:
                scaled = laplace_draw(centre, noise.view_as(centre), self._options.spread)
            return PolicyStep(
                actions=act_with_gripper(self.scale_actions.inverse(scaled), self._opens),
                logprobs=laplace_log_prob(scaled, centre, self._options.spread),
                values=values,
                extras={"scaled_actions": scaled},
            )
        logits = self._logits(states)
        bins = self._token.mode(logits) if noise is None else self._token.sample(logits, noise.view_as(logits))
        actions, extras = self._acted(self._in_chunks(bins))
        return PolicyStep(
            actions=actions,
            logprobs=self._in_chunks(self._token.log_prob(logits, bins)),
            values=values,
            extras=extras,
        )

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        states = self._states(fields)
        values = self._values_of(states)
        if self.action_head is not None:
            centre = self._predicted(states)
            logprobs = laplace_log_prob(extras["scaled_actions"], centre, self._options.spread)
            return ModelOutputs(
                logprobs=logprobs, entropies=laplace_entropy(centre, self._options.spread), values=values
            )
        logits, bins = self._logits(states), self._bins(actions, extras).reshape(len(actions), -1, 1)
        return ModelOutputs(
            logprobs=self._in_chunks(self._token.log_prob(logits, bins)),
            entropies=self._in_chunks(self._token.entropy(logits)),
            values=values,
        )

    def imitate(self, fields: Fields, actions: Tensor, noise: Tensor) -> Tensor:
        """`tokens`: the cross entropy, summed over a chunk; `l1`: the mean absolute error of the numbers, scaled to
        -1..1."""
        if self.action_head is None:
            return super().imitate(fields, actions, noise)
        targets = self.scale_actions(learn_with_gripper(actions, self._opens))
        return (self._predicted(self._states(fields)) - targets).abs().mean((1, 2))

    # -- the model -------------------------------------------------------------------------------------------------

    def _states(self, fields: Fields) -> Tensor:
        """[n, K A, H]: the last hidden states of the positions that predict the numbers of the chunk."""
        ids, mask = self._prompts(fields["instruction"])
        num_ends = int(self._options.end_token)
        embedded, end = self._embed(ids), self._embed(torch.full_like(ids[:, :num_ends], END))
        language = _mean_word(embedded, mask, end) if self._options.film else None
        seen = self._see(fields, language)
        if self.proprio_projector is not None:
            state = fields["state"] if self.scale_state is None else self.scale_state(fields["state"])
            proprio = in_own_dtype(self.proprio_projector, state).to(seen.dtype)
            seen = torch.cat([seen, proprio[:, None]], dim=1)
        context, mask = with_patches(embedded, mask, seen)
        num_empty = self._options.chunk_size * self._num_dims
        empty = context.new_zeros(len(context), num_empty, self._width)
        mask = torch.cat([mask, mask.new_ones(len(mask), num_empty + num_ends)], dim=1)
        outputs = self.language_model.model(
            inputs_embeds=torch.cat([context, empty, end], dim=1),
            attention_mask=mask.bool()[:, None, None].expand(-1, 1, mask.shape[1], -1),
            position_ids=positions_of(mask),
            use_cache=False,
        )
        first = outputs.last_hidden_state.shape[1] - num_ends - num_empty - 1
        return outputs.last_hidden_state[:, first : first + num_empty]

    def _predicted(self, states: Tensor) -> Tensor:
        """[n, K, A] in -1..1, float32 at least."""
        assert self.action_head is not None, "a head of tokens predicts no numbers"
        return in_own_dtype(self.action_head, states)

    def _values_of(self, states: Tensor) -> Tensor:
        values = self._values(states[:, 0])
        return values.unsqueeze(-1) if self._several_values and values.ndim == 1 else values

    def _in_chunks(self, numbers: Tensor) -> Tensor:
        """[...] -> [n, K, A]"""
        return numbers.reshape(-1, self._options.chunk_size, self._num_dims)


def _mean_word(embedded: Tensor, mask: Tensor, end: Tensor) -> Tensor:
    """[n, H]: the mean embedding of prompt and end, without padding.

    Args:
        end: [n, 1, H], or [n, 0, H] without an end token.
    """
    counts = mask[..., None].to(embedded.dtype)
    return ((embedded * counts).sum(1) + end.sum(1)) / (counts.sum(1) + end.shape[1])


def _with_film(spec: ModelSpec, options: OftOptions) -> ModelSpec:
    width = spec.text_config["hidden_size"] if options.film else 0
    dino, siglip = (replace(tower, language_width=width) for tower in spec.towers)
    return replace(spec, towers=(dino, siglip))


def _check_states(spec: ModelSpec, options: OftOptions, state_size: int) -> None:
    """Raises: PolicyError if a checkpoint has no statistics for its states, or other states than the environment."""
    if not state_size or options.folder is None:
        return
    if spec.state_statistics is None:
        raise PolicyError(
            f"{options.folder}: the dataset has no statistics of 'proprio', or none for options.normalization="
            f"{options.normalization}, and options.proprio needs them"
        )
    if (num_dims := len(spec.state_statistics.low)) != state_size:
        raise PolicyError(f"its states have {num_dims} numbers, but the environment provides {state_size}")


def _check_parts(spec: ModelSpec, options: OftOptions, state_size: int) -> None:
    """Raises: PolicyError if the file of a module is missing or does not fit."""
    width = spec.text_config["hidden_size"]
    with torch.device("meta"):
        parts = {
            "proprio_projector": ProprioProjector(max(state_size, 1), width),
            "action_head": ContinuousHead(width, len(spec.statistics.low)),
        }
    shapes = {part: {name: tuple(t.shape) for name, t in module.state_dict().items()} for part, module in parts.items()}
    towers = {name: shape for name, shape in shapes_of(spec).items() if name.startswith("vision_backbone.")}
    for part, path in options.part_files().items():
        tensors = _read(part, path, spec, shapes_alone=True)
        check_part(path, tensors, towers if part == "vision_backbone" else shapes[part])


def _read(part: str, path: Path, spec: ModelSpec, *, shapes_alone: bool = False) -> dict[str, Tensor]:
    if part == "vision_backbone":
        return read_vision_backbone(path, spec, shapes_alone=shapes_alone)
    return read_part(path, shapes_alone=shapes_alone)


def _prefix_of(part: str) -> str:
    """The prefix of a module's tensor names in its file."""
    return "vision_backbone." if part == "vision_backbone" else ""
