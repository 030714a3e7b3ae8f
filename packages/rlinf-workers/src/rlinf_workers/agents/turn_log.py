"""What an episode has asked of the engine so far: enough to go on with it later, to begin it again, and to record it.

A history is stored as what it adds to an earlier one, so that a conversation of n turns takes no n times its tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from rlinf_workers.agents.link import EpisodeReport
from rlinf_workers.agents.records import Sampled

EpisodeKey = tuple[int, int, int]
"""Step and index with which its prompt was submitted, and which of the prompt's episodes it is."""


class LoggedTurn(msgspec.Struct, kw_only=True):
    """A turn that was asked for.

    Example: turn 5 followed [1, 2, 3] and was answered with [7, 8]; turn 6 follows [1, 2, 3, 7, 8, 4]:
        turn 5: base 0, num_kept 0, added [1, 2, 3]; turn 6: base 5, num_kept 5, added [4]
    """

    noise: int
    """Identifies the turn in its episode, because it follows from all tokens before it (noise.py)."""
    base: int = 0
    """Noise of the turn whose history and answer this history begins with; 0: none."""
    num_kept: int = 0
    """Tokens of them with which it begins."""
    added: list[int] = []
    """Those after them."""
    agent: str = ""
    """Whose turn it is."""
    sampled: Sampled | None = None
    """All tokens, or those so far."""
    has_ended: bool = False


class LateEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of a group that goes on in the next step."""

    member: int
    report: EpisodeReport | None = None
    """None: it has not ended."""
    turns: list[LoggedTurn] = []
    """Of one that has not ended."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[LateEpisode]).decode


def pack_episodes(episodes: Sequence[LateEpisode]) -> bytes:
    """The episodes of a group, as `LateGroup.episodes` has them."""
    return _encode(episodes)


def unpack_episodes(packed: bytes) -> list[LateEpisode]:
    """The reverse of `pack_episodes`; b"" has none."""
    return _decode(packed) if packed else []


class TurnLog:
    """The turns of an episode, in the order in which they were asked for.

    Args:
        keeps_histories: False: only what was sampled is kept.
    """

    def __init__(self, turns: Iterable[LoggedTurn] = (), *, keeps_histories: bool) -> None:
        self._keeps_histories = keeps_histories
        self._turns: dict[int, LoggedTurn] = {}
        self._ends: dict[bytes, int] = {}
        """Digest of a history, or of one with its answer -> its turn."""
        self._lengths: set[int] = set()
        """In tokens, of what `_ends` has."""
        for turn in turns:
            self._turns[turn.noise] = turn
            self._note(turn)

    @property
    def turns(self) -> list[LoggedTurn]:
        """All of them."""
        return list(self._turns.values())

    def get(self, noise: int) -> LoggedTurn | None:
        """A turn; None: it was not asked for."""
        return self._turns.get(noise)

    def history(self, noise: int) -> list[int]:
        """The tokens that a turn follows."""
        chain = [self._turns[noise]]
        while chain[-1].base:
            chain.append(self._turns[chain[-1].base])
        tokens: list[int] = []
        for earlier, turn in zip([None, *reversed(chain)], reversed(chain), strict=False):
            if earlier is not None and earlier.sampled is not None:
                tokens += earlier.sampled.token_ids
            del tokens[turn.num_kept :]
            tokens += turn.added
        return tokens

    def through(self, noise: int) -> list[int]:
        """The tokens that a turn follows, and what there is of it."""
        sampled = self._turns[noise].sampled
        return self.history(noise) + (sampled.token_ids if sampled is not None else [])

    def can_continue(self, base: int, num_kept: int) -> bool:
        """Whether a history that begins with so many tokens of this turn and its answer is known."""
        if not base:
            return True
        turn = self._turns.get(base)
        return turn is not None and (turn.has_ended or num_kept <= len(self.history(base)))

    def add(self, noise: int, token_ids: Sequence[int], agent: str = "") -> LoggedTurn:
        """A turn that is asked for now.

        Args:
            token_ids: what it follows.
        """
        turn = LoggedTurn(noise=noise, agent=agent)
        if self._keeps_histories:
            turn.base, turn.num_kept = self._longest_known(token_ids)
            turn.added = list(token_ids[turn.num_kept :])
        self._turns[noise] = turn
        self._note(turn)
        return turn

    def end(self, noise: int, sampled: Sampled) -> None:
        """A turn has its answer."""
        turn = self._turns[noise]
        turn.sampled, turn.has_ended = sampled, True
        self._note(turn)

    def _note(self, turn: LoggedTurn) -> None:
        """Takes note of what later histories can begin with."""
        if not self._keeps_histories:
            return
        tokens = self.history(turn.noise)
        self._end_at(tokens, turn)
        if turn.has_ended and turn.sampled is not None:
            self._end_at(tokens + turn.sampled.token_ids, turn)

    def _end_at(self, tokens: Sequence[int], turn: LoggedTurn) -> None:
        self._ends.setdefault(hashlib.sha256(array("q", tokens).tobytes()).digest(), turn.noise)
        self._lengths.add(len(tokens))

    def _longest_known(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The turn whose history, or history and answer, is the longest beginning of these tokens, and its length."""
        base, num_kept, at, digest = 0, 0, 0, hashlib.sha256()
        for length in sorted(self._lengths):
            if length > len(token_ids):
                break
            digest.update(array("q", token_ids[at:length]).tobytes())
            at = length
            if turn := self._ends.get(digest.digest()):
                base, num_kept = turn, length
        return base, num_kept
