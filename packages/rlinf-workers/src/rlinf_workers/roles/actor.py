"""Actor: trains a language model on scored groups. Here a reward turns into a gradient.

scored groups -> advantages -> micro-batches of a shard -> clipped policy loss -> gradient buffers -> one AdamW step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlinf_algos.advantages import grpo_advantages
from rlinf_algos.kl import kl_k3
from rlinf_algos.policy_loss import ppo_clip_loss
from rlinf_workers.checkpoint import load_model_weights
from rlinf_workers.execution.ports import Reader
from rlinf_workers.models.language_model import ModelSettings, build_model, load_tokenizer, pad_token_id
from rlinf_workers.models.sequences import completion_logprobs, pack_groups
from rlinf_workers.records import ExampleBatch, ScoredGroup
from rlinf_workers.roles.gradients import ShardedGradients
from rlinf_workers.roles.training import TrainingWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Linear, from 1/warmup_steps."""
    decay_steps: int | None = None
    """Linear decay to `min_lr_ratio` over that many optimizer steps; None: constant."""
    min_lr_ratio: float = 0.1

    def learning_rate_at(self, step: int) -> float:
        """For optimizer step `step`, counted from 0."""
        factor = 1.0
        if self.decay_steps:
            factor = max(self.min_lr_ratio, 1 - step / self.decay_steps)
        if self.warmup_steps:
            factor *= min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * factor


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """What and how the actor trains."""

    model: ModelSettings
    optimizer: OptimizerSettings
    warm_start: OptimizerSettings | None
    num_shards: int
    micro_batch_groups: int
    """Groups in one forward and backward."""
    num_minibatches: int
    """Optimizer steps for each batch of groups."""
    temperature: float
    """The rollout's."""
    clip_low: float
    clip_high: float
    normalize_std: bool
    kl_coef: float


@dataclass
class _Shard:
    """Groups of one shard that wait for their micro-batch to fill."""

    groups: list[ScoredGroup] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    proximal: list[Tensor | None] = field(default_factory=list)


