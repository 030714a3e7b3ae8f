"""A recorded episode, and the same episode again: the policy samples, everything else is read from the record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rlinf_workers.agents.link import Script, Step
from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode, cut


def script_of(trajectory: AgentTrajectory) -> Script:
    """What a replay needs of an episode."""
    return Script(
        steps=[
            Step(
                parent=node.parent,
                author=node.author,
                token_ids=[] if node.sampled else node.token_ids,
                num_tokens=len(node.token_ids) if node.sampled else 0,
                noise=node.sampled.noise if node.sampled else 0,
                truncated=bool(node.sampled and node.sampled.truncated),
                agent=node.agent,
                reward=node.reward,
                state=node.state,
                differs=node.differs,
            )
            for node in trajectory.nodes
        ],
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        cause=trajectory.cause,
        detail=trajectory.detail,
    )


async def follow(script: Script, sample: Callable[[Sequence[int], int, str], Awaitable[Sampled]]) -> AgentTrajectory:
    """The episode of a record, with turns that are sampled anew.

    Args:
        sample: (tokens that the turn follows, noise, agent) -> the turn.
    """
    trajectory = AgentTrajectory(
        nodes=[], reward=script.reward, rewards=script.rewards, cause=script.cause, detail=script.detail
    )
    for step in script.steps:
        sampled = None
        if step.author == "policy":
            turn = await sample(trajectory.token_ids(step.parent), step.noise, step.agent)
            sampled = cut(turn, step.num_tokens, truncated=step.truncated)
        trajectory.nodes.append(
            TokenNode(
                parent=step.parent,
                author=step.author,
                token_ids=sampled.token_ids if sampled else step.token_ids,
                sampled=sampled,
                agent=step.agent,
                reward=step.reward,
                state=step.state,
                differs=step.differs,
            )
        )
    return trajectory
