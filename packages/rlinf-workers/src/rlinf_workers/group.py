"""WorkerGroup: the ranks of one role, called together."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rlinf_workers.launchers.base import Launcher, WorkerHandle

T = TypeVar("T")

LOST_GRACE_S = 0.5
"""When a call fails because its peer died (such as in a collective), the death should be reported: wait this long for
it."""


class WorkerGroup:
    """All processes of one role.

    Example: `group.call("save", folder)` runs `save(folder)` on every rank and returns their results by rank;
    `group.call("save", folder, ranks=[0])` calls only the first.
    """

    def __init__(self, handles: Sequence[WorkerHandle], launcher: Launcher) -> None:
        self.handles = list(handles)
        self._launcher = launcher

    @property
    def num_ranks(self) -> int:
        return len(self.handles)

    def start_call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, lane: int = 0
    ) -> list[Future[Any]]:
        """Calls without waiting; returns one future per rank. For lanes see `WorkerHandle.call`."""
        chosen = range(self.num_ranks) if ranks is None else ranks
        return [self.handles[rank].call(method, *args, lane=lane) for rank in chosen]

    def call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Calls all ranks (or some) with the same arguments and waits.

        Raises: RemoteError, WorkerLost, TimeoutError.
        """
        return gather(self.start_call(method, *args, ranks=ranks), self._launcher.lost, timeout_s)


def gather(
    futures: Sequence[Future[T]],
    lost: Future[None],
    timeout_s: float | None = None,
    *,
    watched: Sequence[Future[Any]] = (),
) -> list[T]:
    """The results of all, in order.

    Args:
        watched: futures whose failures count too, until all others are done.

    Raises: the first failure; WorkerLost in preference to a failure that it caused; TimeoutError.
    """
    pending: set[Future[Any]] = set(futures)
    beside: set[Future[Any]] = set(watched)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while pending:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = concurrent.futures.wait(
            {*pending, *beside, lost}, left_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError(f"{len(pending)} of {len(futures)} calls had not returned after {timeout_s} s")
        failed = lost in done or any(future.exception() is not None for future in done)
        if failed:
            concurrent.futures.wait({lost}, LOST_GRACE_S)
            if lost.done():
                lost.result()
            for future in done:
                future.result()
        pending, beside = pending - done, beside - done
    return [future.result() for future in futures]
