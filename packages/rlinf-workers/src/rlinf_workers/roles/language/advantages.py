"""From scored groups to groups to train on: which groups count, and the advantage of each token.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> overlong filter -> whitened over
the step

Legend: G completions or episodes of a prompt, R rows of at most T tokens, of episodes one for each leaf (R = G
otherwise). Discarded episodes take part in nothing: functions get the others alone, and their advantages are 0.
Functions on tokens get the tokens that the policy wrote, without those between them. Functions on steps, which
environments have, get turns as steps (turn_advantages.py).
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
)
from rlinf_workers.algorithm_parts import AdvantagePart
from rlinf_workers.roles.language.agent_parts import AgentPart, of_rows, parts_by_agent
from rlinf_workers.roles.language.turn_advantages import (
    num_turns,
    rewards_on_tokens,
    spread_over_tokens,
    steps_of_turns,
    turn_rewards,
)
from rlinf_workers.roles.records.language import SampleGroup, ScoredGroup
from rlinf_workers.trainers.base import TrainingBackend


@dataclass(kw_only=True, slots=True)
class LearningGroup:
    """A group that the actor trains on."""

    samples: SampleGroup
    """loss_mask is 0 on rows that are filtered out."""
    rewards: Tensor
    """[G] float32, as scored."""
    advantages: Tensor
    """[R], the same for all tokens of a row, or [R, T]."""
    proximal_logprobs: Tensor | None = None
    """[R, T]; None: the policy has not moved since sampling, and its current log-probabilities are used."""
    values: Tensor | None = None
    """[R, T], by the critic before the update."""
    returns: Tensor | None = None
    """[R, T], targets of the critic."""
    logit_norms: Tensor | None = None
    """[R, T], by the policy before the update; only for advantages that read them."""
    token_kl: Tensor | None = None
    """[R, T], nats, KL to the reference; only for algorithms that have it in the reward."""
    shares: Tensor | None = None
    """[R] float32, the share that each row has of the tokens of its episode, where an aggregation by sequence takes an
    episode for one sequence; None: each row is a sequence."""
    minibatch: int = 0
    """Index of the optimizer step, within an epoch, that trains on it."""
    first_row: int = 0
    """Index of its first completion in the whole group, of which this may be a subset."""

    @property
    def index(self) -> int:
        return self.samples.index

    def subset(self, rows: slice) -> LearningGroup:
        """A subset of its completions."""
        whole = {"samples", "rewards", "minibatch", "first_row"}
        tensors: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in whole}
        tensors = {name: None if value is None else value[rows] for name, value in tensors.items()}
        first_row = self.first_row + (rows.start or 0)
        return LearningGroup(
            samples=self.samples.subset(rows),
            rewards=self.rewards,
            minibatch=self.minibatch,
            first_row=first_row,
            **tensors,
        )


def kl_estimate(algorithm: Algorithm) -> Callable[..., Tensor] | None:
    """The KL estimate that the algorithm names, with its clamp; None if the KL has no weight."""
    if not algorithm.kl_coef:
        return None
    function = KL_ESTIMATES.get(algorithm.kl)
    return function if algorithm.kl_clamp is None else partial(function, clamp=algorithm.kl_clamp)


def signals(groups: Sequence[ScoredGroup], *, by_parts: bool = False, by_turns: bool = False) -> list[bool]:
    """Whether a group has a learning signal: any two of its rewards differ, or (`by_parts`) any two values of one
    reward component, or (`by_turns`) any rewards or numbers of turns. Discarded episodes do not count. Of agents by
    name, whether one of them has."""
    if not groups:
        return []
    if groups[0].samples.agents:
        parts = [[part.group for part in parts_by_agent(group)] for group in groups]
        of_parts = iter(signals([one for own in parts for one in own], by_parts=by_parts, by_turns=by_turns))
        return [True in [next(of_parts) for _ in own] for own in parts]
    reads_parts = by_parts and groups[0].parts is not None
    rows = [_counted(group, _parts_of(group).T if reads_parts else group.rewards[None]) for group in groups]  # [K, G']
    if by_turns:
        of_turns = [torch.cat([turn_rewards(one.samples).T, num_turns(one.samples)[None]]) for one in groups]
        of_turns = [_counted(group, one) for group, one in zip(groups, of_turns, strict=True)]
        rows = [torch.cat(pair) for pair in zip(rows, of_turns, strict=True)]
    if len({row.shape for row in rows}) > 1:
        return [bool(row.shape[1]) and bool(has_signal(row).any()) for row in rows]
    stacked = torch.stack(rows)
    return has_signal(stacked.flatten(0, 1)).view_as(stacked).flatten(1).any(dim=1).tolist()


def _counted(group: ScoredGroup, values: Tensor) -> Tensor:
    """[..., G'] from [..., G], without the discarded episodes."""
    return values[..., ~group.samples.is_discarded] if group.samples.causes else values


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
        """The groups with advantages, and with returns if there are values; values and norms map index -> [R, T].

        A built-in function that compares completions is called once for all groups with equally many, [P, G]: no bit of
        a row depends on the other rows. A custom function, for which that may not hold, and one that works on tokens or
        turns are called per group. Agents by name are groups of their own.
        """
        of_groups = [(values or {}).get(group.samples.index) for group in groups]
        norms = [(logit_norms or {}).get(group.samples.index) for group in groups]
        if any(group.samples.agents for group in groups):
            learning = self._by_agent(groups, of_groups, norms)
        else:
            learning = self._learning(groups, of_groups, norms)
        if self._algorithm.overlong_filter:
            for group in learning:
                group.samples = self._filtered(group.samples)
        return learning

    def _by_agent(
        self, groups: Sequence[ScoredGroup], values: Sequence[Tensor | None], logit_norms: Sequence[Tensor | None]
    ) -> list[LearningGroup]:
        """The groups, with what was computed for each agent's part alone."""
        parts = [parts_by_agent(group) for group in groups]
        learned = iter(
            self._learning(
                [part.group for own in parts for part in own],
                _of_parts(values, parts),
                _of_parts(logit_norms, parts),
            )
        )
        by_row, pairs = self._advantage.takes.works_on == "groups", zip(groups, parts, strict=True)
        whole = [_joined(group, own, [next(learned) for _ in own], by_row) for group, own in pairs]
        for group, of_group, norms in zip(whole, values, logit_norms, strict=True):
            group.values, group.logit_norms = of_group, norms
        return whole

    def _learning(
        self, groups: Sequence[ScoredGroup], values: Sequence[Tensor | None], logit_norms: Sequence[Tensor | None]
    ) -> list[LearningGroup]:
        """The groups with what is computed from their rewards."""
        learning = [self._without_advantages(group) for group in groups]
        for group, of_group, norms in zip(learning, values, logit_norms, strict=True):
            group.values, group.logit_norms = of_group, norms
        if self._advantage.takes.works_on == "groups":
            for places in self._called_together(groups):
                self._set_on_groups([learning[place] for place in places], [groups[place] for place in places])
        else:
            sets = self._set_on_tokens if self._advantage.takes.works_on == "tokens" else self._set_on_turns
            for group in learning:
                sets(group)
        for group in learning:
            group.shares = _shares(group.samples)
        return learning

    def _called_together(self, groups: Sequence[ScoredGroup]) -> list[list[int]]:
        """The places of groups that a function on groups gets in one call."""
        is_builtin, together = self._algorithm.advantage in BUILTIN_ADVANTAGES, {}
        for place, group in enumerate(groups):
            key = len(group.counted_rewards) if is_builtin else place
            together.setdefault(key, []).append(place)
        return list(together.values())

    def _without_advantages(self, group: ScoredGroup) -> LearningGroup:
        """The KL in the reward is between the policy that sampled and the reference, from the engine's
        log-probabilities: these are constants, known as soon as the group is."""
        samples, kl = group.samples, None
        if self._kl is not None:
            kl = self._kl(samples.rollout_logprobs, samples.ref_logprobs, samples.loss_mask)
        return LearningGroup(samples=samples, rewards=group.rewards, advantages=torch.zeros(0), token_kl=kl)

    def _penalised(self, group: LearningGroup) -> Tensor:
        """[G], the weighted rewards minus the length penalty, which counts the tokens that the policy wrote."""
        penalised = group.rewards
        if self._algorithm.overlong_buffer_tokens:
            penalised = penalised + overlong_penalty(
                group.samples.by_episode(group.samples.loss_mask.sum(-1)),
                max_tokens=self._max_completion_tokens,
                buffer_tokens=self._algorithm.overlong_buffer_tokens,
                penalty=self._algorithm.overlong_penalty or 0.0,
            )
        return self._algorithm.reward_coef * penalised

    def _set_on_tokens(self, group: LearningGroup) -> None:
        mask = group.samples.loss_mask
        tokens = rewards_on_tokens(group.samples, self._penalised(group), self._algorithm.reward_coef)
        tokens = tokens if group.token_kl is None else tokens - self.kl_coef * group.token_kl
        inputs = {"rewards": tokens, "loss_mask": mask}
        for name, tensor in (("values", group.values), ("logit_norms", group.logit_norms)):
            inputs |= {} if tensor is None else {name: tensor}
        if group.samples.lengths is None:
            group.advantages, group.returns = self._advantage(inputs, tokens.shape)
            return
        places = _tokens_first(mask)
        inputs = {name: tensor.gather(1, places) for name, tensor in inputs.items()}
        advantages, returns = self._advantage(inputs, places.shape)
        inside = inputs["loss_mask"] != 0

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(mask.shape).scatter_(1, places, values.where(inside, 0.0))

        group.advantages = spread(advantages)
        group.returns = None if returns is None else spread(returns)

    def _set_on_turns(self, group: LearningGroup) -> None:
        costs = None if group.token_kl is None else self.kl_coef * group.token_kl
        inputs = steps_of_turns(group.samples, self._penalised(group), self._algorithm.reward_coef, costs)
        shape = inputs["rewards"].shape
        advantages = self._advantage(inputs, shape)[0] if shape.numel() else torch.zeros(shape)
        group.advantages = spread_over_tokens(group.samples, advantages)

    def _set_on_groups(self, learning: Sequence[LearningGroup], groups: Sequence[ScoredGroup]) -> None:
        rewards = [self._penalised(group) for group in learning]
        rewards = [
            reward if kl is None else reward - group.samples.by_episode((self.kl_coef * kl).sum(-1))
            for reward, group, kl in zip(rewards, learning, (group.token_kl for group in learning), strict=True)
        ]
        lengths = [group.samples.by_episode(group.samples.loss_mask.sum(-1)) for group in learning]
        inputs = {
            name: torch.stack([_counted(group, one) for group, one in zip(groups, values, strict=True)])
            for name, values in (("rewards", rewards), ("lengths", lengths))
        }
        shape = inputs["rewards"].shape
        advantages = self._advantage(inputs | self._parts(groups), shape)[0] if shape[1] else torch.zeros(shape)
        for group, row in zip(learning, advantages, strict=True):
            group.advantages = _of_rows(group.samples, row)

    def _parts(self, groups: Sequence[ScoredGroup]) -> dict[str, Tensor]:
        if not self._algorithm.reads_parts:
            return {}
        weights = groups[0].part_weights
        if weights is None:
            raise ValueError(f"advantage {self._algorithm.advantage!r} reads reward components; this reward has none")
        return {
            "parts": torch.stack([_counted(group, _parts_of(group).T).T for group in groups]),
            "part_weights": weights,
        }

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


def _of_parts(values: Sequence[Tensor | None], parts: Sequence[Sequence[AgentPart]]) -> list[Tensor | None]:
    """The rows of each part, of values [R, T] of each group."""
    return [
        None if value is None else value[part.rows] for value, own in zip(values, parts, strict=True) for part in own
    ]


def _joined(
    group: ScoredGroup, parts: Sequence[AgentPart], learned: Sequence[LearningGroup], by_row: bool
) -> LearningGroup:
    """The whole group.

    Args:
        learned: its parts.
        by_row: whether advantages are [R], not [R, T].
    """
    of_tokens = torch.zeros_like(group.samples.loss_mask)
    nothing = of_tokens[:, 0] if by_row else of_tokens
    advantages = of_rows([one.advantages for one in learned], parts, nothing)
    assert advantages is not None, "every part has advantages"
    has_shares = any(one.shares is not None for one in learned)
    each = [one.samples.loss_mask.new_ones(len(part.rows)) for one, part in zip(learned, parts, strict=True)]
    shares = [one.shares if one.shares is not None else ones for one, ones in zip(learned, each, strict=True)]
    return LearningGroup(
        samples=group.samples,
        rewards=group.rewards,
        advantages=advantages,
        returns=of_rows([one.returns for one in learned], parts, of_tokens),
        token_kl=of_rows([one.token_kl for one in learned], parts, of_tokens),
        shares=of_rows(shares, parts, torch.ones_like(of_tokens[:, 0])) if has_shares else None,
    )


def _of_rows(samples: SampleGroup, advantages: Tensor) -> Tensor:
    """[R], each row's advantage, from those [G'] of the episodes that are not discarded."""
    if samples.trajectories is None:
        return advantages
    every = advantages.new_zeros(samples.num_episodes)
    every[~samples.is_discarded] = advantages
    return every[samples.trajectories]


def _tokens_first(mask: Tensor) -> Tensor:
    """[R, W], the places of each row's tokens with a loss in their order, followed by others; W is the largest number
    of such tokens, at least 1."""
    inside = mask != 0
    return (~inside).to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, int(inside.sum(1).max()))]


