"""Time limits after which a simulator counts as hung: a multiple of the longest time so far."""

from __future__ import annotations

_TIMES_THE_SLOWEST = 20
_TIMES_A_START = 4
"""Multiple of the slowest start that a start may take; other work on the machine affects starts less."""
_LEAST_S = 20.0
"""Smallest limit: a busy machine can stall any process for some seconds."""


class Patience:
    """Time limits in seconds for commands with a known amount of work.

    Example: if the slowest action so far took 0.8 s, a chunk of 4 actions may take 20 * 4 * 0.8 = 64 s.

    Args:
        longest_s: the limit of commands without measurements, and an upper bound of all limits.
        limit_s: one limit for all commands but "make"; None: derive the limits from measurements.
    """

    def __init__(self, *, longest_s: float, limit_s: float | None = None) -> None:
        self.longest_s = longest_s
        self._limit_s = limit_s
        self._slowest_s: dict[str, float] = {}

    def limit_s(self, kind: str | None, amount: int, *, num_losses: int) -> float:
        """Returns the limit for `amount` units of one kind of work, such as the actions of a chunk. It doubles after
        every loss at this position, so that slow work succeeds eventually. Kind None: work that is never measured."""
        if kind is None:
            limit = self.longest_s
        elif kind == "make":
            limit = max(_LEAST_S, _TIMES_A_START * self._slowest_s.get(kind, self.longest_s))
        elif self._limit_s is not None:
            limit = self._limit_s
        elif kind in self._slowest_s:
            limit = max(_LEAST_S, _TIMES_THE_SLOWEST * amount * self._slowest_s[kind])
        else:
            limit = self.longest_s
        return min(self.longest_s, limit * 2**num_losses)

    def limit_of_return_s(self, num_chunks: int, num_actions: int, *, num_losses: int) -> float:
        """Returns the limit for replaying an episode: a reset, and chunks with this many actions in total."""
        if self._limit_s is not None:
            return min(self.longest_s, (1 + num_chunks) * self._limit_s * 2**num_losses)
        reset_s = self.limit_s("reset", 1, num_losses=num_losses)
        return min(self.longest_s, reset_s + self.limit_s("step", num_actions, num_losses=num_losses))

    def took(self, kind: str | None, amount: int, seconds: float) -> None:
        """Records the duration of a completed command."""
        if kind is not None:
            self._slowest_s[kind] = max(self._slowest_s.get(kind, 0.0), seconds / amount)