class Actor(TrainingWorker):
    """GRPO and other policy-gradient training of a causal language model, data-parallel over its ranks."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        self._model = build_model(settings.model, self.device)
        self._tokenizer = load_tokenizer(settings.model.folder)
        self._pad_id = pad_token_id(self._model, self._tokenizer)
        self._gradients = ShardedGradients(self._model.parameters(), settings.num_shards, self.ranks, num_statistics=6)
        self._optimizer = self._new_optimizer(settings.optimizer)
        self._warm_optimizer = self._new_optimizer(settings.warm_start) if settings.warm_start else None
        self._warm_steps = 0

    # -- stages ----------------------------------------------------------------------------------------------------

    def train(self, scored: Reader[ScoredGroup]) -> None:
        """Stage: one pass over the groups of a step, `num_minibatches` optimizer steps. Reads its groups in the order
        of their index."""
        if self._settings.num_minibatches == 1:
            self._train_streaming(scored)
        else:
            self._train_minibatches([group for chunk in scored for group in chunk])

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

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def _train_streaming(self, scored: Reader[ScoredGroup]) -> None:
        """One optimizer step; gradients add up while groups still arrive. On-policy: the proximal policy is the
        policy itself."""
        self._gradients.zero()
        shards = {shard: _Shard() for shard in self._gradients.shards}
        for chunk in scored:
            for group in chunk:
                self._add(shards[group.samples.index % self._settings.num_shards], group, None)
        self._flush(shards)
        self._policy_step()

    def _train_minibatches(self, groups: Sequence[ScoredGroup]) -> None:
        """Several optimizer steps; log-probabilities of the policy before the first one anchor the ratio."""
        proximal = {group.samples.index: self._proximal_logprobs(group) for group in groups}
        size = -(-self.step.num_items // self._settings.num_minibatches)
        for minibatch in range(self._settings.num_minibatches):
            self._gradients.zero()
            shards = {shard: _Shard() for shard in self._gradients.shards}
            for group in groups:
                if group.samples.index // size == minibatch:
                    shard = shards[group.samples.index % self._settings.num_shards]
                    self._add(shard, group, proximal[group.samples.index])
            self._flush(shards)
            self._policy_step()

    def _add(self, shard: _Shard, group: ScoredGroup, proximal: Tensor | None) -> None:
        advantages = grpo_advantages(group.rewards[None], normalize_std=self._settings.normalize_std)[0]
        shard.groups.append(group)
        shard.advantages.append(advantages)
        shard.proximal.append(proximal)
        if len(shard.groups) == self._settings.micro_batch_groups:
            self._backward(shard)

    def _flush(self, shards: Mapping[int, _Shard]) -> None:
        for shard in shards.values():
            if shard.groups:
                self._backward(shard)

    def _backward(self, shard: _Shard) -> None:
        """Forward and backward of the waiting groups. Groups without any advantage teach nothing (but for the KL) and
        only count."""
        number = shard.groups[0].samples.index % self._settings.num_shards
        useful = [i for i, a in enumerate(shard.advantages) if self._settings.kl_coef or bool((a != 0).any())]
        num_tokens = sum(float(group.samples.loss_mask.sum()) for group in shard.groups)
        for group in shard.groups:
            self.record("actor/groups_without_advantage", float(bool((group.rewards == group.rewards[0]).all())))
        if useful:
            loss, statistics = self._loss(
                [shard.groups[i] for i in useful],
                torch.cat([shard.advantages[i] for i in useful]).to(self.device),
                [shard.proximal[i] for i in useful],
            )
            self._gradients.backward(number, loss, [num_tokens, float(loss.detach()), *statistics])
        else:
            self._gradients.add_statistics(number, [num_tokens, 0.0, 0.0, 0.0, 0.0, 0.0])
        shard.groups, shard.advantages, shard.proximal = [], [], []

    def _loss(
        self, groups: Sequence[ScoredGroup], advantages: Tensor, proximal: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[float]]:
        """Sum of the token losses, and [trained tokens, clipped tokens, sum |rollout - policy| log-probability, sum
        of KL terms]."""
        samples = [group.samples for group in groups]
        batch = pack_groups(samples, self._pad_id).to(self.device)
        width, mask = batch.loss_mask.shape[1], batch.loss_mask
        policy_logprobs = completion_logprobs(self._model, batch, self._settings.temperature)
        anchor = policy_logprobs.detach()
        if proximal[0] is not None:
            anchor = torch.cat([logprobs[:, :width] for logprobs in proximal if logprobs is not None]).to(self.device)
        loss = ppo_clip_loss(
            policy_logprobs,
            anchor,
            advantages,
            mask,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        terms = loss.loss_terms
        rollout_logprobs = torch.cat([sample.rollout_logprobs[:, :width] for sample in samples]).to(self.device)
        gap = ((policy_logprobs.detach() - rollout_logprobs).abs() * mask).sum()
        kl_sum = 0.0
        if self._settings.kl_coef:
            ref = torch.cat([s.ref_logprobs[:, :width] for s in samples if s.ref_logprobs is not None]).to(self.device)
            kl = kl_k3(policy_logprobs, ref) * mask
            terms = terms + self._settings.kl_coef * kl
            kl_sum = float(kl.detach().sum())
        num_tokens = float(mask.sum())
        return terms.sum(), [num_tokens, float(loss.clip_fraction) * num_tokens, float(gap), kl_sum]

    def _policy_step(self) -> None:
        tokens, loss, trained, clipped, gap, kl = self._gradients.reduce().tolist()
        grad_norm, rate = self._apply(self._optimizer, self._settings.optimizer, self._policy_steps, max(tokens, 1.0))
        self._policy_steps += 1
        if self.rank:  # every rank has the same sums; one reports them
            return
        self.record("actor/loss", loss / max(tokens, 1.0))
        self.record("actor/grad_norm", grad_norm)
        self.record("actor/learning_rate", rate)
        self.record("actor/trained_token_fraction", trained / max(tokens, 1.0))
        self.record("actor/clip_fraction", clipped / max(trained, 1.0))
        self.record("actor/logprob_gap", gap / max(trained, 1.0))
        if self._settings.kl_coef:
            self.record("actor/ref_kl", kl / max(trained, 1.0))

    def _apply(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, step: int, num_tokens: float
    ) -> tuple[float, float]:
        """Steps on the token mean. Returns the gradient norm before clipping and the learning rate."""
        rate = settings.learning_rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        grad_norm = self._optimizer_step(optimizer, num_terms=num_tokens, max_grad_norm=settings.max_grad_norm)
        return grad_norm, rate

    @torch.no_grad()
    def _proximal_logprobs(self, group: ScoredGroup) -> Tensor:
        batch = pack_groups([group.samples], self._pad_id).to(self.device)
        logprobs = completion_logprobs(self._model, batch, self._settings.temperature)
        width = group.samples.completion_ids.shape[1]
        return nn.functional.pad(logprobs, (0, width - logprobs.shape[1]))

    def _add_examples(self, batch: ExampleBatch) -> None:
        token_ids, mask = batch.token_ids.to(self.device), batch.loss_mask[:, 1:].to(self.device)
        logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten(), reduction="none")
        loss = (losses.view_as(mask) * mask).sum()
        self._gradients.backward(batch.shard, loss, [float(mask.sum()), float(loss.detach()), 0.0, 0.0, 0.0, 0.0])

    def _new_optimizer(self, settings: OptimizerSettings) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._model.parameters(), settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )

    # -- weights, state, checkpoints -------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters())

    def save_model(self, folder: str) -> None:
        """Writes a folder that any Hugging Face tool loads: weights, config, tokenizer. Rank 0 writes, the others do
        nothing."""
        if self.rank == 0:
            self._model.save_pretrained(folder, safe_serialization=True)
            self._tokenizer.save_pretrained(folder)

    def _save_weights(self, folder: str) -> None:
        self.save_model(f"{folder}/model")

    def _load_weights(self, folder: str) -> None:
        load_model_weights(self._model, f"{folder}/model")
