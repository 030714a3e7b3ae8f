"""From scored groups to what the update learns from: which groups count, and the advantage of each token.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> overlong filter -> whitened over
the step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import adapted_kl_coef, dapo, rewards_at_last_token
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.parts import ADVANTAGES, advantage_takes
from rlinf_algos.presets import KLS
from rlinf_workers.records.language import SampleGroup, ScoredGroup
from rlinf_workers.training.replicated.gradients import ShardedGradients

WHITEN_EPSILON = 1e-8


@dataclass(kw_only=True, slots=True)
class LearningGroup:
    """A group on its way through the actor. G completions of at most T tokens."""

    samples: SampleGroup
    """Its loss_mask is 0 on completions that are filtered out."""
    rewards: Tensor
    """[G] float32, as scored."""
    advantages: Tensor
    """[G], the same for all tokens of a completion, or [G, T]."""
    proximal_logprobs: Tensor | None = None
    """[G, T]; None: the policy has not moved since, and its own are taken."""
    values: Tensor | None = None
    """[G, T], of the critic before the update."""
    returns: Tensor | None = None
    """[G, T], what the critic should have said."""
    kl: Tensor | None = None
    """[G], nats, to the reference over each completion; of algorithms that have it in the reward."""

    @property
    def index(self) -> int:
        return self.samples.index


def kl_estimate(algorithm: Algorithm) -> Callable[..., Tensor] | None:
    """The KL to the reference that the algorithm names, with its clamp; None: it has no weight."""
    if not algorithm.kl_coef:
        return None
    function = KLS.get(algorithm.kl)
    return function if algorithm.kl_clamp is None else partial(function, clamp=algorithm.kl_clamp)


def has_signal(group: ScoredGroup, *, by_parts: bool = False) -> bool:
    """Whether any two rewards differ, or any two values of a part of them: without that a group says nothing about
    which completion is better."""
    if by_parts and group.parts is not None:
        return bool((group.parts != group.parts[0]).any())
    return bool((group.rewards != group.rewards[0]).any())


def choose_groups(
    groups: Sequence[ScoredGroup], gradients: ShardedGradients, num_items: int, limit: int, *, by_parts: bool = False
) -> dict[int, int]:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): index -> position of the first `limit` groups with a
    signal, over all ranks.

    Args:
        groups: this rank's.
        num_items: groups of the step, over all ranks.
    """
    flags = {shard: torch.zeros(num_items, dtype=torch.int64) for shard in gradients.shards}
    first = gradients.shards[0]
    for group in groups:
        flags[first][group.samples.index] = int(has_signal(group, by_parts=by_parts))
    chosen = gradients.sum_over_shards(flags).nonzero()[:limit, 0].tolist()
    return {index: position for position, index in enumerate(chosen)}


