"""The noise of a turn: it follows from the episode and from what the policy has read, not from when it is sampled."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence

from rlinf_workers.agents.pictures import FIRST_REFERENCE


def noise_of_episode(seed: int, step: int, index: int, member: int) -> int:
    """A number below 2**63 for an episode."""
    return _number(struct.pack(">4q", seed, step, index, member))


def noise_of_attempt(noise: int, attempt: int) -> int:
    """That of an attempt at it, from 0."""
    return _number(struct.pack(">2q", noise, attempt))


def noise_of_agent(noise: int, agent: str) -> int:
    """That of the turns of an agent in an attempt; without a name the attempt's own."""
    return _number(struct.pack(">q", noise) + agent.encode()) if agent else noise


class TurnNoise:
    """The noise of the turns of an episode: the n-th turn that follows the same tokens always has the same.

    Args:
        noise: `noise_of_attempt`.
    """

    def __init__(self, noise: int) -> None:
        self._noise = noise
        self._counts: Counter[bytes] = Counter()

    def next(self, token_ids: Sequence[int], seed: int | None) -> int:
        """The noise of a turn that follows these tokens.

        Args:
            seed: of the request; None: it has none.
        """
        size = "q" if max(token_ids, default=0) >= FIRST_REFERENCE else "i"
        read = hashlib.sha256(struct.pack(f">{len(token_ids)}{size}", *token_ids)).digest()
        number = self._counts[read]
        self._counts[read] += 1
        return _number(struct.pack(">3q", self._noise, number, -1 if seed is None else seed) + read)


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
