"""A pool of processes for checks that may hang, crash or exhaust memory.

Every item gets a result in bounded time: "timeout" if it uses up its CPU time or its longer wall time, "memory" if it
uses up its memory. If its process dies, it is tried once more and is then "crashed". Results come in the order of the
items and do not depend on the number of processes. They can depend on the load of the machine only for items that need
much of their CPU time, since those may reach the wall time limit.

Each slot is a keeper (pool_keeper.py, a separate program) with a forked checking process below it. Unlike
multiprocessing's pools, this needs no `if __name__ == "__main__"` in the caller's program, notices a slot that dies,
and stops a check that holds the interpreter. Ctrl-C does not reach the slots; they end when the pool is closed, or when
the process that owns it ends, however it ends.
"""

import json
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.ranges import check_range

_KEEPER = Path(__file__).with_name("pool_keeper.py")
_CHUNK = 8
"""Maximum number of items sent to a slot at once: enough to hide the latency, few enough to balance the load."""
_START_LIMIT_S = 120.0
"""Time limit for a slot to load its checker."""
_POOLS: "weakref.WeakSet[ProcessPool]" = weakref.WeakSet()


def awaited_processes() -> list[int]:
    """Process ids of this process's keepers that have items to check; may be called from any thread."""
    slots = [slot for pool in list(_POOLS) for slot in list(pool._slots.values())]  # pyright: ignore[reportPrivateUsage]
    return [slot.process.pid for slot in slots if slot.items]


