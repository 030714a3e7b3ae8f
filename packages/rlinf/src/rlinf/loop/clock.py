"""Progress and training time of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class RunClock:
    """A checkpoint stores these values for the session that resumes the run."""

    step: int = 0
    """Training steps done."""
    elapsed_s: float = 0.0
    """Training time of earlier sessions of this run, for a resumed one."""
    before: float = float("nan")
    """Score before the first step."""
    own_score: float | None = None
    """Score of the current weights; None if they were not evaluated."""
    _started_s: float = 0.0

    @property
    def training_s(self) -> float:
        return self.elapsed_s + (time.monotonic() - self._started_s if self._started_s else 0.0)

    def start(self) -> None:
        """Starts, or continues, counting training time."""
        self._started_s = time.monotonic()

    def stop(self) -> None:
        """Stops counting training time."""
        self.elapsed_s, self._started_s = self.training_s, 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "elapsed_s": self.training_s,
            "before": self.before,
            "own_score": self.own_score,
        }
