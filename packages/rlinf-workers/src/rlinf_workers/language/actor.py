"""Actor: trains a language model on scored groups. Here a reward turns into a gradient.

scored groups -> advantages -> micro-batches of a shard -> policy loss -> the backend's gradient -> one AdamW step

Which advantage, which loss and how many steps is the algorithm's (rlinf_algos.algorithm); who holds the model is the
backend's business (training/base.py). Where one update is made of advantages that need their own group alone, gradients
add up while groups still arrive; else the step's groups are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.algorithm import Algorithm
from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader
from rlinf_workers.language.actor_loss import ActorLoss
from rlinf_workers.language.critic import Critic
from rlinf_workers.language.learning_groups import (
    AdvantageMaker,
    LearningGroup,
    choose_groups,
    micro_batch,
    signals,
    whiten,
)
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch, fit_width, pack_groups
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.records.language import ExampleBatch, ScoredGroup
from rlinf_workers.training.base import BackendSettings, Evaluation, OptimizerSettings
from rlinf_workers.training.worker import TrainingWorker

NUM_TOTALS = 4
"""Sums of an update that every algorithm has: divisor, loss, tokens, tokens that were trained on. The divisor makes the
summed loss the mean that the algorithm names."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """What and how the actor trains."""

    model: ModelSettings
    algorithm: Algorithm
    optimizer: OptimizerSettings
    critic: OptimizerSettings | None = None
    """The critic's; needed where the algorithm has one."""
    warm_start: OptimizerSettings | None = None
    backend: BackendSettings = field(default_factory=BackendSettings)
    """Its shards are those of a batch."""
    micro_batch_groups: int
    """Groups in one forward and backward."""
    num_prompts: int
    """Groups that a step trains on; with oversampling more arrive."""
    max_completion_tokens: int
    """The rollout's limit."""
    temperature: float
    """The rollout's."""


