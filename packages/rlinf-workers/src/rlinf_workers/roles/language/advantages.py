"""From scored groups to groups to train on: which groups count, and the advantage of each token.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> overlong filter -> whitened over
the step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import (
    BUILTIN_ADVANTAGES,
    KL_ESTIMATES,
    Algorithm,
    Moments,
    adapted_kl_coef,
    has_signal,
    overlong_filter,
    overlong_penalty,
    rewards_at_last_token,
)
from rlinf_workers.algorithm_parts import AdvantagePart
from rlinf_workers.roles.records.language import SampleGroup, ScoredGroup
from rlinf_workers.trainers.base import TrainingBackend


@dataclass(kw_only=True, slots=True)
class LearningGroup:
    """A group that the actor trains on. G completions of at most T tokens."""

    samples: SampleGroup
    """loss_mask is 0 on completions that are filtered out."""
    rewards: Tensor
    """[G] float32, as scored."""
    advantages: Tensor
    """[G], the same for all tokens of a completion, or [G, T]."""
    proximal_logprobs: Tensor | None = None
    """[G, T]; None: the policy has not moved since sampling, and its current log-probabilities are used."""
    values: Tensor | None = None
    """[G, T], by the critic before the update."""
    returns: Tensor | None = None
    """[G, T], targets of the critic."""
    logit_norms: Tensor | None = None
    """[G, T], by the policy before the update; only for advantages that read them."""
    token_kl: Tensor | None = None
    """[G, T], nats, KL to the reference; only for algorithms that have it in the reward."""
    minibatch: int = 0
    """Index of the optimizer step, within an epoch, that trains on it."""
    first_row: int = 0
    """Index of its first completion in the whole group, of which this may be a subset."""

    @property
    def index(self) -> int:
        return self.samples.index

    def subset(self, rows: slice) -> LearningGroup:
        """A subset of its completions."""
        whole = {"samples", "minibatch", "first_row"}
        tensors: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in whole}
        tensors = {name: None if value is None else value[rows] for name, value in tensors.items()}
        first_row = self.first_row + (rows.start or 0)
        return LearningGroup(
            samples=self.samples.subset(rows), minibatch=self.minibatch, first_row=first_row, **tensors
        )


def kl_estimate(algorithm: Algorithm) -> Callable[..., Tensor] | None:
    """The KL estimate that the algorithm names, with its clamp; None if the KL has no weight."""
    if not algorithm.kl_coef:
        return None
    function = KL_ESTIMATES.get(algorithm.kl)
    return function if algorithm.kl_clamp is None else partial(function, clamp=algorithm.kl_clamp)


def signals(groups: Sequence[ScoredGroup], *, by_parts: bool = False) -> list[bool]:
    """Whether a group has a learning signal: any two of its rewards differ, or (`by_parts`) any two values of one
    reward component."""
    if not groups:
        return []
    reads_parts = by_parts and groups[0].parts is not None
    rows = torch.stack([_parts_of(group).T if reads_parts else group.rewards[None] for group in groups])  # [P, K, G]
    return has_signal(rows.flatten(0, 1)).view_as(rows).flatten(1).any(dim=1).tolist()


def choose_groups(
    groups: Sequence[ScoredGroup], have_signal: Sequence[bool], backend: TrainingBackend, num_items: int, limit: int
) -> dict[int, int]:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): index -> position of the first `limit` groups with a
    signal, over all ranks.

    Args:
        groups: the groups of this rank, and which of them have a signal.
        num_items: groups of the step, over all ranks.
    """
    flags = torch.zeros(len(backend.shards), num_items, dtype=torch.int64)
    for group, is_useful in zip(groups, have_signal, strict=True):
        flags[0][group.samples.index] = int(is_useful)
    chosen = backend.sum_over_shards(flags).nonzero()[:limit, 0].tolist()
    return {index: position for position, index in enumerate(chosen)}


