"""What a channel must fulfil, in shared memory or through a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlinf_comm.errors import ChannelAborted, ChannelClosed, ChannelTimeout

_HANG_S = 20.0
"""A check that takes longer has found a hang."""
_MOMENT_S = 0.05
"""Long enough for a thread to block; no check passes or fails by it on a slow machine."""


class ChannelLike(Protocol):
    """What the checks below need of a channel; rlinf_comm.Channel says what each method means."""

    def put(
        self,
        value: Any,
        *,
        key: int = 0,
        weight: float = 1.0,
        policy_version: int = -1,
        timeout_s: float | None = None,
    ) -> None: ...
    def take(
        self,
        *,
        max_items: int = 1,
        min_items: int = 1,
        max_weight: float | None = None,
        keys: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]: ...
    def close(self) -> None: ...
    def reopen(self, num_producers: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def stats(self) -> Any: ...


MakeChannel = Callable[..., ChannelLike]
"""Makes a channel: make("name"), with any of capacity_items, capacity_bytes and num_producers as keywords."""


class _Call:
    """A call in a thread of its own, so that a check can watch it block."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except Exception as error:  # noqa: BLE001 - handed to the checking thread by result()
            self._error = error

    def assert_blocks(self) -> None:
        self._thread.join(_MOMENT_S)
        assert self._thread.is_alive(), "the call returned where it has to wait"

    def result(self) -> Any:
        self._thread.join(_HANG_S)
        assert not self._thread.is_alive(), f"the call still waits after {_HANG_S} s"
        if self._error is not None:
            raise self._error
        return self._result


def _assert_raises(expected: type[Exception], function: Callable[[], Any]) -> str:
    try:
        function()
    except expected as error:
        return str(error)
    raise AssertionError(f"{expected.__name__} was not raised")


def _values(items: Sequence[Any]) -> list[Any]:
    return [item.value for item in items]


def check_order(make: MakeChannel) -> None:
    """Items come in put order and say what their producer said of them."""
    channel = make("order")
    for index in range(20):
        channel.put({"index": index}, key=index % 3, weight=0.5 * index, policy_version=index)
    items = channel.take(max_items=20, min_items=20)
    assert _values(items) == [{"index": index} for index in range(20)]
    assert [item.sequence for item in items] == list(range(20))
    labels = [(item.key, item.weight, item.policy_version) for item in items]
    assert labels == [(index % 3, 0.5 * index, index) for index in range(20)]


def check_keys(make: MakeChannel) -> None:
    """A take by keys leaves the others in order, and waits for its own."""
    channel = make("keys")
    for index in range(9):
        channel.put(index, key=index % 3)
    assert _values(channel.take(max_items=9, keys=[2, 0])) == [0, 2, 3, 5, 6, 8]
    waiting = _Call(lambda: channel.take(keys=[2], timeout_s=_HANG_S))
    waiting.assert_blocks()
    assert _values(channel.take(max_items=9)) == [1, 4, 7]
    channel.put("for nobody", key=1)
    channel.put("for the one who waits", key=2)
    assert _values(waiting.result()) == ["for the one who waits"]


def check_min_items(make: MakeChannel) -> None:
    """A take waits for min_items; a close gives it what is left; min_items is capped to max_items."""
    channel = make("min_items")
    channel.put(0)
    waiting = _Call(lambda: channel.take(max_items=5, min_items=3, timeout_s=_HANG_S))
    waiting.assert_blocks()
    channel.put(1)
    waiting.assert_blocks()
    channel.put(2)
    assert _values(waiting.result()) == [0, 1, 2]
    channel.put(3)
    assert _values(channel.take(max_items=1, min_items=100)) == [3]
    channel.put(4)
    waiting = _Call(lambda: channel.take(max_items=5, min_items=5, timeout_s=_HANG_S))
    waiting.assert_blocks()
    channel.close()
    assert _values(waiting.result()) == [4]
    assert channel.take(max_items=5, min_items=5) == []


def check_weights(make: MakeChannel) -> None:
    """A take stops before max_weight, but never gives nothing."""
    channel = make("weights")
    for weight in (2.0, 3.0, 4.0, 100.0, 1.0):
        channel.put(weight, weight=weight)
    assert _values(channel.take(max_items=10, max_weight=5.0)) == [2.0, 3.0]
    assert _values(channel.take(max_items=10, min_items=10, max_weight=5.0)) == [4.0]
    assert _values(channel.take(max_items=10, max_weight=5.0)) == [100.0]
    assert _values(channel.take(max_items=10, max_weight=5.0)) == [1.0]


def check_capacity_items(make: MakeChannel) -> None:
    """A put on a channel full of items waits for a take."""
    channel = make("capacity_items", capacity_items=2)
    channel.put(0)
    channel.put(1)
    waiting = _Call(lambda: channel.put(2, timeout_s=_HANG_S))
    waiting.assert_blocks()
    assert _values(channel.take()) == [0]
    waiting.result()
    assert _values(channel.take(max_items=2, min_items=2)) == [1, 2]
    assert channel.stats().num_blocked_puts == 1


def check_capacity_bytes(make: MakeChannel) -> None:
    """A put on a channel full of bytes waits; one item that is larger than the channel is a mistake."""
    capacity_bytes = 100_000
    channel = make("capacity_bytes", capacity_bytes=capacity_bytes)
    channel.put(np.zeros(60_000, dtype=np.uint8))
    waiting = _Call(lambda: channel.put(np.ones(60_000, dtype=np.uint8), timeout_s=_HANG_S))
    waiting.assert_blocks()
    channel.take()
    waiting.result()
    text = _assert_raises(ValueError, lambda: channel.put(np.zeros(capacity_bytes + 1, dtype=np.uint8)))
    assert str(capacity_bytes) in text, f"the message does not say capacity_bytes={capacity_bytes}: {text}"


