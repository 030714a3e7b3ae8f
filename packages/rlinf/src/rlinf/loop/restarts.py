"""Decides whether a run that lost processes continues with new ones."""

from __future__ import annotations

from rlinf.config.common import RunConfig
from rlinf.errors import ProcessesLost, RunFailed


class Restarts:
    """Counts restarts without progress: a run that makes progress may be restarted any number of times, one that fails
    at the same step again and again may not."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._furthest_step = -1
        self._num_in_vain = 0

    def check(self, error: ProcessesLost, step: int) -> None:
        """Returns if the run continues after it failed in that step.

        Raises: RunFailed if the run has to stop then, or has been restarted too often without progress.
        """
        if self._run.on_failure == "stop":
            raise RunFailed(str(error)) from error
        self._num_in_vain = self._num_in_vain + 1 if step <= self._furthest_step else 0
        self._furthest_step = max(self._furthest_step, step)
        if self._num_in_vain >= self._run.max_restarts:
            raise RunFailed(
                f"{error}\nafter {self._num_in_vain} restarts the run came no further than before "
                f"(run.max_restarts={self._run.max_restarts})"
            ) from error