class AdvantageMaker:
    """Rewards of a group -> its advantages, by the algorithm."""

    def __init__(self, algorithm: Algorithm, *, max_completion_tokens: int) -> None:
        self._algorithm = algorithm
        self._max_completion_tokens = max_completion_tokens
        self._takes = advantage_takes(algorithm.advantage)
        self._options = algorithm.options_of(self._takes)
        self._function = ADVANTAGES.get(algorithm.advantage)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "reward" else None
        self.kl_coef = algorithm.kl_coef
        """Of a KL in the reward; changes where the algorithm has a `kl_target`."""

    @property
    def reads_parts(self) -> bool:
        """Whether advantages come from the terms of a weighted reward."""
        return "parts" in self._takes.inputs

    def adapt_kl_coef(self, kl_sum: float, num_samples: int) -> None:
        """After a step, where the algorithm has a `kl_target`.

        Args:
            kl_sum: nats, over all completions of the step, of all ranks.
            num_samples: completions of the step.
        """
        target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
        assert target is not None and horizon is not None, "asked only where there is a target"
        self.kl_coef = adapted_kl_coef(
            self.kl_coef, kl_sum / num_samples, target_kl=target, num_samples=num_samples, horizon=horizon
        )

    def make(self, group: ScoredGroup, values: Tensor | None = None) -> LearningGroup:
        """The group with advantages, and with returns where there are values, [G, T]."""
        samples = group.samples
        lengths = samples.loss_mask.sum(-1)
        penalised = group.rewards
        if self._algorithm.overlong_buffer_tokens:
            penalised = penalised + self._overlong_penalty(lengths)
        penalised = self._algorithm.reward_coef * penalised
        kl = None if self._kl is None else self._kl(samples.rollout_logprobs, self._ref(samples), samples.loss_mask)
        returns = None
        if self._takes.works_on_tokens:
            tokens = rewards_at_last_token(penalised, samples.loss_mask)
            tokens = tokens if kl is None else tokens - self.kl_coef * kl
            given = {"rewards": tokens, "loss_mask": samples.loss_mask}
            found = self._call(given | ({} if values is None else {"values": values}), tokens.shape)
            advantages, returns = found if isinstance(found, tuple) else (found, None)
        else:
            if kl is not None:
                penalised = penalised - (self.kl_coef * kl).sum(-1)
            given = {"rewards": penalised[None], "lengths": lengths[None], **self._parts(group)}
            advantages = self._call(given, given["rewards"].shape)[0]
        return LearningGroup(
            samples=self._filtered(samples) if self._algorithm.overlong_filter else samples,
            rewards=group.rewards,
            advantages=advantages,
            values=values,
            returns=returns,
            kl=None if kl is None else kl.sum(-1),
        )

    def _call(self, given: Mapping[str, Tensor], shape: torch.Size) -> Any:
        found = self._function(*(given[name] for name in self._takes.inputs), **self._options)
        advantages = found[0] if isinstance(found, tuple) else found
        if advantages.shape != shape:
            raise ValueError(
                f"advantage {self._algorithm.advantage!r} gave the shape {list(advantages.shape)} for rewards "
                f"{list(shape)}; they must be equal"
            )
        return found

    def _parts(self, group: ScoredGroup) -> dict[str, Tensor]:
        if not self.reads_parts:
            return {}
        if group.parts is None or group.part_weights is None:
            raise ValueError(f"advantage {self._algorithm.advantage!r} reads the parts of a reward, and this has none")
        return {"parts": group.parts[None], "part_weights": group.part_weights}

    @staticmethod
    def _filtered(samples: SampleGroup) -> SampleGroup:
        """Without the completions that were cut at the limit. They were compared with the others all the same."""
        if samples.truncated is None:
            raise ValueError("algorithm.overlong_filter: the engine does not say which completions were cut")
        kept = dapo.overlong_filter(samples.loss_mask, samples.truncated)
        return replace(samples, loss_mask=kept.to(samples.loss_mask.dtype))

    @staticmethod
    def _ref(samples: SampleGroup) -> Tensor:
        """[G, T]. The KL in the reward is between the policy that sampled and the reference, by the log-probabilities
        of the engine that sampled: they are constants, known as soon as the group is."""
        assert samples.ref_logprobs is not None, "a KL makes the flow have a reference"
        return samples.ref_logprobs

    def _overlong_penalty(self, lengths: Tensor) -> Tensor:
        """[G], what is added to the reward: at most 0."""
        return dapo.overlong_penalty(
            lengths,
            max_tokens=self._max_completion_tokens,
            buffer_tokens=self._algorithm.overlong_buffer_tokens,
            penalty=self._algorithm.overlong_penalty or 0.0,
        )


def whiten(by_shard: Mapping[int, Sequence[LearningGroup]], gradients: ShardedGradients) -> None:
    """Mean 0 and deviation 1 over all tokens of the step, whatever its shards and ranks. Two passes in float64: the
    deviation is that from the mean."""
    count, total = gradients.sum_over_shards(
        {shard: _sums(groups, lambda advantages: advantages) for shard, groups in by_shard.items()}
    ).tolist()
    mean = total / max(count, 1.0)
    squares = gradients.sum_over_shards(
        {shard: _sums(groups, lambda advantages: (advantages - mean).square()) for shard, groups in by_shard.items()}
    )[1].item()
    std = (squares / max(count - 1.0, 1.0)) ** 0.5
    for groups in by_shard.values():
        for group in groups:
            group.advantages = (group.advantages - mean) / (std + WHITEN_EPSILON)


def _sums(groups: Sequence[LearningGroup], of: Any) -> Tensor:
    """[tokens, sum over tokens]"""
    sums = torch.zeros(2, dtype=torch.float64)
    for group in groups:
        mask = group.samples.loss_mask.double()
        values = of(group.advantages.double())
        values = values if values.ndim == 2 else values[:, None].expand(mask.shape)
        sums += torch.stack([mask.sum(), (values * mask).sum()])
    return sums
