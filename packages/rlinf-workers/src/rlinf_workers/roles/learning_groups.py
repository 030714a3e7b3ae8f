"""From scored groups to what the update learns from: which groups count, and the advantage of each token.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> whitened over the step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import dapo, rewards_at_last_token
from rlinf_algos.algorithm import KLS, Algorithm
from rlinf_algos.parts import ADVANTAGES, advantage_takes
from rlinf_workers.records import SampleGroup, ScoredGroup
from rlinf_workers.roles.gradients import ShardedGradients

WHITEN_EPSILON = 1e-8


@dataclass(kw_only=True, slots=True)
class LearningGroup:
    """A group on its way through the actor. G completions of at most T tokens."""

    samples: SampleGroup
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

    @property
    def index(self) -> int:
        return self.samples.index


def has_signal(group: ScoredGroup) -> bool:
    """Whether any two rewards differ: without that a group says nothing about which completion is better."""
    return bool((group.rewards != group.rewards[0]).any())


def choose_groups(
    groups: Sequence[ScoredGroup], gradients: ShardedGradients, num_items: int, limit: int
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
        flags[first][group.samples.index] = int(has_signal(group))
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
        self._kl = KLS.get(algorithm.kl) if algorithm.kl_coef and algorithm.kl_in == "reward" else None

    def make(self, group: ScoredGroup, values: Tensor | None = None) -> LearningGroup:
        """The group with advantages, and with returns where there are values, [G, T]."""
        samples, rewards = group.samples, group.rewards
        lengths = samples.loss_mask.sum(-1)
        penalised = rewards + self._overlong_penalty(lengths) if self._algorithm.overlong_buffer_tokens else rewards
        returns = None
        if self._takes.works_on_tokens:
            given = {"rewards": self._token_rewards(samples, penalised), "loss_mask": samples.loss_mask}
            found = self._call(given | ({} if values is None else {"values": values}))
            advantages, returns = found if isinstance(found, tuple) else (found, None)
        else:
            if self._kl is not None:
                penalised = penalised - self._kl_penalty(samples).sum(-1)
            advantages = self._call({"rewards": penalised[None], "lengths": lengths[None]})[0]
        return LearningGroup(samples=samples, rewards=rewards, advantages=advantages, values=values, returns=returns)

    def _call(self, given: Mapping[str, Tensor]) -> Any:
        found = self._function(*(given[name] for name in self._takes.inputs), **self._options)
        advantages = found[0] if isinstance(found, tuple) else found
        if advantages.shape != given["rewards"].shape:
            raise ValueError(
                f"advantage {self._algorithm.advantage!r} gave the shape {list(advantages.shape)} for rewards "
                f"{list(given['rewards'].shape)}; they must be equal"
            )
        return found

    def _token_rewards(self, samples: SampleGroup, rewards: Tensor) -> Tensor:
        """[G, T]: the reward at the last token, less the KL penalty on each."""
        tokens = rewards_at_last_token(rewards, samples.loss_mask)
        return tokens if self._kl is None else tokens - self._kl_penalty(samples)

    def _kl_penalty(self, samples: SampleGroup) -> Tensor:
        """[G, T]. Between the policy that sampled and the reference, by the log-probabilities of the engine that
        sampled: they are constants, known as soon as the group is."""
        assert self._kl is not None and samples.ref_logprobs is not None, "a KL makes the flow have a reference"
        return self._algorithm.kl_coef * self._kl(samples.rollout_logprobs, samples.ref_logprobs, samples.loss_mask)

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
