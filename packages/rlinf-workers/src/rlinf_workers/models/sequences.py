"""Prompt groups as one padded batch for a training forward. Legend: B = groups * G sequences, L prompt width, T
completion width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.logprobs import token_logprobs
from rlinf_workers.records import SampleGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBatch:
    """Sequences of several groups: prompts padded on the left, completions on the right.

    Example: one group, G = 2, prompt [7, 8], completions [5, 2] and [5, 9, 2]:
        token_ids = [[7, 8, 5, 2, 0], [7, 8, 5, 9, 2]], prompt_mask = [[1, 1], [1, 1]], loss_mask = [[1, 1, 0], [1, 1,
        1]]
    """

    token_ids: Tensor
    """[B, L + T] int64"""
    prompt_mask: Tensor
    """[B, L] int64, 0 on padding."""
    loss_mask: Tensor
    """[B, T] float32"""

    @property
    def completion_ids(self) -> Tensor:
        """[B, T]"""
        return self.token_ids[:, self.prompt_mask.shape[1] :]

    def to(self, device: torch.device) -> SequenceBatch:
        return SequenceBatch(
            token_ids=self.token_ids.to(device),
            prompt_mask=self.prompt_mask.to(device),
            loss_mask=self.loss_mask.to(device),
        )


def pack_groups(groups: Sequence[SampleGroup], pad_id: int) -> SequenceBatch:
    """Pads to the longest prompt and the longest completion among the groups."""
    prompt_width = max(len(group.prompt_ids) for group in groups)
    completion_width = max(int(group.loss_mask.sum(-1).max()) for group in groups)
    tokens, prompt_masks, loss_masks = [], [], []
    for group in groups:
        size, length = len(group.completion_ids), len(group.prompt_ids)
        prompt = torch.full((size, prompt_width), pad_id)
        prompt[:, prompt_width - length :] = group.prompt_ids
        prompt_mask = torch.zeros(size, prompt_width, dtype=torch.int64)
        prompt_mask[:, prompt_width - length :] = 1
        tokens.append(torch.cat([prompt, _fit(group.completion_ids, completion_width, pad_id)], 1))
        prompt_masks.append(prompt_mask)
        loss_masks.append(_fit(group.loss_mask, completion_width, 0.0))
    return SequenceBatch(
        token_ids=torch.cat(tokens), prompt_mask=torch.cat(prompt_masks), loss_mask=torch.cat(loss_masks)
    )


def completion_logprobs(model: Any, batch: SequenceBatch, temperature: float) -> Tensor:
    """Log-probability of each completion token given what stands before it, [B, T] float32, nats, at the sampling
    temperature."""
    arguments: dict[str, Any] = {}
    if not bool(
        batch.prompt_mask.all()
    ):  # without left padding causality is mask enough, and attention takes its fast path
        mask = torch.cat([batch.prompt_mask, torch.ones_like(batch.completion_ids)], 1)
        arguments = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)}
    width = batch.completion_ids.shape[1]
    output = model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=width + 1, **arguments)
    return token_logprobs(output.logits[:, :-1], batch.completion_ids, temperature=temperature or 1.0)


def _fit(rows: Tensor, width: int, value: float) -> Tensor:
    """Cuts or pads the last dimension to `width`."""
    return torch.nn.functional.pad(rows[:, :width], (0, max(0, width - rows.shape[1])), value=value)