class Actor(TrainingWorker):
    """Policy-gradient training of a causal language model, data-parallel over its ranks."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        algorithm, limit = settings.algorithm, settings.max_completion_tokens
        self._optimizer = settings.optimizer
        policy = TokenModel(settings.model, settings.temperature)
        self._backends = {"": settings.backend.make(policy, self, self._optimizer)}
        self._critic = None
        if algorithm.has_critic:
            assert settings.critic, "the algorithm has a critic, so have the settings"
            self._backends["critic"] = settings.backend.make(ValueModel(settings.model), self, settings.critic)
            self._critic = Critic(algorithm, self._backends["critic"], self.device)
        self._advantages = AdvantageMaker(algorithm, max_completion_tokens=limit)
        self._loss = ActorLoss(algorithm, max_completion_tokens=limit)
        self._kl_sums = torch.zeros(0)
        """[shards of this rank, 2] float64, of a KL in the reward: nats, completions."""
        self._waiting: dict[int, list[LearningGroup]] = {}
        """Shard -> groups that wait for their micro-batch to fill."""

    # -- stages ----------------------------------------------------------------------------------------------------

    def train(self, scored: Reader[ScoredGroup]) -> None:
        """Stage: the groups of a step, `algorithm.num_updates` optimizer steps. Reads its groups in the order of their
        index."""
        self._optimize_with(self._settings.optimizer)
        self._kl_sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        if self._settings.algorithm.gathers_whole_step:
            self._train_gathered([group for chunk in scored for group in chunk])
        else:
            self._train_streaming(scored)
        if self._settings.algorithm.kl_target is not None:
            self._adapt_kl()

    def imitate(self, examples: Reader[ExampleBatch]) -> None:
        """Stage: supervised training on (prompt, answer) pairs; one optimizer step for each batch of `num_shards`
        shards."""
        assert self._settings.warm_start, "the flow has a warm start, so have the settings"
        self._optimize_with(self._settings.warm_start)
        self._backend.begin(2)
        for chunk in examples:
            for batch in chunk:
                self._add_examples(batch)
                if batch.shard == self._backend.shards[-1]:
                    tokens, loss = self._backend.reduce()
                    self._step(tokens)
                    self.record("warm_start/loss", loss / tokens)
                    self._backend.begin(2)

    # -- one step of training --------------------------------------------------------------------------------------

    def _train_streaming(self, scored: Reader[ScoredGroup]) -> None:
        """One optimizer step; gradients add up while groups still arrive. On-policy: the proximal policy is the
        policy itself."""
        self._begin_update()
        for chunk in scored:
            have_signal = self._signals(chunk)
            if self._settings.algorithm.dynamic_sampling:
                chunk = [group for group, useful in zip(chunk, have_signal, strict=True) if useful]
            for group in self._with_advantages(chunk):
                self._add(group)
        self._end_update()

    def _train_gathered(self, scored: Sequence[ScoredGroup]) -> None:
        """Several optimizer steps, or advantages that the whole step decides about."""
        algorithm, num_groups = self._settings.algorithm, self.step.num_items
        have_signal = self._signals(scored)
        positions = {group.samples.index: group.samples.index for group in scored}
        if algorithm.dynamic_sampling:
            positions = choose_groups(scored, have_signal, self._backend, num_groups, self._settings.num_prompts)
            num_groups = len(positions)
        groups = self._prepare([group for group in scored if group.samples.index in positions])
        for _ in range(algorithm.num_epochs):
            for minibatch in range(algorithm.num_minibatches):
                self._begin_update()
                for group in groups:
                    if positions[group.index] * algorithm.num_minibatches // num_groups == minibatch:
                        self._add(group)
                self._end_update()

    def _prepare(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """What has to be known before the first optimizer step: values, advantages, and the log-probabilities that
        anchor the ratio."""
        values: dict[int, Tensor] = {}
        if self._critic is not None:
            self._critic.start_from(self._backend)
            values = self._ask(scored, self._critic.values)
        proximal: dict[int, Tensor] = {}
        if self._settings.algorithm.num_updates > 1:
            proximal = self._ask(scored, lambda batch: self._backend.forward(batch).logprobs)
        groups = self._with_advantages(scored, values)
        for group in groups:
            group.proximal_logprobs = proximal.get(group.index)
        if self._settings.algorithm.whiten_advantages:
            whiten(groups, self._settings.backend.num_shards, self._backend)
        return groups

    def _signals(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        found = signals(scored, by_parts=self._settings.algorithm.reads_parts)
        for has_signal in found:
            self.record("actor/groups_without_advantage", float(not has_signal))
        return found

    def _with_advantages(
        self, scored: Sequence[ScoredGroup], values: Mapping[int, Tensor] | None = None
    ) -> list[LearningGroup]:
        """The groups with their advantages; a KL in the reward is recorded."""
        made = self._advantages.make(scored, values)
        for group, before in zip(made, scored, strict=True):
            if group.token_kl is not None:
                kl, tokens = group.token_kl.sum(-1), float(before.samples.loss_mask.sum())
                self.record("actor/ref_kl", float(kl.sum()) / max(tokens, 1.0), weight=tokens)
                row = self._backend.shards.index(self._shard_of(group.index))
                self._kl_sums[row] += torch.tensor([float(kl.double().sum()), len(kl)], dtype=torch.float64)
        return made

    def _adapt_kl(self) -> None:
        """The weight of the KL for the next step, the same on all ranks."""
        if self.rank == 0:
            self.record("actor/kl_coef", self._advantages.kl_coef)
        kl, num_samples = self._backend.sum_over_shards(self._kl_sums).tolist()
        if num_samples:
            self._advantages.adapt_kl_coef(kl, int(num_samples))

    def _ask(self, scored: Sequence[ScoredGroup], answer: Callable[[SequenceBatch], Tensor]) -> dict[int, Tensor]:
        """Index of a group -> what a forward says of its tokens, [G, T]. In micro-batches of a shard, so that numbers
        do not depend on the number of ranks."""
        found: dict[int, Tensor] = {}
        size = self._settings.micro_batch_groups
        for shard in self._backend.shards:
            mine = [group.samples for group in scored if self._shard_of(group.samples.index) == shard]
            for start in range(0, len(mine), size):
                samples = mine[start : start + size]
                batch = pack_groups(samples).to(self.device)
                rows = answer(batch).cpu().split(batch.group_size)
                for sample, row in zip(samples, rows, strict=True):
                    found[sample.index] = fit_width(row, sample.completion_ids.shape[1]) * sample.loss_mask
        return found

    def _shard_of(self, index: int) -> int:
        return index % self._settings.backend.num_shards

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def _begin_update(self) -> None:
        self._backend.begin(NUM_TOTALS + len(self._loss.statistics))
        if self._critic is not None:
            self._critic.begin()
        self._waiting = {shard: [] for shard in self._backend.shards}

    def _add(self, group: LearningGroup) -> None:
        shard = self._shard_of(group.index)
        self._waiting[shard].append(group)
        if len(self._waiting[shard]) == self._settings.micro_batch_groups:
            self._backward(shard)

    def _end_update(self) -> None:
        for shard, groups in self._waiting.items():
            if groups:
                self._backward(shard)
        self._policy_step()
        if self._critic is not None:
            recorded = self._critic.step()
            for name, value in recorded.items() if self.rank == 0 else ():
                self.record(name, value)

    def _backward(self, shard: int) -> None:
        """Forward and backward of the waiting groups. Groups without any advantage teach the policy nothing (but for a
        penalty in the loss) and only count."""
        groups, self._waiting[shard] = self._waiting[shard], []
        useful = [group for group in groups if self._loss.is_useful(group)]
        divisor = sum(self._loss.divisor(group.samples) for group in groups)
        num_tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
        if useful:
            batch = micro_batch(useful, self.device)

            def loss_of(answers: Evaluation) -> tuple[Tensor, list[float]]:
                loss, statistics = self._loss.of(answers, batch)
                return loss, [divisor, float(loss.detach()), num_tokens, *statistics]

            self._backend.backward(shard, batch.sequences, loss_of, entropies=self._loss.knows_entropy)
        else:
            self._backend.count(shard, [divisor, 0.0, num_tokens, 0.0, *[0.0] * len(self._loss.statistics)])
        groups = [group for group in groups if group.samples.loss_mask.any()]
        if self._critic is not None and groups:
            self._critic.backward(shard, groups)

    def _policy_step(self) -> None:
        divisor, loss, tokens, trained, *sums = self._backend.reduce()
        learning_rate = self._optimizer.learning_rate_at(self._backend.num_steps)
        grad_norm = self._step(divisor or 1.0)
        if self.rank:  # every rank has the same sums; one reports them
            return
        self.record("actor/loss", loss / (divisor or 1.0))
        self.record("actor/grad_norm", grad_norm)
        self.record("actor/learning_rate", learning_rate)
        self.record("actor/trained_token_fraction", trained / max(tokens, 1.0))
        for name, total in zip(self._loss.statistics, sums, strict=True):
            self.record(name, total / max(trained, 1.0))

    def _optimize_with(self, optimizer: OptimizerSettings) -> None:
        """A warm start has an optimizer of its own; each begins when the other ends."""
        if optimizer is not self._optimizer:
            self._backend.restart(optimizer)
            self._optimizer = optimizer

    def _add_examples(self, batch: ExampleBatch) -> None:
        batch = replace(batch, token_ids=batch.token_ids.to(self.device), loss_mask=batch.loss_mask.to(self.device))

        def loss_of(answers: Evaluation) -> tuple[Tensor, list[float]]:
            mask = batch.loss_mask[:, 1:]
            loss = (-answers.logprobs * mask).sum()
            return loss, [float(mask.sum()), float(loss.detach())]

        self._backend.backward(batch.shard, batch, loss_of)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str) -> None:
        self._optimize_with(self._settings.optimizer)
        super().save_checkpoint(folder)

    def load_checkpoint(self, folder: str) -> None:
        self._optimize_with(self._settings.optimizer)
        super().load_checkpoint(folder)

    def _state(self) -> dict[str, Any]:
        adapts = self._settings.algorithm.kl_target is not None
        return {"kl_coef": self._advantages.kl_coef} if adapts else {}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._advantages.kl_coef = float(state.get("kl_coef", self._advantages.kl_coef))
