"""The tree of a session's tokens, and which of its turns a request continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rlinf_workers.agents.messages import Message, history_difference
from rlinf_workers.agents.records import Author, Sampled, TokenNode
from rlinf_workers.agents.templates import AuthoredTokens


class TokenTree:
    """Nodes that only ever grow. A piece that stands at its place already is not added again, so that what requests
    share is stored and computed once."""

    def __init__(self) -> None:
        self.nodes: list[TokenNode] = []
        self._children: dict[tuple[int, Author, tuple[int, ...]], int] = {}

    def add(self, parent: int, pieces: Sequence[AuthoredTokens], differs: str = "") -> int:
        """Adds pieces after a node, and returns the last one's.

        Args:
            parent: -1: they begin a history.
            differs: belongs to the first one that is new.
        """
        for piece in pieces:
            key = (parent, piece.author, piece.token_ids)
            index = self._children.get(key)
            if index is None:
                node = TokenNode(parent=parent, author=piece.author, token_ids=list(piece.token_ids), differs=differs)
                index = self._children[key] = len(self.nodes)
                self.nodes.append(node)
                differs = ""
            parent = index
        return parent

    def add_turn(self, parent: int, sampled: Sampled, state: str, agent: str = "") -> int:
        """Adds what the policy sampled after a node. Two turns with the same tokens are two nodes."""
        node = TokenNode(
            parent=parent,
            author="policy",
            token_ids=list(sampled.token_ids),
            sampled=sampled,
            state=state,
            agent=agent,
        )
        self.nodes.append(node)
        return len(self.nodes) - 1

    def set_reward(self, index: int, reward: float) -> None:
        self.nodes[index] = msgspec.structs.replace(self.nodes[index], reward=reward)

    def token_ids(self, index: int) -> list[int]:
        """All tokens up to and including those of a node; [] for -1."""
        parts: list[list[int]] = []
        while index >= 0:
            parts.append(self.nodes[index].token_ids)
            index = self.nodes[index].parent
        return [token for part in reversed(parts) for token in part]


@dataclass(slots=True)
class ServedTurn:
    """A turn, and the conversation that it ends."""

    messages: tuple[Message, ...]
    """Of the conversation, the turn as it was returned included."""
    node: int
    num_continued: int = 0
    """How many requests have continued it."""


class ServedTurns:
    """Finds the turn that a request continues, by digests of conversations."""

    def __init__(self) -> None:
        self.turns: list[ServedTurn] = []
        self._by_digest: dict[bytes, ServedTurn] = {}

    def add(self, digest: bytes, turn: ServedTurn) -> None:
        """Adds a turn under the digest of its conversation. Of two equal ones the later is continued."""
        self.turns.append(turn)
        self._by_digest[digest] = turn

    def deepest(self, digests: Sequence[bytes]) -> ServedTurn | None:
        """The longest conversation that the messages with these digests begin with, and go beyond."""
        return next((turn for one in reversed(digests[:-1]) if (turn := self._by_digest.get(one))), None)

    def difference(self, messages: Sequence[Message]) -> str:
        """What differs first between a request and the conversation that agrees with it longest."""
        if not self.turns:
            return ""
        closest = max(reversed(self.turns), key=lambda turn: _num_shared(turn.messages, messages))
        shared = history_difference(closest.messages, messages[: len(closest.messages)])
        return shared or "the same history, continued again or with other tools"


def _num_shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