def _shares(samples: SampleGroup) -> Tensor | None:
    """See `LearningGroup.shares`."""
    if samples.trajectories is None or len(samples.trajectories) == samples.num_episodes:
        return None
    lengths = samples.loss_mask.sum(-1)
    return lengths / samples.by_episode(lengths)[samples.trajectories].clamp(min=1.0)


def whiten(
    groups: Sequence[LearningGroup], shard_of: Callable[[int], int], backend: TrainingBackend, *, num_agents: int = 0
) -> None:
    """Normalizes advantages to mean 0 and standard deviation 1 over all tokens of the step, or over those of each agent
    by name, across shards and ranks.

    Args:
        shard_of: index of a group -> its shard.
        num_agents: that train, by name; 0: there is one, without a name.
    """
    for agent in range(max(1, num_agents)):
        rows = [_rows_of_agent(group.samples, agent) for group in groups]
        by_shard: dict[int, list[Tensor]] = {shard: [torch.zeros(0)] for shard in backend.shards}
        for group, own in zip(groups, rows, strict=True):
            mask, advantages = (group.samples.loss_mask != 0) & own[:, None], group.advantages
            by_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
            by_shard[shard_of(group.index)].append(by_token[mask])
        parts = [torch.cat(tokens) for tokens in by_shard.values()]
        moments = Moments.of_parts(parts, backend.sum_over_shards, name="advantages")
        for group, own in zip(groups, rows, strict=True):
            advantages = group.advantages.clone()
            advantages[own] = moments.whiten(group.advantages[own])
            group.advantages = advantages


def _rows_of_agent(samples: SampleGroup, agent: int) -> Tensor:
    """[R] bool; all rows if there are no agents by name."""
    if samples.row_agents is None:
        return torch.ones(len(samples.loss_mask), dtype=torch.bool)
    return samples.row_agents == agent
