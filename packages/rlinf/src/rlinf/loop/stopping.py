"""Ctrl-C and SIGTERM while a run trains: the first asks it to stop at the end of the step, the second quits at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlinf.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = b"\nstopping: this step is finished and a checkpoint saved; once more quits at once\n"


class StopRequest:
    """Takes over the signals inside a `with` block; leaves them alone on a thread that cannot have them."""

    def __init__(self) -> None:
        self.is_made = False
        """Somebody wants the run to stop."""
        self.is_urgent = False
        """The second signal came."""
        self._signal = signal.SIGINT
        self._raises = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def error(self) -> KeyboardInterrupt:
        """What ends the command."""
        return Terminated() if self._signal == signal.SIGTERM else KeyboardInterrupt()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, the first signal raises `error` too: for work that may be left undone."""
        if self.is_made:
            raise self.error
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _take(self, number: int, _: object) -> None:
        self.is_urgent = self.is_made
        self.is_made = True
        self._signal = signal.Signals(number)
        if self.is_urgent or self._raises:
            raise self.error
        os.write(2, TOLD)  # not print: the signal may have come in the middle of another one
