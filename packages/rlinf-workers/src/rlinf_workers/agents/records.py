"""What an episode leaves behind: a tree of tokens, each with its author, and how the episode ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

Author = Literal["policy", "template", "tool", "user"]
"""Who wrote tokens. policy: an engine sampled them, and only they can have a loss; template: the chat template, between
two turns; tool: the result of a call; user: the task, or anyone else who speaks in the conversation."""

Cause = Literal[
    "",
    "service",
    "tool_service",
    "harness_lost",
    "engine_lost",
    "turns",
    "tokens",
    "time",
]
"""Why an episode ended otherwise than by its own decision; "": it did not.

The policy cannot have caused the first four, so the episode is done again and in the end discarded: `service` (the
session server or the reward failed), `tool_service` (a tool could not be reached or crashed by itself), `harness_lost`
(the harness died or raised an error of its own), `engine_lost`. It can have caused the others, so they are scored:
`turns` (no turn left), `tokens` (no room left), `time` (its program or its thinking took too long). A call that fails
by the policy's doing ends no episode: the policy reads what was wrong.
"""
NOT_OF_POLICY: frozenset[Cause] = frozenset(("service", "tool_service", "harness_lost", "engine_lost"))
"""The causes that the policy cannot have brought about."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine sampled for a request."""

    token_ids: list[int]
    """The end token included."""
    logprobs: list[float]
    """nats, at the sampling temperature, one for each token."""
    versions: list[tuple[int, int]]
    """Number of tokens and the version of the weights that sampled them, in order; all tokens are covered."""
    truncated: bool = False
    """It ended at the limit of tokens."""
    noise: int = 0
    """Seeds the noise that it was drawn with, see noise.py."""


def cut(sampled: Sampled, num_tokens: int, *, truncated: bool) -> Sampled:
    """Its first tokens; the same if it has no more.

    Args:
        truncated: whether it ends at a limit then.
    """
    if len(sampled.token_ids) <= num_tokens:
        return sampled
    versions, left = [], num_tokens
    for number, version in sampled.versions:
        if left:
            versions.append((min(number, left), version))
            left -= versions[-1][0]
    return Sampled(
        token_ids=sampled.token_ids[:num_tokens],
        logprobs=sampled.logprobs[:num_tokens],
        versions=versions,
        truncated=truncated,
        noise=sampled.noise,
    )


class TokenNode(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one author, continuing those of its parent."""

    parent: int
    """Index of an earlier node; -1: it begins a history."""
    author: Author
    token_ids: list[int]
    sampled: Sampled | None = None
    """Of the policy's tokens; its `token_ids` are the same."""
    agent: str = ""
    """Of the policy's tokens: the agent whose turn it was; "": the job has no agents by name."""
    reward: float | None = None
    """Of this turn of the policy; None: only the episode has one."""
    state: str = ""
    """Identifies what the policy saw before this turn, for advantages that compare turns from equal states."""
    differs: str = ""
    """Where a request did not continue the history: what differed first."""


class AgentTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The tree of an episode, or several trees if it began a new history.

    Example: a task (2 tokens), a turn (3), a tool's result (2), and two turns that were sampled from there:
        nodes = [user -1, policy 0, tool 1, policy 2, policy 2]; leaves() = [3, 4]; path(4) = [0, 1, 2, 4]
    """

    nodes: list[TokenNode]
    reward: float | None = None
    """Of the episode; None: the job's reward scores its last turn."""
    rewards: dict[str, float] = {}
    """Agent -> its reward in the episode; one without an entry has the reward of the episode."""
    cause: Cause = ""
    detail: str = ""
    """For people: the message that goes with the cause."""
    printed: str = ""
    """What the harness printed."""

    def leaves(self) -> list[int]:
        """Indices of the nodes that nothing continues, in order."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def path(self, index: int) -> list[int]:
        """Indices of the nodes from the beginning of the history to this one."""
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def token_ids(self, index: int) -> list[int]:
        """All tokens of a history, up to and including this node."""
        return [token for one in self.path(index) for token in self.nodes[one].token_ids]

    @property
    def is_discarded(self) -> bool:
        """Whether it ended by what the policy cannot have caused, so that nothing is learned from it."""
        return self.cause in NOT_OF_POLICY


def turns(trajectory: AgentTrajectory) -> Iterator[TokenNode]:
    """The policy's turns, in the order in which they were sampled."""
    return (node for node in trajectory.nodes if node.author == "policy")


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class EpisodeEnded(Exception):
    """An episode ended otherwise than by its own decision.

    Args:
        detail: for people.
        printed: what the harness printed until then.
    """

    def __init__(self, cause: Cause, detail: str = "", *, printed: str = "") -> None:
        super().__init__(detail or cause)
        self.cause: Cause = cause
        self.detail, self.printed = detail, printed


class HarnessRaised(EpisodeEnded):
    """The harness or custom agent raised an exception in this episode."""
