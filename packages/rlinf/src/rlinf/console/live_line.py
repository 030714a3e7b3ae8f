"""Prints lines and, on a terminal, live lines below them: a bar, and what is going on if nothing else is printed."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

BAR_WIDTH, NARROW_BAR_WIDTH = 20, 8
WIDE_COLUMNS = 100
"""Terminals with fewer columns get the narrow bar."""
QUIET_S = 2.0
"""Seconds without output after which a terminal shows what is going on."""
TICK_S = 0.5
PART = "  "
"""Separates the parts of a line; parts that do not fit a terminal are left out from the end."""
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_UP_AND_CLEAR = "\x1b[1A\r\x1b[2K"

Activity = str | Callable[[], str]
"""What is going on; a function is called each time it is shown, from another thread."""


@dataclass(frozen=True, slots=True)
class _Started:
    what: Activity
    began_s: float


class LiveLine:
    """Prints permanent lines; on a terminal also lines that are redrawn.

    Args:
        stream: the standard output by default.
        clock: seconds, from any origin.
    """

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._line = self._status = ""
        self._num_drawn = 0
        """Live lines that are on the screen."""
        self._written_s = time.monotonic()
        self._activities: list[_Started] = []
        self._lock = threading.RLock()

    def message(self, text: str) -> None:
        """Prints a permanent line above the live ones."""
        with self._lock:
            self._status, self._written_s = "", time.monotonic()
            self._draw(f"{text}\n")

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
        with self._lock:
            columns = shutil.get_terminal_size().columns
            bar = self._bar(done, total, BAR_WIDTH if columns >= WIDE_COLUMNS else NARROW_BAR_WIDTH)
            self._line = fitted(f"{bar} {text}", columns - 1)  # a wrapped line could not be erased
            self._status, self._written_s = "", time.monotonic()
            self._draw()

    @contextmanager
    def doing(self, what: Activity) -> Iterator[None]:
        """Context in which a terminal that shows nothing new for QUIET_S shows `what`, with the seconds it has taken.

        An inner context replaces an outer one. Does nothing without a terminal.
        """
        if not self._is_live:
            yield
            return
        started = _Started(what, time.monotonic())
        ends = threading.Event()
        with self._lock:
            self._activities.append(started)
        ticker = threading.Thread(target=self._tick, args=(started, ends), name="show activity", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ends.set()
            ticker.join()
            with self._lock:
                self._activities.remove(started)
                if self._status:
                    self._status = ""
                    self._draw()

    def _tick(self, started: _Started, ends: threading.Event) -> None:
        while not ends.wait(TICK_S):
            if self._activities[-1] is not started:
                continue
            text = started.what if isinstance(started.what, str) else started.what()  # may take a moment: no lock
            with self._lock:
                now_s = time.monotonic()
                if not ends.is_set() and now_s - self._written_s >= QUIET_S:
                    status = f"{text}{PART}{clock_time(now_s - started.began_s)}"
                    self._status = fitted(status, shutil.get_terminal_size().columns - 1)
                    self._draw()

    def _draw(self, above: str = "") -> None:
        """Replaces the live lines, and prints `above` above them."""
        # Each ends with a newline, so that later output starts on a new line.
        lines = [line for line in (self._line, self._status) if line]
        self._stream.write(_UP_AND_CLEAR * self._num_drawn + above + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._num_drawn = len(lines)

    def _bar(self, done: int, total: int, width: int) -> str:
        """Returns `████░░░░`, or `###---` if the terminal cannot encode it."""
        filled = width * done // max(1, total)
        can_draw = (getattr(self._stream, "encoding", None) or "").lower().startswith("utf")
        full, empty = ("█", "░") if can_draw else ("#", "-")
        return full * filled + empty * (width - filled)


def fitted(text: str, width: int) -> str:
    """Returns a line without the last parts that do not fit; cuts the first part if it is too long by itself."""
    while len(text) > width and PART in text:
        text = text.rpartition(PART)[0]
    return text[:width]


def clock_time(seconds: float) -> str:
    """Formats a duration: `2:31` (minutes and seconds) or `1:02:31`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
