"""Tells the peers of this process's channels how it ended: regularly, or as one that is missed.

A process leaves all its channels when the interpreter ends, but not when it ends by an exception: its peers learn of
that as of a kill. Forked children of multiprocessing end by os._exit, past atexit, but run finalizers of their
own.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable

from rlinf_comm import _C

_watched_pid: int | None = None
_also: list[Callable[[], None]] = []


def when_leaving(leave: Callable[[], None]) -> None:
    """Calls `leave` at a regular end of this process, beside what its channels do themselves."""
    _also.append(leave)


def watch_the_end_of_this_process() -> None:
    global _watched_pid
    if _watched_pid is None:
        atexit.register(_end)
        multiprocessing.util.register_after_fork(_end, lambda _: _watch_child())
    if _watched_pid != os.getpid():
        _watch_child()


def _watch_child() -> None:
    global _watched_pid
    _watched_pid = os.getpid()
    # Negative: after the children of this process have been waited for.
    multiprocessing.util.Finalize(None, _end, exitpriority=-100)


def _end() -> None:
    if _ends_by_exception():
        _C.Channel.stay_in_all()
    else:
        _C.Channel.leave_all()
        for leave in _also:
            leave()


def _ends_by_exception() -> bool:
    error = sys.exc_info()[1]  # of a multiprocessing child, which is unwinding
    if error is not None:
        return not isinstance(error, SystemExit) or error.code not in (None, 0)
    interactive = hasattr(sys, "ps1")  # where an exception ends nothing
    return not interactive and getattr(sys, "last_value", None) is not None
