"""Links of queues between threads, for what runs over any link."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from rlinf_comm import PeerLost

HANG_S = 30.0


class Net:
    """Queues by (from, to), and what was sent. `change` sees every value on its way."""

    def __init__(self, change: Any = lambda value: value) -> None:
        self._queues: dict[tuple[str, str], queue.Queue[Any]] = {}
        self.sent: list[Any] = []
        self.lost: set[str] = set()
        self.change = change

    def link(self, name: str) -> QueueLink:
        return QueueLink(self, name)

    def queue(self, from_: str, to: str) -> queue.Queue[Any]:
        # setdefault is one step for all threads; a defaultdict lets both ends make a queue, and loses what is in one.
        return self._queues.setdefault((from_, to), queue.Queue())


class QueueLink:
    def __init__(self, net: Net, name: str) -> None:
        self.net, self.name = net, name

    def send(self, to: str, value: Any, *, timeout_s: float) -> None:
        if to in self.net.lost:
            raise PeerLost(to)
        self.net.sent.append(value)
        self.net.queue(self.name, to).put(self.net.change(value))

    def receive(self, from_: str, *, timeout_s: float) -> Any:
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.net.queue(from_, self.name).get(timeout=0.02)
            except queue.Empty:
                if from_ in self.net.lost:
                    raise PeerLost(from_) from None
                if time.monotonic() > end_s:
                    raise TimeoutError from None


def together(*calls: Any) -> list[Any]:
    """Results or errors, of calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANG_S)  # what runs out of HANG_S says so itself
        assert not thread.is_alive()
    return results
