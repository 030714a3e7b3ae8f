"""Prints lines and, on a terminal, a live line below them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_WIDTH = 20
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_UP_AND_CLEAR = "\x1b[1A\r\x1b[2K"


class LiveLine:
    """Prints permanent lines; on a terminal also a line that is redrawn.

    Args:
        stream: the standard output by default.
        clock: seconds, from any origin.
    """

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._line = ""

    def message(self, text: str) -> None:
        """Prints a permanent line above the live one."""
        erase = _UP_AND_CLEAR if self._line else ""
        below = f"{self._line}\n" if self._line else ""
        self._stream.write(f"{erase}{text}\n{below}")
        self._stream.flush()

    def warning(self, text: str) -> None:
        """Prints an important message, red on a terminal unless NO_COLOR is set."""
        has_color = self._is_live and not os.environ.get("NO_COLOR")
        self.message(f"{_RED}{text}{_PLAIN}" if has_color else text)

    def show(self, text: str, done: int, total: int, *, stays: bool = True) -> None:
        """Shows progress: a bar as the live line; without a terminal a permanent line if `stays`."""
        if not self._is_live:
            if stays:
                self.message(text)
            return
        # It ends with a newline, so that later output starts on a new line.
        erase = _UP_AND_CLEAR if self._line else ""
        line = f"{self._bar(done, total)} {text}"
        self._line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be erased
        self._stream.write(f"{erase}{self._line}\n")
        self._stream.flush()

    def _bar(self, done: int, total: int) -> str:
        """Returns `████░░░░`, or `###---` if the terminal cannot encode it."""
        filled = BAR_WIDTH * done // total
        can_draw = (getattr(self._stream, "encoding", None) or "").lower().startswith("utf")
        full, empty = ("█", "░") if can_draw else ("#", "-")
        return full * filled + empty * (BAR_WIDTH - filled)


def clock_time(seconds: float) -> str:
    """Formats a duration: `2:31` (minutes and seconds) or `1:02:31`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
