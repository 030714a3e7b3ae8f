"""Rendezvous of the ranks of a group on several nodes: the first rank listens, and the driver passes its address on to
the others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from rlinf_workers.launchers.base import role_and_rank

Endpoint = tuple[str, int]
"""Address and port."""


class Meetings:
    """Handles the ranks' requests for `Launcher.serve`. The first rank of a group sends its address; the others send
    None and get that address as soon as it is known."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Future[Endpoint]] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def begin(self, role: str) -> None:
        """Called before the ranks of a group start; forgets the address of an earlier first rank."""
        with self._lock:
            self._endpoints[role] = Future()
            self._counts[role] += 1

    def count(self, role: str) -> int:
        """How often the ranks of that group have been started."""
        return self._counts[role]

    def __call__(self, worker: str, endpoint: Endpoint | None, reply: Callable[[Endpoint], None]) -> None:
        role, _ = role_and_rank(worker)
        with self._lock:
            future = self._endpoints[role]
        if endpoint is not None:
            future.set_result(endpoint)
        else:
            future.add_done_callback(lambda done: reply(done.result()))
