"""What a run tells the terminal: one honest line a step; on a terminal, one live line below the messages."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rlinf.console.live_line import LiveLine, clock_time

RECENT_STEPS = 20
"""Steps whose wall time, evaluations and checkpoints between them included, gives the eta."""
HEADLINES = {
    "reward/mean": "reward",
    "env/return": "return",
    "env/success_at_end": "training success at end",
    "env/success_once": "once",
}
"""Metrics that a line shows, and what they are called there."""


class Progress:
    """Lines of a run.

    Example, not on a terminal:
        step 12/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.6 reward 0.1 actor 1.1  eta 2:31
    The seconds behind the stages are of all ranks together, so they may add up to more than the step took.
    """

    def __init__(
        self, *, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            total: training steps of the whole run; may be set anew, when more is known.
            stream: the standard output by default.
            clock: seconds, from any origin.
        """
        self.total = total
        self._line = LiveLine(stream)
        self._clock = clock
        self._evaluation = ""
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_s: float | None = None

    def message(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._line.print(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A finished training step.

        Args:
            step: the step's number, from 0.
            metrics: the step's metrics; `time/step_s` and `time/<stage>_s` are in seconds.
        """
        self._measure(metrics)
        done = step + 1
        parts = [f"step {done}/{self.total}"]
        parts += [f"{label} {_number(metrics[key])}" for key, label in HEADLINES.items() if key in metrics]
        parts += [self._evaluation] if self._evaluation else []
        if "time/step_s" in metrics:
            parts.append(f"{_seconds(metrics['time/step_s'])} s")
        if stages := _stage_times(metrics):
            parts.append(stages)
        if done < self.total:
            parts.append(f"eta {clock_time(self._eta_s(done))}")
        line = "  ".join(parts)
        if self._line.is_live:
            self._line.draw(f"{self._line.bar(done, self.total)} {line}")
        else:
            self._line.print(line)

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """An evaluation after `step` training steps; the lines of later steps repeat the first of its scores."""
        texts = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in scores.items()]
        self._evaluation = f"{texts[0]} (step {step})"
        self._line.print(f"evaluation after step {step}: {', '.join(texts)}")

    # -- inner -----------------------------------------------------------------------------------------------------

    def _measure(self, metrics: Mapping[str, float]) -> None:
        now_s = self._clock()
        if self._last_s is not None:
            self._step_s.append(now_s - self._last_s)
        elif "time/step_s" in metrics:
            self._step_s.append(metrics["time/step_s"])
        self._last_s = now_s

    def _eta_s(self, done: int) -> float:
        if not self._step_s:
            return math.nan
        return (self.total - done) * sum(self._step_s) / len(self._step_s)


def _stage_times(metrics: Mapping[str, float]) -> str:
    stages = {key[len("time/") : -len("_s")]: value for key, value in metrics.items() if _is_stage_time(key)}
    if "sync" in stages:
        stages["sync"] = stages.pop("sync")  # last: it comes first or last in the metrics, as the ranks happened to
    return " ".join(f"{stage} {_seconds(seconds)}" for stage, seconds in stages.items())


def _is_stage_time(key: str) -> bool:
    return key.startswith("time/") and key.endswith("_s") and key != "time/step_s"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2f}"