class _Slot:
    """A keeper, the items it works on, and the bytes received from it so far."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(_KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert self.process.stdin is not None and self.process.stdout is not None, "both are pipes"
        self._in, self.out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.is_ready = False
        self.heard_at = time.monotonic()
        self.items: deque[int] = deque()
        self._received = bytearray()
        self._send(hello)

    def give(self, indices: Sequence[int], items: Sequence[tuple[str, ...]]) -> None:
        self.items.extend(indices)
        self.heard_at = time.monotonic()
        self._send([items[index] for index in indices])

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode("ascii")
        data = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while data:
                data = data[os.write(self._in, data) :]
        except BrokenPipeError:
            pass  # it is dead; its closed output shows that

    def receive(self) -> tuple[list[list[str]], bool]:
        """The replies that have arrived, and whether the slot is still alive."""
        piece = os.read(self.out, 1 << 20)
        self._received += piece
        self.heard_at = time.monotonic()
        replies = []
        while len(self._received) >= 4:
            end = 4 + struct.unpack(">I", self._received[:4])[0]
            if len(self._received) < end:
                break
            replies.append(json.loads(self._received[4:end]))
            del self._received[:end]
        return replies, bool(piece)

    def end(self) -> str:
        """Kills the keeper (its checking process ends with it) and waits for it; returns how it had ended."""
        status = self.process.poll()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return "silent" if status is None else f"exited with {status}"


def _end_all(slots: dict[int, _Slot], owner: int) -> None:
    if os.getpid() == owner:
        for slot in slots.values():
            slot.end()
    slots.clear()


class ProcessPool:
    """Runs the function `check(*texts) -> [outcome, detail]` of a module file in other processes.

    Args:
        checker: path of a Python file that defines `check` and imports nothing of this package.
        num_processes: number of slots; each uses one CPU while it checks.
        time_limit_s: CPU seconds for one check.
        wall_limit_s: wall-clock seconds for one check.
        memory_limit_bytes: resident memory of a checking process, including its libraries.

    Raises:
        AlgosError: a limit that is not positive.

    Use it as a context manager, or call `close`. Slots start with the first batch. Threads may share a pool; one batch
    runs at a time.
    """

    def __init__(
        self,
        checker: Path,
        *,
        num_processes: int = 2,
        time_limit_s: float = 1.0,
        wall_limit_s: float = 2.0,
        memory_limit_bytes: int = 1 << 30,
    ) -> None:
        check_range("num_processes", num_processes, low=1, why="without a process nothing is checked")
        check_range("time_limit_s", time_limit_s, low=0.01, why="it is the CPU time of one check")
        check_range("wall_limit_s", wall_limit_s, low=0.01, why="it is the wall time of one check")
        check_range("memory_limit_bytes", memory_limit_bytes, low=128 << 20, why="the checker's libraries need it")
        self._num_processes, self._wall_limit_s = num_processes, wall_limit_s
        self._hello = {
            "sys_path": [path or os.getcwd() for path in sys.path],
            "checker": str(checker),
            "time_limit_s": time_limit_s,
            "wall_limit_s": wall_limit_s,
            "memory_limit_bytes": memory_limit_bytes,
        }
        self._slots: dict[int, _Slot] = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.num_restarts = 0
        """Number of slots that died or had to be killed, and were restarted."""
        self._finalizer = weakref.finalize(self, _end_all, self._slots, self._owner)
        _POOLS.add(self)

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process and waits for it. If the pool is used again, it starts new ones."""
        with self._lock:
            self._end_slots()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the running keepers."""
        return tuple(slot.process.pid for slot in self._slots.values())

    def run(self, items: Sequence[tuple[str, ...]]) -> list[tuple[str, str | None]]:
        """(outcome, detail) of `check(*item)` for each item, in order.

        The outcome is the checker's own, or "timeout", "memory" or "crashed".

        Raises:
            RewardError: the checker's module cannot be loaded.
        """
        with self._lock:
            if os.getpid() != self._owner:  # a fork: the slots belong to the parent
                self._slots.clear()
                self._owner = os.getpid()
                self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _end_all, self._slots, self._owner)
            try:
                return self._run(items)
            except BaseException:
                self._end_slots()  # their late replies must not reach a later batch
                raise

    def _run(self, items: Sequence[tuple[str, ...]]) -> list[tuple[str, str | None]]:
        results: list[tuple[str, str | None] | None] = [None] * len(items)
        waiting = deque(range(len(items)))
        num_losses: dict[int, int] = {}
        num_starts_lost = 0
        while waiting or any(slot.items for slot in self._slots.values()):
            self._hand_out(waiting, items)
            for place in self._with_news():
                slot = self._slots[place]
                replies, is_alive = slot.receive() if self._readable(slot) else ([], False)
                for outcome, detail in replies:
                    if slot.is_ready:
                        results[slot.items.popleft()] = (outcome, detail)
                    elif outcome == "failed":
                        raise RewardError(f"the checker {self._hello['checker']} cannot be loaded: {detail}")
                    else:
                        slot.is_ready = True
                if is_alive:
                    continue
                how = slot.end()
                del self._slots[place]
                self.num_restarts += 1
                num_starts_lost = 0 if slot.is_ready else num_starts_lost + 1
                if num_starts_lost > 3:
                    raise RewardError(f"the pool's processes cannot start: the last one {how} before it was ready")
                if slot.items and slot.is_ready:
                    suspect = slot.items[0]
                    num_losses[suspect] = num_losses.get(suspect, 0) + 1
                    if num_losses[suspect] == 2:
                        results[slot.items.popleft()] = ("crashed", f"its process {how}, twice")
                waiting.extendleft(reversed(slot.items))
        assert all(result is not None for result in results), "every item has a result"
        return [result for result in results if result is not None]

    def _hand_out(self, waiting: deque[int], items: Sequence[tuple[str, ...]]) -> None:
        for place in range(self._num_processes):
            if not waiting:
                return
            slot = self._slots.get(place)
            if slot is None:
                slot = self._slots[place] = _Slot(self._hello)
            if not slot.items:
                share = -(-len(waiting) // (2 * self._num_processes))  # smaller pieces towards the end
                slot.give([waiting.popleft() for _ in range(min(_CHUNK, share))], items)

    def _with_news(self) -> list[int]:
        """Slots that have replies, have ended, or have been silent for too long."""
        busy = {place: slot for place, slot in self._slots.items() if slot.items}
        with selectors.DefaultSelector() as selector:
            for place, slot in busy.items():
                selector.register(slot.out, selectors.EVENT_READ, place)
            news = [key.data for key, _ in selector.select(timeout=1.0)]
        now = time.monotonic()
        limit_s = 10.0 + 3 * self._wall_limit_s  # two attempts at one check, and a margin
        silent = [
            place
            for place, slot in busy.items()
            if now - slot.heard_at > (limit_s if slot.is_ready else max(limit_s, _START_LIMIT_S))
        ]
        return sorted({*news, *silent})

    def _readable(self, slot: _Slot) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(slot.out, selectors.EVENT_READ)
            return bool(selector.select(timeout=0))

    def _end_slots(self) -> None:
        _end_all(self._slots, self._owner)
