"""Actor: trains a language model on scored groups. Here a reward turns into a gradient.

scored groups -> advantages -> micro-batches of a shard -> policy loss -> gradient buffers -> one AdamW step

Which advantage, which loss and how many steps is the algorithm's (rlinf_algos.algorithm). Where one update is made of
advantages that need their own group alone, gradients add up while groups still arrive; else the step's groups are
gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlinf_algos.algorithm import Algorithm
from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader
from rlinf_workers.language.actor_loss import STATISTICS, ActorLoss
from rlinf_workers.language.critic import Critic
from rlinf_workers.language.learning_groups import AdvantageMaker, LearningGroup, choose_groups, has_signal, whiten
from rlinf_workers.models.language_model import ModelSettings, build_model, load_tokenizer, pad_token_id
from rlinf_workers.models.sequences import SequenceBatch, completion_logprobs, fit_width, pack_groups
from rlinf_workers.records.language import ExampleBatch, ScoredGroup
from rlinf_workers.training.checkpoint import load_model_weights, read_json, write_json
from rlinf_workers.training.optimizer import OptimizerSettings
from rlinf_workers.training.replicated.gradients import ShardedGradients
from rlinf_workers.training.worker import TrainingWorker

record(Algorithm)
KL_COEF = "kl_coef.json"
"""File of a checkpoint: the adapted weight of the KL."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """What and how the actor trains."""

    model: ModelSettings
    algorithm: Algorithm
    optimizer: OptimizerSettings
    critic: OptimizerSettings | None = None
    """Of the critic; needed where the algorithm has one."""
    warm_start: OptimizerSettings | None = None
    num_shards: int
    micro_batch_groups: int
    """Groups in one forward and backward."""
    num_prompts: int
    """Groups that a step trains on; with oversampling more arrive."""
    max_completion_tokens: int
    """The rollout's limit."""
    temperature: float
    """The rollout's."""


@dataclass
class _Shard:
    """Groups of one shard that wait for their micro-batch to fill."""

    number: int
    groups: list[LearningGroup] = field(default_factory=list)


