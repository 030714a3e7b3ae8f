"""What each agent did in the episodes of a prompt, as a group of its own: agents by name have baselines of their own.

Legend: G episodes of a prompt with R rows, of which an agent had a turn in G' with R' rows; T tokens, S turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_workers.roles.records.language import SampleGroup, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentPart:
    """The part of an agent in a group."""

    agent: str
    """Its name."""
    rows: Tensor
    """[R'] int64, its rows in the group."""
    group: ScoredGroup
    """Those rows, of the G' episodes in which it had a turn, with its rewards. No row shares tokens."""


def parts_by_agent(group: ScoredGroup) -> list[AgentPart]:
    """The parts of the agents that had a turn, in the order of the agents. An agent without a turn in an episode takes
    no part in it, and neither helps nor harms its baseline."""
    samples = group.samples
    assert samples.row_agents is not None, "a group with agents by name"
    numbers = [(samples.row_agents == agent).nonzero()[:, 0] for agent in range(len(samples.agents))]
    return [_part(group, agent, rows) for agent, rows in enumerate(numbers) if len(rows)]


def of_rows(values: Sequence[Tensor | None], parts: Sequence[AgentPart], like: Tensor) -> Tensor | None:
    """Joins values [R'] or [R', T] of the parts; rows of no part have those of `like`, [R] or [R, T]. None if a part
    has none."""
    joined = like.clone()
    for value, part in zip(values, parts, strict=True):
        if value is None:
            return None
        joined[part.rows] = value
    return joined


def _part(group: ScoredGroup, agent: int, rows: Tensor) -> AgentPart:
    samples = group.samples
    assert samples.trajectories is not None and group.agent_rewards is not None, "a group of scored episodes"
    episodes, trajectories = samples.trajectories[rows].unique(return_inverse=True)
    names = ("completion_ids", "loss_mask", "rollout_logprobs", "ref_logprobs", "truncated", "lengths")
    taken = {name: None if (value := getattr(samples, name)) is None else value[rows] for name in names}
    rewards = group.agent_rewards[episodes, agent]
    own = replace(
        samples,
        **taken,
        **_turns(samples, agent, rows, episodes),
        trajectories=trajectories,
        rewards=rewards,
        causes=tuple(samples.causes[episode] for episode in episodes.tolist()),
        details=(),
        segments=(),
        shared=None,
        shared_with=None,
        agents=(),
        row_agents=None,
        agent_rewards=None,
        turn_agents=None,
    )
    parts = None if group.parts is None else group.parts[episodes]
    scored = replace(
        group, samples=own, rewards=rewards, agent_rewards=None, completions=(), outcomes=(), answers=(), parts=parts
    )
    return AgentPart(agent=samples.agents[agent], rows=rows, group=scored)


def _turns(samples: SampleGroup, agent: int, rows: Tensor, episodes: Tensor) -> dict[str, Tensor]:
    """`turns`, `turn_rewards` and `turn_states` with the turns of this agent alone, numbered from 0."""
    turns, agents = samples.turns, samples.turn_agents
    assert turns is not None and agents is not None and samples.trajectories is not None, "a group of episodes"
    assert samples.turn_rewards is not None and samples.turn_states is not None, "a group of episodes"
    numbers = (agents == agent).cumsum(1) - 1  # [G, S], of a turn among those of its agent
    own = turns[rows]
    is_own = agents[episodes] == agent
    places = (~is_own).to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, int(is_own.sum(1).max()))]
    is_own = is_own.gather(1, places)
    return {
        "turns": numbers[samples.trajectories[rows][:, None], own.clamp(min=0)].where(own >= 0, -1),
        "turn_rewards": samples.turn_rewards[episodes].gather(1, places).where(is_own, 0.0),
        "turn_states": samples.turn_states[episodes].gather(1, places).where(is_own, -1),
    }