class AdvantageMaker:
    """Computes the advantages of a group from its rewards."""

    def __init__(self, algorithm: Algorithm, *, max_completion_tokens: int) -> None:
        self._algorithm = algorithm
        self._max_completion_tokens = max_completion_tokens
        self._advantage = AdvantagePart(algorithm)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "reward" else None
        self.kl_coef = algorithm.kl_coef
        """The weight of a KL in the reward; it varies if the algorithm has a `kl_target`."""

    def adapt_kl_coef(self, kl_sum: float, num_samples: int) -> None:
        """Adapts the weight after a step, if the algorithm has a `kl_target`.

        Args:
            kl_sum: nats, summed over all completions of the step on all ranks.
            num_samples: number of completions of the step.
        """
        target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
        assert target is not None and horizon is not None, "called only if there is a target"
        self.kl_coef = adapted_kl_coef(
            self.kl_coef, kl_sum / num_samples, target_kl=target, num_samples=num_samples, horizon=horizon
        )

    def make(
        self,
        groups: Sequence[ScoredGroup],
        values: Mapping[int, Tensor] | None = None,
        logit_norms: Mapping[int, Tensor] | None = None,
    ) -> list[LearningGroup]:
        """The groups with advantages, and with returns if there are values; values and norms map index -> [G, T].

        A built-in function that compares completions is called once for all groups, [P, G]: no bit of a row depends on
        the other rows. A custom function, for which that may not hold, and one that works on tokens are called per
        group.
        """
        learning = [self._without_advantages(group) for group in groups]
        for group in learning:
            group.values = (values or {}).get(group.index)
            group.logit_norms = (logit_norms or {}).get(group.index)
        if self._advantage.takes.works_on == "tokens":
            for group in learning:
                self._set_on_tokens(group)
        else:
            size = max(1, len(learning)) if self._algorithm.advantage in BUILTIN_ADVANTAGES else 1
            for start in range(0, len(learning), size):
                self._set_on_groups(learning[start : start + size], groups[start : start + size])
        if self._algorithm.overlong_filter:
            for group in learning:
                group.samples = self._filtered(group.samples)
        return learning

    def _without_advantages(self, group: ScoredGroup) -> LearningGroup:
        """The KL in the reward is between the policy that sampled and the reference, from the engine's
        log-probabilities: these are constants, known as soon as the group is."""
        samples, kl = group.samples, None
        if self._kl is not None:
            kl = self._kl(samples.rollout_logprobs, samples.ref_logprobs, samples.loss_mask)
        return LearningGroup(samples=samples, rewards=group.rewards, advantages=torch.zeros(0), token_kl=kl)

    def _penalised(self, group: LearningGroup) -> Tensor:
        """[G], the weighted rewards minus the length penalty."""
        penalised = group.rewards
        if self._algorithm.overlong_buffer_tokens:
            penalised = penalised + overlong_penalty(
                group.samples.loss_mask.sum(-1),
                max_tokens=self._max_completion_tokens,
                buffer_tokens=self._algorithm.overlong_buffer_tokens,
                penalty=self._algorithm.overlong_penalty or 0.0,
            )
        return self._algorithm.reward_coef * penalised

    def _set_on_tokens(self, group: LearningGroup) -> None:
        tokens = rewards_at_last_token(self._penalised(group), group.samples.loss_mask)
        tokens = tokens if group.token_kl is None else tokens - self.kl_coef * group.token_kl
        inputs = {"rewards": tokens, "loss_mask": group.samples.loss_mask}
        for name, tensor in (("values", group.values), ("logit_norms", group.logit_norms)):
            inputs |= {} if tensor is None else {name: tensor}
        group.advantages, group.returns = self._advantage(inputs, tokens.shape)

    def _set_on_groups(self, learning: Sequence[LearningGroup], groups: Sequence[ScoredGroup]) -> None:
        rewards = [self._penalised(group) for group in learning]
        rewards = [
            reward if group.token_kl is None else reward - (self.kl_coef * group.token_kl).sum(-1)
            for reward, group in zip(rewards, learning, strict=True)
        ]
        lengths = torch.stack([group.samples.loss_mask.sum(-1) for group in learning])
        inputs = {"rewards": torch.stack(rewards), "lengths": lengths, **self._parts(groups)}
        for group, advantages in zip(learning, self._advantage(inputs, lengths.shape)[0], strict=True):
            group.advantages = advantages

    def _parts(self, groups: Sequence[ScoredGroup]) -> dict[str, Tensor]:
        if not self._algorithm.reads_parts:
            return {}
        weights = groups[0].part_weights
        if weights is None:
            raise ValueError(f"advantage {self._algorithm.advantage!r} reads reward components; this reward has none")
        return {"parts": torch.stack([_parts_of(group) for group in groups]), "part_weights": weights}

    @staticmethod
    def _filtered(samples: SampleGroup) -> SampleGroup:
        """Masks completions that were truncated. They were compared with the others all the same."""
        if samples.truncated is None:
            raise ValueError("overlong_filter: the engine does not report which completions were truncated")
        mask = overlong_filter(samples.loss_mask, samples.truncated)
        return replace(samples, loss_mask=mask.to(samples.loss_mask.dtype))


def _parts_of(group: ScoredGroup) -> Tensor:
    """[G, K]"""
    assert group.parts is not None, "either all groups of a run have reward components, or none has"
    return group.parts


def whiten(groups: Sequence[LearningGroup], shard_of: Callable[[int], int], backend: TrainingBackend) -> None:
    """Normalizes advantages to mean 0 and standard deviation 1 over all tokens of the step, across shards and ranks.

    Args:
        shard_of: index of a group -> its shard.
    """
    by_shard: dict[int, list[Tensor]] = {shard: [torch.zeros(0)] for shard in backend.shards}
    for group in groups:
        mask, advantages = group.samples.loss_mask != 0, group.advantages
        by_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
        by_shard[shard_of(group.index)].append(by_token[mask])
    parts = [torch.cat(tokens) for tokens in by_shard.values()]
    moments = Moments.of_parts(parts, backend.sum_over_shards, name="advantages")
    for group in groups:
        group.advantages = moments.whiten(group.advantages)
