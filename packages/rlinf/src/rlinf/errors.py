"""The errors that end a command with a message instead of a traceback."""

from __future__ import annotations


class RlinfError(Exception):
    """Root of this package's errors."""


class UserError(RlinfError, ValueError):
    """Something the user can put right: a key, a value, a file, a folder. `rlinf` prints it and exits with 2.

    Args:
        message: what is wrong, where, and what was allowed; may have several lines.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class RunFailed(RlinfError, RuntimeError):
    """A run that started and could not go on: a worker died or raised, a step passed its deadline. `rlinf` prints it
    and exits with 1."""


class ProcessesLost(RunFailed):
    """A run that lost a worker, or whose step passed its deadline. Others may take the place of its processes: what it
    has saved is whole."""

    @property
    def summary(self) -> str:
        """Who was lost and why, without the end of its log."""
        return str(self).splitlines()[0]


class Terminated(KeyboardInterrupt):
    """SIGTERM told the command to end, as whoever preempts a job does. `rlinf` exits with 143."""
