"""Warnings about strangers, of whom there may be many: a line for each, up to a limit, and then how many more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_MAX_LINES = 20
_PERIOD_S = 60.0


class LimitedLog:
    """A log that writes a limited number of lines in a period. One thread uses it at a time."""

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._start_s = now()
        self._num_lines = self._num_left_out = 0

    def warn(self, text: str) -> None:
        """Logs one line, or none when there have been too many lately."""
        self.sum_up()
        if self._num_lines < _MAX_LINES:
            self._num_lines += 1
            self._log.warning("%s", text)
        else:
            self._num_left_out += 1

    def sum_up(self) -> None:
        """Logs how many lines were left out in a period when it is over."""
        if self._now() - self._start_s < _PERIOD_S:
            return
        if self._num_left_out:
            self._log.warning("%d more callers were turned away within %g s", self._num_left_out, _PERIOD_S)
        self._start_s = self._now()
        self._num_lines = self._num_left_out = 0