class Actor(TrainingWorker):
    """Policy-gradient training of a causal language model, data-parallel over its ranks."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        algorithm, limit = settings.algorithm, settings.max_completion_tokens
        self._model = build_model(settings.model, self.device)
        self._tokenizer = load_tokenizer(settings.model.folder)
        self._pad_id = pad_token_id(self._model, self._tokenizer)
        self._advantages = AdvantageMaker(algorithm, max_completion_tokens=limit)
        self._kl_sums: dict[int, Tensor] = {}
        self._loss = ActorLoss(algorithm, temperature=settings.temperature, max_completion_tokens=limit)
        self._gradients = ShardedGradients(
            self._model.parameters(), settings.num_shards, self.ranks, num_statistics=len(STATISTICS)
        )
        self._optimizer = settings.optimizer.make(self._model.parameters())
        self._critic = self._make_critic() if algorithm.has_critic else None
        self._warm_optimizer = settings.warm_start.make(self._model.parameters()) if settings.warm_start else None
        self._warm_steps = 0

    def _make_critic(self) -> Critic:
        settings = self._settings
        assert settings.critic, "the algorithm has a critic, so have the settings"
        return Critic(
            settings.algorithm,
            settings.model,
            settings.critic,
            num_shards=settings.num_shards,
            ranks=self.ranks,
            device=self.device,
            pad_id=self._pad_id,
        )

    # -- stages ----------------------------------------------------------------------------------------------------

    def train(self, scored: Reader[ScoredGroup]) -> None:
        """Stage: the groups of a step, `algorithm.num_updates` optimizer steps. Reads its groups in the order of their
        index."""
        self._kl_sums = {shard: torch.zeros(2, dtype=torch.float64) for shard in self._gradients.shards}
        if self._settings.algorithm.gathers_whole_step:
            self._train_gathered([group for chunk in scored for group in chunk])
        else:
            self._train_streaming(scored)
        if self._settings.algorithm.kl_target is not None:
            self._adapt_kl()

    def imitate(self, examples: Reader[ExampleBatch]) -> None:
        """Stage: supervised training on (prompt, answer) pairs; one optimizer step for each batch of `num_shards`
        shards."""
        assert self._warm_optimizer and self._settings.warm_start, "the flow has a warm start, so have the settings"
        self._gradients.zero()
        last_shard = self._gradients.shards[-1]
        for chunk in examples:
            for batch in chunk:
                self._add_examples(batch)
                if batch.shard == last_shard:
                    tokens, loss, *_ = self._gradients.reduce().tolist()
                    self._apply(self._warm_optimizer, self._settings.warm_start, self._warm_steps, tokens)
                    self._warm_steps += 1
                    self.record("warm_start/loss", loss / tokens)
                    self._gradients.zero()

    # -- one step of training --------------------------------------------------------------------------------------

    def _train_streaming(self, scored: Reader[ScoredGroup]) -> None:
        """One optimizer step; gradients add up while groups still arrive. On-policy: the proximal policy is the
        policy itself."""
        shards = self._begin_update()
        for chunk in scored:
            for group in chunk:
                if self._record_signal(group) or not self._settings.algorithm.dynamic_sampling:
                    self._add(shards, self._learn_from(group))
        self._end_update(shards)

    def _train_gathered(self, scored: Sequence[ScoredGroup]) -> None:
        """Several optimizer steps, or advantages that the whole step decides about."""
        algorithm = self._settings.algorithm
        for group in scored:
            self._record_signal(group)
        positions = {group.samples.index: group.samples.index for group in scored}
        num_groups = self.step.num_items
        if algorithm.dynamic_sampling:
            limit = self._settings.num_prompts
            by_parts = self._advantages.reads_parts
            positions = choose_groups(scored, self._gradients, num_groups, limit, by_parts=by_parts)
            num_groups = len(positions)
        groups = self._prepare([group for group in scored if group.samples.index in positions])
        if algorithm.whiten_advantages:
            whiten(self._by_shard(groups), self._gradients)
        for _ in range(algorithm.num_epochs):
            for minibatch in range(algorithm.num_minibatches):
                shards = self._begin_update()
                for group in groups:
                    if positions[group.index] * algorithm.num_minibatches // num_groups == minibatch:
                        self._add(shards, group)
                self._end_update(shards)

    def _prepare(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """What has to be known before the first optimizer step: values, advantages, and the log-probabilities that
        anchor the ratio."""
        values: dict[int, Tensor] = {}
        if self._critic is not None:
            if self._critic.is_fresh:
                self._critic.start_from(self._model)
            values = self._of_each(scored, self._critic.values)
        proximal: dict[int, Tensor] = {}
        if self._settings.algorithm.num_updates > 1:
            proximal = self._of_each(scored, self._proximal_logprobs)
        groups = [self._learn_from(group, values.get(group.samples.index)) for group in scored]
        for group in groups:
            group.proximal_logprobs = proximal.get(group.index)
        return groups

    def _learn_from(self, scored: ScoredGroup, values: Tensor | None = None) -> LearningGroup:
        """The group with its advantages; a KL in the reward is recorded."""
        group = self._advantages.make(scored, values)
        if group.kl is not None:
            tokens = float(scored.samples.loss_mask.sum())
            self.record("actor/ref_kl", float(group.kl.sum()) / max(tokens, 1.0), weight=tokens)
            sums = torch.tensor([float(group.kl.double().sum()), len(group.kl)], dtype=torch.float64)
            self._kl_sums[group.index % self._settings.num_shards] += sums
        return group

    def _adapt_kl(self) -> None:
        """The weight of the KL for the next step, the same on all ranks."""
        if self.rank == 0:
            self.record("actor/kl_coef", self._advantages.kl_coef)
        kl, num_samples = self._gradients.sum_over_shards(self._kl_sums).tolist()
        if num_samples:
            self._advantages.adapt_kl_coef(kl, int(num_samples))

    def _of_each(self, scored: Sequence[ScoredGroup], of: Callable[[SequenceBatch], Tensor]) -> dict[int, Tensor]:
        """Index of a group -> what a forward says of its tokens, [G, T]. In micro-batches of a shard, so that numbers
        do not depend on the number of ranks."""
        found: dict[int, Tensor] = {}
        size = self._settings.micro_batch_groups
        for shard in self._gradients.shards:
            mine = [group.samples for group in scored if group.samples.index % self._settings.num_shards == shard]
            for start in range(0, len(mine), size):
                samples = mine[start : start + size]
                batch = pack_groups(samples, self._pad_id).to(self.device)
                rows = of(batch).cpu().split(batch.group_size)
                for sample, row in zip(samples, rows, strict=True):
                    found[sample.index] = fit_width(row, sample.completion_ids.shape[1]) * sample.loss_mask
        return found

    @torch.no_grad()
    def _proximal_logprobs(self, batch: SequenceBatch) -> Tensor:
        return completion_logprobs(self._model, batch, self._settings.temperature)

    def _by_shard(self, groups: Sequence[LearningGroup]) -> dict[int, list[LearningGroup]]:
        num_shards = self._settings.num_shards
        return {shard: [g for g in groups if g.index % num_shards == shard] for shard in self._gradients.shards}

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def _begin_update(self) -> dict[int, _Shard]:
        self._gradients.zero()
        if self._critic is not None:
            self._critic.zero()
        return {number: _Shard(number) for number in self._gradients.shards}

    def _add(self, shards: Mapping[int, _Shard], group: LearningGroup) -> None:
        shard = shards[group.index % self._settings.num_shards]
        shard.groups.append(group)
        if len(shard.groups) == self._settings.micro_batch_groups:
            self._backward(shard)

    def _end_update(self, shards: Mapping[int, _Shard]) -> None:
        for shard in shards.values():
            if shard.groups:
                self._backward(shard)
        self._policy_step()
        if self._critic is not None:
            recorded = self._critic.step()
            for name, value in recorded.items() if self.rank == 0 else ():
                self.record(name, value)

    def _backward(self, shard: _Shard) -> None:
        """Forward and backward of the waiting groups. Groups without any advantage teach the policy nothing (but for a
        penalty in the loss) and only count."""
        groups, shard.groups = shard.groups, []
        useful = [group for group in groups if self._loss.is_useful(group)]
        divisor = sum(self._loss.divisor(group.samples) for group in groups)
        num_tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
        if useful:
            loss, statistics = self._loss.of(self._model, useful, self._pad_id, self.device)
            counts = [divisor, float(loss.detach()), num_tokens]
            self._gradients.backward(shard.number, loss, [*counts, *statistics])
        else:
            counts = [divisor, 0.0, num_tokens]
            self._gradients.add_statistics(shard.number, [*counts, *[0.0] * (len(STATISTICS) - len(counts))])
        groups = [group for group in groups if group.samples.loss_mask.any()]
        if self._critic is not None and groups:
            self._critic.backward(shard.number, groups)

    def _policy_step(self) -> None:
        sums = dict(zip(STATISTICS, self._gradients.reduce().tolist(), strict=True))
        divisor = sums["divisor"] or 1.0
        grad_norm, rate = self._apply(self._optimizer, self._settings.optimizer, self._policy_steps, divisor)
        self._policy_steps += 1
        if self.rank:  # every rank has the same sums; one reports them
            return
        tokens, trained = max(sums["tokens"], 1.0), max(sums["trained"], 1.0)
        self.record("actor/loss", sums["loss"] / divisor)
        self.record("actor/grad_norm", grad_norm)
        self.record("actor/learning_rate", rate)
        self.record("actor/trained_token_fraction", sums["trained"] / tokens)
        self.record("actor/clip_fraction", sums["clipped"] / trained)
        self.record("actor/logprob_gap", sums["gap"] / trained)
        self.record("actor/rollout_kl", sums["rollout_kl"] / trained)
        if self._settings.algorithm.kl_coef and self._settings.algorithm.kl_in == "loss":
            self.record("actor/ref_kl", sums["kl"] / trained)
        if self._loss.knows_entropy:
            self.record("actor/entropy", sums["entropy"] / trained)
        if self._settings.algorithm.correction:
            self.record("actor/corrected_fraction", sums["corrected"] / trained)
        if self._settings.algorithm.off_policy_threshold is not None:
            self.record("actor/off_policy_fraction", sums["off_policy"] / trained)

    def _apply(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, step: int, divisor: float
    ) -> tuple[float, float]:
        """Steps on the summed gradient / divisor. Returns the gradient norm before clipping and the learning rate."""
        rate = settings.set_rate(optimizer, step)
        grad_norm = self._optimizer_step(optimizer, num_terms=divisor, max_grad_norm=settings.max_grad_norm)
        return grad_norm, rate

    def _record_signal(self, group: ScoredGroup) -> bool:
        signal = has_signal(group, by_parts=self._advantages.reads_parts)
        self.record("actor/groups_without_advantage", float(not signal))
        return signal

    def _add_examples(self, batch: ExampleBatch) -> None:
        token_ids, mask = batch.token_ids.to(self.device), batch.loss_mask[:, 1:].to(self.device)
        logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten(), reduction="none")
        loss = (losses.view_as(mask) * mask).sum()
        statistics = [float(mask.sum()), float(loss.detach()), *[0.0] * (len(STATISTICS) - 2)]
        self._gradients.backward(batch.shard, loss, statistics)

    # -- weights, state, checkpoints -------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())

    def save_model(self, folder: str) -> None:
        """Writes a folder that any Hugging Face tool loads: weights, config, tokenizer. Rank 0 writes, the others do
        nothing."""
        if self.rank == 0:
            self._model.save_pretrained(folder, safe_serialization=True)
            self._tokenizer.save_pretrained(folder)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if self._critic is not None:
            self._critic.move(device)

    def _save_weights(self, folder: str) -> None:
        self.save_model(f"{folder}/model")
        if self._settings.algorithm.kl_target is not None:
            write_json(f"{folder}/{KL_COEF}", {"kl_coef": self._advantages.kl_coef})
        if self._critic is not None:
            self._critic.save(folder)

    def _load_weights(self, folder: str) -> None:
        load_model_weights(self._model, f"{folder}/model")
        if self._settings.algorithm.kl_target is not None:
            self._advantages.kl_coef = float(read_json(f"{folder}/{KL_COEF}")["kl_coef"])
        if self._critic is not None:
            self._critic.load(folder)