def check_hoarding(make: MakeChannel) -> None:
    """A consumer that keeps all it has taken gets everything, also beyond capacity_bytes; nothing is overwritten."""
    channel = make("hoarding", capacity_bytes=100_000)

    def produce() -> None:
        for index in range(20):
            channel.put(np.full(30_000, index, dtype=np.uint8), timeout_s=_HANG_S)
        channel.close()

    producer = _Call(produce)
    arrays: list[Any] = []
    while items := channel.take(timeout_s=_HANG_S):
        arrays += _values(items)
    producer.result()
    assert [set(array.tolist()) for array in arrays] == [{index} for index in range(20)]


def check_privacy(make: MakeChannel) -> None:
    """What the producer does to a value after put, or the consumer after take, is nobody else's concern."""
    channel = make("privacy")
    sent = np.arange(10_000)
    channel.put(sent)
    sent[:] = -1
    channel.put(sent)
    (first,) = _values(channel.take())
    assert first.tolist() == list(range(10_000))
    first[:] = 7
    (second,) = _values(channel.take())
    assert set(second.tolist()) == {-1}


def check_close(make: MakeChannel) -> None:
    """The channel is closed when all producers have; then takes drain it, and puts and closes are refused."""
    channel = make("close", num_producers=2)
    channel.put(0)
    channel.close()
    channel.put(1)
    channel.close()
    _assert_raises(ChannelClosed, lambda: channel.put(2))
    _assert_raises(ValueError, channel.close)
    assert _values(channel.take(max_items=10)) == [0, 1]
    assert channel.take() == []


def check_close_wakes(make: MakeChannel) -> None:
    """A close ends the wait of an empty-handed consumer."""
    channel = make("close_wakes")
    waiting = _Call(channel.take)
    waiting.assert_blocks()
    channel.close()
    assert waiting.result() == []


def check_reopen(make: MakeChannel) -> None:
    """A drained channel starts again; one that is not says what is left."""
    channel = make("reopen")
    channel.put("left")
    _assert_raises(ValueError, lambda: channel.reopen(1))
    channel.close()
    text = _assert_raises(ValueError, lambda: channel.reopen(1))
    assert "1 item" in text, f"the message does not say how many items are left: {text}"
    channel.take()
    channel.reopen(2)
    channel.put("again")
    channel.close()
    channel.put("and again")
    channel.close()
    assert _values(channel.take(max_items=3, min_items=3)) == ["again", "and again"]


def check_abort(make: MakeChannel) -> None:
    """An abort reaches those who wait and those who come later, with its reason."""
    full = make("abort", capacity_items=1)
    empty = make("abort")
    full.put(0)
    putting = _Call(lambda: full.put(1))
    taking = _Call(lambda: empty.take(min_items=2, max_items=2))
    putting.assert_blocks()
    taking.assert_blocks()
    for channel, waiting in ((full, putting), (empty, taking)):
        channel.abort("rollout 3 ran out of memory")
        channel.abort("a consequence")
        for call in (waiting.result, channel.take, lambda channel=channel: channel.put(2)):
            assert "rollout 3 ran out of memory" in _assert_raises(ChannelAborted, call)


def check_timeout(make: MakeChannel) -> None:
    """timeout_s ends a wait, and nothing is put or taken."""
    channel = make("timeout", capacity_items=1)
    _assert_raises(ChannelTimeout, lambda: channel.take(timeout_s=0.0))
    channel.put(0, timeout_s=0.0)
    _assert_raises(ChannelTimeout, lambda: channel.put(1, timeout_s=0.01))
    _assert_raises(ChannelTimeout, lambda: channel.take(min_items=2, max_items=2, timeout_s=0.01))
    assert _values(channel.take(timeout_s=0.0)) == [0]


def check_competition(make: MakeChannel) -> None:
    """With several producers and consumers every item arrives exactly once, in order for each producer."""
    num_producers, num_consumers, num_each = 3, 3, 40
    channel = make("competition", capacity_items=4, num_producers=num_producers)

    def produce(producer: int) -> None:
        for index in range(num_each):
            channel.put((producer, index), key=producer, timeout_s=_HANG_S)
        channel.close()

    def consume() -> list[Any]:
        taken: list[Any] = []
        while items := channel.take(max_items=3, timeout_s=_HANG_S):
            taken += items
        return taken

    calls = [_Call(lambda producer=producer: produce(producer)) for producer in range(num_producers)]
    consumers = [_Call(consume) for _ in range(num_consumers)]
    for call in calls:
        call.result()
    taken = [consumer.result() for consumer in consumers]
    everything = sorted((item.sequence, item.value) for items in taken for item in items)
    assert [sequence for sequence, _ in everything] == list(range(num_producers * num_each))
    for producer in range(num_producers):
        assert [index for _, (who, index) in everything if who == producer] == list(range(num_each))
    for items in taken:
        assert [item.sequence for item in items] == sorted(item.sequence for item in items)


CHANNEL_CHECKS: tuple[Callable[[MakeChannel], None], ...] = (
    check_order,
    check_keys,
    check_min_items,
    check_weights,
    check_capacity_items,
    check_capacity_bytes,
    check_hoarding,
    check_privacy,
    check_close,
    check_close_wakes,
    check_reopen,
    check_abort,
    check_timeout,
    check_competition,
)
"""All checks of a channel; each takes a function that makes a channel."""
