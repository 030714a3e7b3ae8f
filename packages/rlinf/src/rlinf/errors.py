"""The errors that end a command with a message instead of a traceback."""

from __future__ import annotations

INTERRUPTED = "interrupted"
"""The failure text of a session that the user interrupted."""


class RlinfError(Exception):
    """Base class of this package's errors."""

    def _render_traceback_(self) -> list[str]:
        """What notebooks show in place of a traceback: the message alone, as the command does."""
        return [f"{type(self).__name__}: {self}"]


class UserError(RlinfError, ValueError):
    """An error that the user can fix: a key, a value, a file, a folder. `rlinf` prints it and exits with 2.

    Args:
        message: what is wrong, where, and what is allowed; may have several lines.
        hint: how to fix it.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class RunFailed(RlinfError, RuntimeError):
    """A started run failed: a worker died or raised, or a step timed out. `rlinf` prints the error and exits with 1."""


class ProcessesLost(RunFailed):
    """A run lost a worker, or a step timed out. It can be restarted with new processes, because its saved files are
    complete."""

    @property
    def summary(self) -> str:
        """The lost process and the reason, without the end of its log."""
        return str(self).splitlines()[0]


class Terminated(KeyboardInterrupt):
    """The command got SIGTERM, as when a job is preempted. `rlinf` exits with 143."""
