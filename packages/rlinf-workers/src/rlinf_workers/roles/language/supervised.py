"""Supervised training of a language model: from demonstrations, or from preferences.

items -> shards -> micro-batches -> the objective's loss (objectives.py) -> the backend's gradient -> one AdamW step

It has the actor's backends, checkpoints and split of a batch (docs/decisions/020): an item belongs to shard
`index % num_shards`, so neither the number of ranks nor the micro-batches change the mean that is minimized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.lora import LoraModel, LoraSettings
from rlinf_workers.models.scorer import ScoreModel
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.micro_batches import bins_within
from rlinf_workers.roles.language.objectives import Forward, Imitation, Objective
from rlinf_workers.roles.language.preferences import BradleyTerry, DpoSettings, Preferences
from rlinf_workers.roles.records.language import Measures, Preference
from rlinf_workers.trainers.base import BackendSettings, ModelAdapter, OptimizerSettings
from rlinf_workers.trainers.worker import TrainingWorker

Measure = Callable[[Sequence[Any], Any, Forward], Tensor]
"""Items, their batch and a forward pass -> [items, K] float64."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedSettings:
    """Settings of a `SupervisedTrainer`."""

    model: ModelSettings
    optimizer: OptimizerSettings
    backend: BackendSettings = field(default_factory=BackendSettings)
    """Its shards are the shards of a batch."""
    lora: LoraSettings | None = None
    """Train an adapter instead of the model; the model must have weights."""
    micro_batch_examples: int
    """Examples in one forward and backward pass, padded to one length."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens in one forward and backward pass, packed without padding; None: `micro_batch_examples` decides."""
    tells_likeliest: bool = True
    """Whether the backend says which tokens are the most likely ones."""


class SupervisedTrainer(TrainingWorker):
    """Minimizes an objective of the items that the driver feeds, data-parallel over its ranks."""

    def __init__(self, settings: SupervisedSettings) -> None:
        self._settings = settings
        model = self._make_model()
        if settings.lora is not None:
            model = LoraModel(model, settings.model, settings.lora)
        self._backends = {"": settings.backend.make(model, self, settings.optimizer)}
        self._objective = self._make_objective(packs=settings.max_tokens_per_micro_batch is not None)

    def _make_model(self) -> ModelAdapter:
        return TokenModel(self._settings.model, temperature=1.0)

    def _make_objective(self, *, packs: bool) -> Objective[Any]:
        return Imitation(packs=packs, tells_likeliest=self._settings.tells_likeliest)

    def train(self, examples: Reader[Any]) -> None:
        """Stage: one optimizer step on all items of the step."""
        items = [item for chunk in examples for item in chunk]
        self._backend.begin(self._objective.num_sums)
        for shard, chunk in self._micro_batches(items):
            batch = self._objective.batch(chunk, shard).to(self.device)
            self._backend.backward(shard, batch, partial(self._objective.loss, chunk, batch))
        sums = self._backend.finish_backward()
        learning_rate = self._settings.optimizer.learning_rate_at(self._backend.num_steps)
        grad_norm = self._step(sums[0])
        if self.rank == 0:  # every rank has the same sums
            self.record("actor/grad_norm", grad_norm)
            self.record("actor/learning_rate", learning_rate)
            for name, value in self._objective.metrics(sums).items():
                self.record(name, value)

    def evaluate(self, examples: Reader[Any], measured: Writer[Measures]) -> None:
        """Stage: the objective's measures of each item, without training."""
        self._measure(examples, measured, self._objective.measure)

    def _measure(self, examples: Reader[Any], measured: Writer[Measures], measure: Measure) -> None:
        items = [item for chunk in examples for item in chunk]
        for shard, chunk in self._micro_batches(items):
            batch = self._objective.batch(chunk, shard).to(self.device)
            rows = measure(chunk, batch, self._backend.forward).cpu()
            for item, values in zip(chunk, rows, strict=True):
                measured.put(Measures(index=item.index, values=values), key=item.index)
        # Ranks that share one model go through their passes together, so all of them have to end them.
        self._backend.sum_over_shards(torch.zeros(len(self._backend.shards), 1))

    def _micro_batches(self, items: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Yields (shard, items of one pass); depends only on the items' indices and lengths."""
        limit, num_shards = self._settings.max_tokens_per_micro_batch, self._settings.backend.num_shards
        size = self._settings.micro_batch_examples
        for shard in self._backend.shards:
            mine = sorted((item for item in items if item.index % num_shards == shard), key=lambda item: item.index)
            if limit is None:
                yield from ((shard, mine[start : start + size]) for start in range(0, len(mine), size))
            elif mine:
                sizes = [self._objective.num_tokens(item) for item in mine]
                yield from ((shard, [mine[place] for place in places]) for places in bins_within(sizes, limit))


class PreferenceTrainer(SupervisedTrainer):
    """Learns from pairs of answers (DPO)."""

    def __init__(self, settings: SupervisedSettings, dpo: DpoSettings) -> None:
        self._dpo = dpo
        super().__init__(settings)

    def _make_objective(self, *, packs: bool) -> Preferences:
        return Preferences(self._dpo, packs=packs)

    def score(self, pairs: Reader[Preference], measured: Writer[Measures]) -> None:
        """Stage: the log-probability of both answers of each pair, [2]. Before the first step they are the
        reference's."""
        self._measure(pairs, measured, Preferences.sequence_logprobs)


class RewardModelTrainer(SupervisedTrainer):
    """Trains a reward model on pairs of answers."""

    def _make_model(self) -> ScoreModel:
        return ScoreModel(self._settings.model)

    def _make_objective(self, *, packs: bool) -> BradleyTerry:
        return BradleyTerry(packs=packs)
