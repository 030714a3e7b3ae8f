"""The loss of a micro-batch, computed from model outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_algos import Algorithm, BatchTokens, aggregated_sum, ratio_weighted_kl, sequence_hash
from rlinf_workers.algorithm_parts import EntropyBonus, PolicyLossPart
from rlinf_workers.roles.language.advantages import kl_estimate
from rlinf_workers.roles.language.logprob_mismatch import (
    NUM_SUMS,
    WorstCandidate,
    WorstToken,
    k3,
    mismatch_sums,
    worst_of,
)
from rlinf_workers.roles.language.micro_batches import MicroBatch, Tokens
from rlinf_workers.token_choice import TokenChooser, TokenValues
from rlinf_workers.trainers.base import ModelOutputs, TrainingBackend
from rlinf_workers.trainers.statistics import totals_of

TOTALS = ("divisor", "loss", "tokens", "trained tokens")
"""Sums over an update that every algorithm reports."""


class ActorLoss:
    """Model outputs and advantages -> a scalar whose gradient adds up over micro-batches, shards and ranks."""

    def __init__(self, algorithm: Algorithm, *, replays_routers: bool = False) -> None:
        self._algorithm, self._replays_routers = algorithm, replays_routers
        self._policy_loss, self._chooser = PolicyLossPart(algorithm), TokenChooser(algorithm)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "loss" else None
        self.entropy_bonus = EntropyBonus(algorithm)
        self.chooses_tokens = algorithm.chooses_tokens
        """Whether `chosen` must see the micro-batches of an update first."""
        self.knows_entropy = self.entropy_bonus.is_on or algorithm.top_entropy_fraction < 1.0
        """Whether it reads the entropies of the tokens."""
        self._anchors_at_rollout = algorithm.proximal_policy == "rollout"
        self.compares_engine = True
        """Whether the next micro-batches are compared with the engine (log-prob mismatch)."""
        has = {
            "actor/rollout_kl": True,
            "actor/ref_kl": self._kl is not None,
            "actor/entropy": self.knows_entropy,
            "actor/router_loss": algorithm.router_aux_coef > 0,
            "actor/router_agreement": replays_routers,
        }
        self.statistics = (*self._policy_loss.statistics, *(name for name, is_there in has.items() if is_there))
        """Names of the further statistics, means over the trained tokens."""
        self.num_totals = len(TOTALS) + len(self.statistics) + NUM_SUMS
        self._candidates: list[WorstCandidate] = []

    def take_worst(self) -> WorstToken | None:
        """Returns the token with the largest log-prob mismatch on this rank since the last call, and resets it."""
        candidates, self._candidates = self._candidates, []
        return worst_of(candidates)

    def of(self, micro_batch: MicroBatch, answers: ModelOutputs) -> tuple[Tensor, Tensor]:
        """Summed policy loss of the micro-batch, and the totals of the update: those of `TOTALS`, then `statistics`,
        then `mismatch_sums`."""
        batch = micro_batch.for_policy
        assert batch is not None, "a micro-batch without a gradient has no loss; see `without_gradient`"
        policy_logprobs, entropies, mask = answers.logprobs, answers.entropies, batch.sequences.loss_mask
        anchor = before = policy_logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        if self._anchors_at_rollout:
            anchor = batch.rollout_logprobs
        rollout_logprobs, num_tokens = batch.rollout_logprobs, mask.sum().double()
        surrogate = self._policy_loss(policy_logprobs, anchor, rollout_logprobs, batch.advantages, mask, batch.choice)
        terms, sums = surrogate.terms, dict.fromkeys(self.statistics, torch.zeros_like(num_tokens))
        sums |= surrogate.statistics
        if self._kl is not None:
            kl = self._kl(policy_logprobs, batch.ref_logprobs) * mask
            if self._algorithm.kl_bias_correction:
                kl = ratio_weighted_kl(kl, policy_logprobs, anchor, mask)
            terms = terms + self._algorithm.kl_coef * kl
            sums["actor/ref_kl"] = kl.detach().sum()
        if self.knows_entropy:
            entropy = entropies.masked_fill(mask == 0, 0.0)
            if self.entropy_bonus.weight:
                terms = terms - self.entropy_bonus.weight * entropy
            sums["actor/entropy"] = entropy.detach().sum()
        drift = ((policy_logprobs.detach() - rollout_logprobs) * mask).double()
        sums["actor/rollout_kl"] = k3(drift).sum()
        if batch.shares is not None and self._algorithm.aggregation == "sequence_mean_token_mean":
            terms = terms * batch.shares[:, None]  # the mean over the tokens of all rows of an episode
        total = aggregated_sum(self._algorithm.aggregation, terms, mask)
        if self._algorithm.router_aux_coef:  # a mean over the micro-batch, weighted by its share of the update
            total = total + self._algorithm.router_aux_coef * micro_batch.divisor * answers.router_loss
            sums["actor/router_loss"] = answers.router_loss.detach().double() * num_tokens
        if self._replays_routers:
            sums["actor/router_agreement"] = answers.router_agreement.double() * num_tokens
        counted = totals_of((micro_batch.divisor, total, micro_batch.num_tokens, num_tokens, *sums.values()), mask)
        return total, torch.cat([counted, self._gap(batch, before)])

    def chosen(self, micro_batches: Sequence[MicroBatch], backend: TrainingBackend) -> Iterator[MicroBatch]:
        """Chooses tokens over a whole update with one pass over its micro-batches; yields them with the choices."""
        by_shard: dict[int, list[Tokens]] = {shard: [] for shard in backend.shards}
        for micro_batch in micro_batches:
            if micro_batch.for_policy is not None:
                by_shard[micro_batch.shard].append(micro_batch.for_policy)
        values = [
            [self._values(tokens, backend.forward(tokens.sequences, entropies=self.knows_entropy)) for tokens in part]
            for part in by_shard.values()
        ]
        masks = [[tokens.sequences.loss_mask for tokens in part] for part in by_shard.values()]
        shard_choices = self._chooser.choose(values, masks, backend.sum_over_shards)
        choices = {shard: iter(part) for shard, part in zip(by_shard, shard_choices, strict=True)}
        for micro_batch in micro_batches:
            if micro_batch.for_policy is None:
                yield micro_batch
            else:
                for_policy = replace(micro_batch.for_policy, choice=next(choices[micro_batch.shard]))
                yield replace(micro_batch, for_policy=for_policy)

    def _values(self, batch: Tokens, answers: ModelOutputs) -> TokenValues:
        mask = batch.sequences.loss_mask != 0
        logprobs, advantages = answers.logprobs, batch.advantages
        anchor = logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        anchor = batch.rollout_logprobs if self._anchors_at_rollout else anchor
        advantages = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
        ids = (torch.tensor(batch.prompts)[:, None], torch.tensor(batch.rows)[:, None], torch.arange(mask.shape[1]))
        tokens = BatchTokens(
            policy_logprobs=logprobs[mask],
            proximal_logprobs=anchor[mask],
            advantages=advantages[mask],
            priorities=sequence_hash(ids).to(mask.device)[mask],
        )
        return TokenValues(tokens=tokens, entropies=answers.entropies[mask] if self.knows_entropy else torch.zeros(0))

    @torch.no_grad()
    def _gap(self, batch: Tokens, anchor: Tensor) -> Tensor:
        mask, token_ids = batch.sequences.loss_mask, batch.sequences.completion_ids
        if not self.compares_engine:
            return torch.zeros(NUM_SUMS, dtype=torch.float64, device=mask.device)
        if mask.numel():
            self._candidates.append(WorstCandidate.of(anchor, batch.rollout_logprobs, token_ids, mask, batch.prompts))
        return mismatch_sums((anchor - batch.rollout_logprobs).double(), mask)

    def without_gradient(self, micro_batch: MicroBatch) -> list[float]:
        """The totals of a micro-batch that only counts towards the divisor."""
        return [micro_batch.divisor, 0.0, micro_batch.num_tokens, 0.0, *[0.0] * (self.num_totals - len(TOTALS))]
