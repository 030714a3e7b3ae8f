"""Turns as the steps of an episode, for advantages on steps, and the rewards of turns on tokens.

The turns of an episode are its steps in the order in which they were sampled, whatever branch they are on: a later turn
of another branch counts as later. What the reward of an episode has beyond those of its turns is on its last turn.

Legend: G episodes of a prompt, N of them that are not discarded, S turns at most, R rows of at most T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_algos import rewards_at_last_token
from rlinf_workers.roles.records.language import SampleGroup


def turn_rewards(samples: SampleGroup) -> Tensor:
    """[G, S] float32, the rewards that turns have by themselves; a completion is one turn without."""
    return torch.zeros(samples.num_episodes, 1) if samples.turn_rewards is None else samples.turn_rewards


def num_turns(samples: SampleGroup) -> Tensor:
    """[G] int64"""
    if samples.turn_states is None:
        return torch.ones(samples.num_episodes, dtype=torch.int64)
    return (samples.turn_states >= 0).sum(1)


def steps_of_turns(
    samples: SampleGroup, rewards: Tensor, reward_coef: float, token_costs: Tensor | None
) -> dict[str, Tensor]:
    """The inputs of an advantage function on steps, [S, N] each: rewards, terminated, truncated and state_ids. An
    episode without any turn has one step, in the state -1.

    Args:
        rewards: [G], of the episodes, weighted; NaN if discarded.
        reward_coef: weight of the rewards of turns.
        token_costs: [R, T], subtracted from the reward of a token's turn; None: nothing is.
    """
    of_turns = reward_coef * turn_rewards(samples)
    counts = num_turns(samples)
    numbers = torch.arange(of_turns.shape[1])
    is_last = numbers == (counts.clamp(min=1) - 1)[:, None]
    of_turns = of_turns + (rewards - of_turns.sum(1))[:, None] * is_last
    if token_costs is not None:
        of_turns = of_turns - _sums_of_turns(samples, token_costs)
    states = torch.zeros(of_turns.shape, dtype=torch.int64) if samples.turn_states is None else samples.turn_states
    counted = ~samples.is_discarded
    return {
        "rewards": of_turns.where(numbers < counts.clamp(min=1)[:, None], 0.0)[counted].T.contiguous(),
        "terminated": is_last[counted].T.contiguous(),
        "truncated": torch.zeros(is_last[counted].T.shape, dtype=torch.bool),
        "state_ids": states[counted].T.contiguous(),
    }


def spread_over_tokens(samples: SampleGroup, advantages: Tensor) -> Tensor:
    """Advantages [S, N] -> [R, T], of each token those of its turn; [R] if a completion is one turn."""
    every = advantages.new_zeros(len(advantages), samples.num_episodes)
    every[:, ~samples.is_discarded] = advantages
    if samples.turns is None or samples.trajectories is None:
        return every[0]
    of_tokens = every[samples.turns.clamp(min=0), samples.trajectories[:, None]]
    return of_tokens.where(samples.turns >= 0, 0.0)


def rewards_on_tokens(samples: SampleGroup, rewards: Tensor, reward_coef: float) -> Tensor:
    """[R, T], of each row: the rewards of its turns at their last tokens, the rest of the episode's at its last token.

    Args: as `steps_of_turns`.
    """
    if samples.turns is None or samples.trajectories is None:
        return rewards_at_last_token(rewards, samples.loss_mask)
    of_turns = reward_coef * turn_rewards(samples)
    rest = (rewards - of_turns.sum(1))[samples.trajectories]
    turns = samples.turns
    is_last = turns >= 0
    is_last[:, :-1] &= turns[:, 1:] != turns[:, :-1]
    own = of_turns[samples.trajectories[:, None], turns.clamp(min=0)].where(is_last, 0.0)
    return rewards_at_last_token(rest, samples.loss_mask) + own


def _sums_of_turns(samples: SampleGroup, values: Tensor) -> Tensor:
    """[G, S], sums of values [R, T] over the tokens of each turn."""
    if samples.turns is None or samples.trajectories is None:
        return values.sum(1, keepdim=True)
    shape = turn_rewards(samples).shape
    inside = samples.turns >= 0
    places = samples.trajectories[:, None] * shape[1] + samples.turns
    return values.new_zeros(shape.numel()).index_add_(0, places[inside], values[inside]).view(shape)
