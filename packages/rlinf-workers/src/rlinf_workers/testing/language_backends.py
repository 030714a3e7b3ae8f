"""A language model for the conformance suite of training backends that support nothing else.

    check_backend(MyBackend, folder=str(tmp_path), subject=LanguageSubject())
    check_backend(MyBackend, folder=str(tmp_path), subject=ValueSubject())        a critic

Expected values are computed by transformers' model, autograd and torch's AdamW on the whole batch, in float32. With
`check_ranks`, each process creates its own model.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.backends import NUM_ROWS, Subject
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers.base import ModelAdapter, ModelOutputs, OptimizerSettings

TEMPERATURE, WIDTH, LENGTH = 0.7, 5, 6


class LanguageSubject(Subject):
    """A Qwen2 of two layers, and prompts with one completion each."""

    bound = 1e-5
    readable = OptimizerSettings(learning_rate=1e-2, epsilon=1.0, max_grad_norm=1e9)
    ordinary = OptimizerSettings(
        learning_rate=1e-3,
        epsilon=1e-3,  # above the float32 noise of gradients that should be 0
        weight_decay=0.1,
        max_grad_norm=0.05,
        lr_warmup_steps=3,
        lr_decay_steps=10,
        min_lr_ratio=0.5,
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._model = replace(tiny_model(Path(self._folder.name)), has_weights=False)

    def kind(self, seed: int = 0) -> ModelAdapter:
        return TokenModel(replace(self._model, seed=seed), TEMPERATURE)

    def rows(self, which: slice) -> SequenceBatch:
        generator = torch.Generator().manual_seed(6)
        prompts = torch.randint(2, 12, (NUM_ROWS, WIDTH), generator=generator)
        completions = torch.randint(2, 12, (NUM_ROWS, LENGTH), generator=generator)
        numbers = torch.arange(NUM_ROWS)[:, None]
        prompt_mask = (torch.arange(WIDTH) >= numbers % 3).long()
        mask = (torch.arange(LENGTH) <= numbers % LENGTH).float()
        return SequenceBatch(
            prompt_ids=(prompts * prompt_mask)[which],
            prompt_mask=prompt_mask[which],
            completion_ids=(completions * mask.long())[which],
            loss_mask=mask[which],
        )

    def sums(self, batch: SequenceBatch) -> tuple[float, float]:
        return float(len(batch.completion_ids)), float(batch.completion_ids.sum())

    def loss(self, batch: SequenceBatch, answers: ModelOutputs) -> Tensor:
        return ((answers.logprobs.exp() - 0.1 * answers.entropies) * batch.loss_mask).sum()

    def touch(self, model: Any) -> None:
        """It has no learned buffer."""


class ValueSubject(LanguageSubject):
    """The same as a critic, trained on the completion tokens."""

    def kind(self, seed: int = 0) -> ModelAdapter:
        return ValueModel(replace(self._model, seed=seed))

    def loss(self, batch: SequenceBatch, answers: ModelOutputs) -> Tensor:
        return ((answers.values - batch.completion_ids).square() * batch.loss_mask).sum()
