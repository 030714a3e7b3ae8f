"""Leases: whose turn it is to use a bucket of shared device memory.

    writer: acquire(b) -> kernels write -> publish(b)        reader: receive(b) -> kernels read -> acknowledge(b)

Each side records an event on its stream *before* it stores the flag in shared memory, and the other waits for the flag
*before* its stream waits for the event: to wait for an event that was not recorded yet is no wait at all. No host waits
for a device. A writer reuses a bucket when the reader acknowledged it, or is dead: its leases are reclaimed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf_comm import _C
from rlinf_comm.cuda import stream_handle
from rlinf_comm.errors import ChannelTimeout, IpcError, PeerLost
from rlinf_comm.ipc.driver import Driver, load_driver
from rlinf_comm.records import record

_READER_PID, _READER_TICKS, _READER_NAMESPACE, _FIRST_BUCKET = 0, 1, 2, 3
_PUBLISHED, _ACKNOWLEDGED, _WORDS_PER_BUCKET = 0, 1, 2
_HANDLE_BYTES = 64


@record
@dataclass(frozen=True, slots=True)
class LeaseAddress:
    """What the reader needs to attach. Packable."""

    segment: tuple[int, int, int, int]
    num_buckets: int
    ready_events: tuple[bytes, ...]
    """One handle for each bucket."""
    writer: tuple[int, int, int]
    """(pid, start time, inode of the pid namespace)"""


class _Side:
    """What both sides share: counters in words, events on the device."""

    def __init__(self, segment: Any, num_buckets: int, driver: Driver, device: int) -> None:
        num_words = _FIRST_BUCKET + _WORDS_PER_BUCKET * num_buckets
        self._segment = segment
        self._words = _C.SharedWords(segment, num_words)
        self._handles_at = _C.SharedWords.bytes_needed(num_words)
        self._driver = driver
        self._device = device
        self.num_buckets = num_buckets

    def _word(self, bucket: int, which: int) -> int:
        if not 0 <= bucket < self.num_buckets:
            raise ValueError(f"bucket={bucket}, the buckets are 0..{self.num_buckets - 1}")
        return _FIRST_BUCKET + bucket * _WORDS_PER_BUCKET + which

    def _load(self, bucket: int, which: int) -> int:
        return self._words.load(self._word(bucket, which))

    def _advance(self, bucket: int, which: int, event: int, stream: Any) -> None:
        """Records the event, then advances the flag."""
        index = self._word(bucket, which)
        self._driver.record_event(self._device, event, stream_handle(stream))
        self._words.store(index, self._words.load(index) + 1)
        self._words.notify_all()

    def _wait(self, is_done: Callable[[], bool], is_lost: Callable[[], bool], timeout_s: float, what: str) -> bool:
        """Waits until `is_done()`; returns False when the other side died first.

        Raises:
            ChannelTimeout: neither within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self._words.sequence()
            if is_done():
                return True
            if is_lost():
                return is_done()  # it may have finished just before
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelTimeout(f"{what} did not happen within {timeout_s} s")
            self._words.wait(seen, left)


class BucketWriter(_Side):
    """The sender's side: creates the words and the ready events. One reader."""

    def __init__(self, num_buckets: int, *, device: int, driver: Driver | None = None) -> None:
        if num_buckets < 1:
            raise ValueError(f"num_buckets={num_buckets} must be at least 1")
        driver = driver or load_driver()
        num_words = _FIRST_BUCKET + _WORDS_PER_BUCKET * num_buckets
        num_bytes = _C.SharedWords.bytes_needed(num_words) + _HANDLE_BYTES * num_buckets
        super().__init__(_C.Segment.create("ipc leases", num_bytes), num_buckets, driver, device)
        self._ready = [driver.create_event(device) for _ in range(num_buckets)]
        self._consumed: dict[int, int] = {}
        self._consumed_of = (0, 0, 0)
        self.address = LeaseAddress(
            self._segment.address(),
            num_buckets,
            tuple(driver.export_event(device, event) for event in self._ready),
            _C.own_process(),
        )

    def _reader(self) -> tuple[int, int, int]:
        pid = self._words.load(_READER_PID)
        return pid, self._words.load(_READER_TICKS), self._words.load(_READER_NAMESPACE)

    def _reader_is_dead(self) -> bool:
        reader = self._reader()
        return reader[0] != 0 and not _C.is_process_alive(*reader)

    def acquire(self, bucket: int, *, stream: Any, timeout_s: float) -> bool:
        """Waits until the bucket may be written: work enqueued on `stream` from now on runs after the reader's.

        Returns:
            Whether the reader is alive. False: it died, and the bucket was reclaimed from it.

        Raises:
            ChannelTimeout: the reader did not acknowledge within `timeout_s`.
        """
        published = self._load(bucket, _PUBLISHED)
        if published == 0:
            return not self._reader_is_dead()
        is_acknowledged = self._wait(
            lambda: self._load(bucket, _ACKNOWLEDGED) >= published,
            self._reader_is_dead,
            timeout_s,
            f"the acknowledgement of bucket {bucket} by process {self._reader()[0] or '(none attached)'}",
        )
        if not is_acknowledged:
            # Its kernels ended with its context. Counted as acknowledged, so that it is not waited for again.
            self._words.store(self._word(bucket, _ACKNOWLEDGED), published)
            return False
        if self._reader_is_dead():
            return False  # nothing to wait for: its event went with it
        self._driver.wait_for_event(self._device, stream_handle(stream), self._consumed_event(bucket))
        return True

    def publish(self, bucket: int, *, stream: Any) -> None:
        """The bucket's content is complete when the work now on `stream` is."""
        if self._load(bucket, _PUBLISHED) != self._load(bucket, _ACKNOWLEDGED):
            raise ValueError(f"bucket {bucket} is published already and not acknowledged; acquire it first")
        self._advance(bucket, _PUBLISHED, self._ready[bucket], stream)

    def _consumed_event(self, bucket: int) -> int:
        if self._reader() != self._consumed_of:  # another reader took a dead one's place
            self._consumed, self._consumed_of = {}, self._reader()
        event = self._consumed.get(bucket)
        if event is None:
            start = self._handles_at + bucket * _HANDLE_BYTES
            handle = bytes(memoryview(self._segment)[start : start + _HANDLE_BYTES])
            event = self._consumed[bucket] = self._driver.open_event(self._device, handle)
        return event

    def close(self) -> None:
        """Destroys the events."""
        for event in (*self._ready, *self._consumed.values()):
            self._driver.destroy_event(self._device, event)
        self._ready, self._consumed = [], {}


