"""What an evaluation tells the terminal: a live line of the benchmark it is at, or a line every tenth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rlinf.console.live_line import LiveLine, clock_time

NUM_LINES = 10
"""Lines that are printed for each benchmark where there is no terminal to draw on."""


class EvalProgress:
    """Lines of an evaluation.

    Example: `AIME 24  12/30 problems  avg@8 41.7 %  eta 2:31`
    """

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            stream: the standard output by default.
            clock: seconds, from any origin.
        """
        self._line = LiveLine(stream)
        self._clock = clock
        self._title = ""
        self._num_problems = self._num_before = self._num_done = self._num_samples = self._num_right = 0
        self._started_s = 0.0

    def message(self, text: str) -> None:
        """A line that stays."""
        self._line.print(text)

    def begin(self, title: str, *, num_problems: int, num_done: int, num_samples: int, num_right: int) -> None:
        """A benchmark, of which `num_done` problems were answered in an earlier session."""
        self._title, self._num_problems, self._num_samples = title, num_problems, num_samples
        self._num_before = self._num_done = num_done
        self._num_right = num_right
        self._started_s = self._clock()

    def problem(self, num_right: int) -> None:
        """One more problem, with so many right samples."""
        self._num_done += 1
        self._num_right += num_right
        done, total = self._num_done, self._num_problems
        share = self._num_right / (done * self._num_samples)
        text = f"{self._title}  {done}/{total} problems  avg@{self._num_samples} {100 * share:.1f} %"
        if done < total:
            text += f"  eta {clock_time(self._eta_s())}"
        if self._line.is_live:
            self._line.draw(f"{self._line.bar(done, total)} {text}")
        elif done == total or done * NUM_LINES // total > (done - 1) * NUM_LINES // total:
            self._line.print(text)

    def _eta_s(self) -> float:
        timed = self._num_done - self._num_before
        return (self._num_problems - self._num_done) * (self._clock() - self._started_s) / timed
