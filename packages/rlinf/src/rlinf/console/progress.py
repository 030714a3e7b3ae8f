"""Progress of a run: one line per step; on a terminal, one live line below the messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rlinf.console.live_line import LiveLine, clock_time

RECENT_STEPS = 20
"""Number of recent steps whose wall time, including evaluations and checkpoints, gives the eta."""
HEADLINES = {
    "reward/mean": "reward",
    "env/return": "return",
    "env/success_at_end": "training success at end",
    "env/success_once": "once",
}
"""Metric -> its label in a line."""


class Progress(LiveLine):
    """Prints the progress of a run.

    Example, not on a terminal:
        step 12/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.60 s, actor 1.1 s  eta 2:31
    On a terminal the eta comes first, and parts that do not fit are left out from the end.
    The seconds of each stage are summed over its ranks, so they may exceed the step's time.
    """

    def __init__(
        self, *, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream=stream, clock=clock)
        self.total = total
        """Training steps of the whole run; may be updated later."""
        self._evaluation = ""
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_s: float | None = None

    def step(self, step: int, metrics: Mapping[str, float], step_s: float, stage_s: Mapping[str, float]) -> None:
        """Prints a finished training step.

        Args:
            step: the step's number, from 0.
            stage_s: stage -> compute seconds, summed over its ranks.
        """
        now_s = self._clock()
        self._steps_s.append(step_s if self._last_s is None else now_s - self._last_s)
        self._last_s = now_s
        done = step + 1
        parts = [f"step {done}/{self.total}"]
        parts += [f"{label} {_number(metrics[key])}" for key, label in HEADLINES.items() if key in metrics]
        parts += [self._evaluation] if self._evaluation else []
        parts.append(f"{_seconds(step_s)} s")
        if stage_s:
            parts.append(", ".join(f"{stage} {_seconds(seconds)} s" for stage, seconds in stage_s.items()))
        if done < self.total:
            eta = f"eta {clock_time((self.total - done) * sum(self._steps_s) / len(self._steps_s))}"
            parts.insert(0 if self._is_live else len(parts), eta)
        self.show("  ".join(parts), done, self.total)

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Prints an evaluation after `step` training steps; the lines of later steps repeat its first score."""
        texts = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in scores.items()]
        is_headline = next(iter(scores)) in HEADLINES.values()
        self._evaluation = f"{'held-out ' if is_headline else ''}{texts[0]} (step {step})"
        self.message(f"evaluation after step {step}: {', '.join(texts)}")


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2f}"