def _is_here(process: tuple[int, int, int]) -> bool:
    return process == _C.own_process()


class BucketReader(_Side):
    """The receiver's side, in another process."""

    def __init__(self, address: LeaseAddress, *, device: int, driver: Driver | None = None) -> None:
        if _is_here(address.writer):
            raise IpcError("the writer is this process: its own events cannot be opened; order the streams directly")
        driver = driver or load_driver()
        try:
            segment = _C.Segment.open(address.segment)
        except ValueError as error:
            raise PeerLost(f"the leases of process {address.writer[0]}: {error}") from None
        super().__init__(segment, address.num_buckets, driver, device)
        self._writer = address.writer
        self._ready = [driver.open_event(device, handle) for handle in address.ready_events]
        self._consumed = [driver.create_event(device) for _ in range(address.num_buckets)]
        area = memoryview(segment)
        for bucket, event in enumerate(self._consumed):
            start = self._handles_at + bucket * _HANDLE_BYTES
            area[start : start + _HANDLE_BYTES] = driver.export_event(device, event)
        pid, ticks, namespace = _C.own_process()
        self._words.store(_READER_TICKS, ticks)
        self._words.store(_READER_NAMESPACE, namespace)
        self._words.store(_READER_PID, pid)  # last: now the writer may look at the rest
        self._words.notify_all()

    def receive(self, bucket: int, *, stream: Any, timeout_s: float) -> None:
        """Waits until the bucket is published: work enqueued on `stream` from now on runs after the writer's.

        Raises:
            PeerLost: the writer died before.
            ChannelTimeout: not within `timeout_s`.
        """
        is_there = self._wait(
            lambda: self._load(bucket, _PUBLISHED) > self._load(bucket, _ACKNOWLEDGED),
            lambda: not _C.is_process_alive(*self._writer),
            timeout_s,
            f"bucket {bucket} of process {self._writer[0]}",
        )
        if not is_there:
            raise PeerLost(f"process {self._writer[0]} died before it published bucket {bucket}")
        self._driver.wait_for_event(self._device, stream_handle(stream), self._ready[bucket])

    def acknowledge(self, bucket: int, *, stream: Any) -> None:
        """The bucket may be reused when the work now on `stream` is done."""
        if self._load(bucket, _PUBLISHED) <= self._load(bucket, _ACKNOWLEDGED):
            raise ValueError(f"bucket {bucket} is acknowledged already, or was never published")
        self._advance(bucket, _ACKNOWLEDGED, self._consumed[bucket], stream)

    def acknowledge_all(self, *, stream: Any) -> None:
        """Lets go of every bucket that is published, received or not."""
        for bucket in range(self.num_buckets):
            if self._load(bucket, _PUBLISHED) > self._load(bucket, _ACKNOWLEDGED):
                self.acknowledge(bucket, stream=stream)

    def close(self) -> None:
        """Destroys the events. The writer must have stopped using them: after its last acquire, or its death."""
        for event in (*self._ready, *self._consumed):
            self._driver.destroy_event(self._device, event)
        self._ready, self._consumed = [], []
