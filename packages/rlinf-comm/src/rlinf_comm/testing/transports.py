"""What any transport between peers must fulfil."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf_comm import codec, records
from rlinf_comm.errors import DecodeError, PeerLeft, PeerLost, PeerTimeout, UnsupportedValueError
from rlinf_comm.testing.bitwise import assert_bitwise_equal
from rlinf_comm.testing.peers_over import HANG_S, PeerLike, PeersLike

_MAX_VALUES = 100_000
"""More than any transport takes before it makes a sender wait."""


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def _assert_raises(expected: type[Exception], function: Callable[[], Any], *texts: str) -> None:
    try:
        function()
    except expected as error:
        message = str(error)
    else:
        raise AssertionError(f"{expected.__name__} was not raised")
    missing = [text for text in texts if text not in message]
    assert not missing, f"{expected.__name__} does not say {missing}: {message}"


def _assert_crosses(peers: PeersLike, values: Sequence[Any]) -> None:
    a, b = peers.make("a", "b")
    with _threads(1) as pool:
        sent = pool.submit(lambda: [a.send("b", value, timeout_s=HANG_S) for value in values])
        for index, value in enumerate(values):
            try:
                received = b.receive("a", timeout_s=HANG_S)
            except PeerTimeout:
                sent.result(0.0)
                raise
            assert_bitwise_equal(received, value, f"values[{index}]")
        sent.result(HANG_S)


# --- values -----------------------------------------------------------------------------------------------------------


def check_sizes(peers: PeersLike) -> None:
    """Empty, small, around every border that is a power of two, and far larger than the capacity."""
    borders = (1, 64, 4096, 64 << 10, 1 << 20, 4 << 20)
    sizes = [0, *(border + step for border in borders for step in (-1, 0, 1)), 20_000_003]
    pattern = np.random.default_rng(0).integers(0, 256, sizes[-1], dtype=np.uint8)
    _assert_crosses(peers, [pattern[:size] for size in sizes])


def check_large_structure(peers: PeersLike) -> None:
    """A value without tensors, and one of very many small ones, each larger than the capacity."""
    many = [np.full(3, index % 251, dtype=np.uint8) for index in range(40_000)]
    _assert_crosses(peers, ["text" * 1_000_000, many, {"between": np.arange(1_000_000), "text": "t" * 2_000_000}])


def check_dtypes(peers: PeersLike) -> None:
    """Tensors of every dtype, scalars and empty ones too."""
    import torch

    dtypes = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    dtypes = sorted((item for item in dtypes if not str(item).startswith(("torch.bits", "torch.q"))), key=str)
    values = []
    for dtype in dtypes:
        try:
            bits = torch.arange(32, dtype=torch.uint8).view(dtype)
            values += [bits, bits[:0], bits[1].clone()]
        except (RuntimeError, TypeError):  # no plain bits: less than a byte
            continue
    assert len(values) > 30
    _assert_crosses(peers, values)


def check_strides(peers: PeersLike) -> None:
    """What is not contiguous arrives with the same elements."""
    import torch

    base = torch.arange(1200.0).reshape(30, 40)
    arrays = np.arange(600).reshape(20, 30)
    views = [base.T, base[3::4, 1::3], base[5], base[:, 7], base[:1].expand(9, 40), base.reshape(2, 15, 40).mT]
    _assert_crosses(peers, [*views, arrays.T, arrays[::-2, 1:-3:2], {"a": base.T, "b": arrays[:, ::-1]}])


def check_nested(peers: PeersLike) -> None:
    """Containers of containers come back as the same types."""
    import torch

    inner = {"weights": [torch.ones(3), (np.zeros(2), None)], "text": "ü", "number": 1 << 70, "flag": True, "f": -0.0}
    _assert_crosses(
        peers, [inner, [inner, (inner, {"deep": {"deeper": [inner]}})], (), [], {}, None, b"", float("nan")]
    )


def check_privacy(peers: PeersLike) -> None:
    """The sender may change what it has sent, and the receiver what it has received."""
    a, b = peers.make("a", "b")
    for num_elements in (10, 100_000):
        array = np.ones(num_elements)
        a.send("b", array, timeout_s=HANG_S)
        array[:] = 2.0
        received = b.receive("a", timeout_s=HANG_S)
        assert (received == 1.0).all()
        received[:] = 3.0
        assert (array == 2.0).all()


def check_keeping(peers: PeersLike) -> None:
    """What a receiver keeps, or a view of it, does not change when more comes; also beyond the capacity."""
    import torch

    a, b = peers.make("a", "b")
    views = []
    with _threads(1) as pool:
        sent = pool.submit(
            lambda: [a.send("b", torch.full((5_000_000,), i, dtype=torch.uint8), timeout_s=HANG_S) for i in range(12)]
        )
        for index in range(12):
            tensor = b.receive("a", timeout_s=HANG_S)
            views.append((index, (tensor, tensor[-1000:], tensor.numpy()[::1000])[index % 3]))
            del tensor
            if index % 4 == 3:
                views = views[1:]
        sent.result(HANG_S)
    for index, view in views:
        assert (view == index).all(), f"value {index} has changed"


def check_unsupported(peers: PeersLike) -> None:
    """A value that cannot cross is refused by the sender, with its place, and the next one crosses."""
    a, b = peers.make("a", "b")
    _assert_raises(UnsupportedValueError, lambda: a.send("b", {"f": [print]}, timeout_s=HANG_S), "f[0]")
    a.send("b", "next", timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == "next"


def check_undecodable(peers: PeersLike) -> None:
    """A value of a class that the receiver does not have is a DecodeError, and the next one arrives."""
    a, b = peers.make("a", "b")
    body = {"__module__": "only_the_sender_has_this", "__annotations__": {"x": int}}
    secret: Any = records.record(dataclass(type("Secret", (), body)))
    try:
        a.send("b", secret(1), timeout_s=HANG_S)
        a.send("b", "next", timeout_s=HANG_S)
    finally:
        del records._classes[records._names.pop(secret)]
        codec.NATIVE.forget_classes()
    _assert_raises(DecodeError, lambda: b.receive("a", timeout_s=HANG_S), "only_the_sender_has_this")
    assert b.receive("a", timeout_s=HANG_S) == "next"


# --- order ------------------------------------------------------------------------------------------------------------


def check_order(peers: PeersLike) -> None:
    """Values of one sender arrive in the order of its sends, small and large ones mixed, and each way by itself."""
    a, b = peers.make("a", "b")

    def value(index: int) -> Any:
        return index, np.full((index % 7 == 3) * 700_000 + index, index % 100, dtype=np.uint8)

    def send(sender: PeerLike, to: str) -> None:
        for index in range(60):
            sender.send(to, value(index), timeout_s=HANG_S)

    def receive(receiver: PeerLike, from_: str) -> None:
        for index in range(60):
            number, array = receiver.receive(from_, timeout_s=HANG_S)
            assert number == index
            assert np.array_equal(array, value(index)[1])

    with _threads(4) as pool:
        calls = [pool.submit(send, a, "b"), pool.submit(send, b, "a")]
        calls += [pool.submit(receive, a, "b"), pool.submit(receive, b, "a")]
        for call in calls:
            call.result(HANG_S)


def check_senders_apart(peers: PeersLike) -> None:
    """Values of several senders do not mix, and one that is not received from holds up nobody."""
    hub, *senders = peers.make("hub", "s0", "s1", "s2")
    full = senders[0]
    _assert_raises(PeerTimeout, lambda: [full.send("hub", np.zeros(30_000), timeout_s=0.3) for _ in range(_MAX_VALUES)])
    with _threads(2) as pool:
        calls = [
            pool.submit(lambda s=s: [s.send("hub", (s.name, index), timeout_s=HANG_S) for index in range(200)])
            for s in senders[1:]
        ]
        for name in ("s2", "s1"):
            for index in range(200):
                assert hub.receive(name, timeout_s=HANG_S) == (name, index)
        for call in calls:
            call.result(HANG_S)


def check_threads(peers: PeersLike) -> None:
    """Several threads send and several receive over one link: each value arrives once, each thread's in order."""
    a, b = peers.make("a", "b")
    num_threads, num_each = 3, 50

    def send(thread: int) -> None:
        for index in range(num_each):
            array = np.full(300_000 if index % 10 == 9 else 10, index, dtype=np.uint8)
            a.send("b", (thread, index, array), timeout_s=HANG_S)

    def receive(_: int) -> list[tuple[int, int]]:
        received = []
        for _ in range(num_each):
            thread, index, array = b.receive("a", timeout_s=HANG_S)
            assert (array == index).all()
            received.append((thread, index))
        return received

    with _threads(2 * num_threads) as pool:
        sends = [pool.submit(send, thread) for thread in range(num_threads)]
        receives = [pool.submit(receive, thread) for thread in range(num_threads)]
        received = [call.result(HANG_S) for call in receives]
        for call in sends:
            call.result(HANG_S)
    expected = [(thread, index) for thread in range(num_threads) for index in range(num_each)]
    assert sorted(pair for pairs in received for pair in pairs) == expected
    for pairs in received:
        for thread in range(num_threads):
            mine = [index for who, index in pairs if who == thread]
            assert mine == sorted(mine)


def check_both_send_first(peers: PeersLike) -> None:
    """Two peers may send up to the capacity to each other before either receives."""
    a, b = peers.make("a", "b", capacity_bytes=32 << 20)
    array = np.arange(3_000_000)
    with _threads(2) as pool:
        calls = [pool.submit(a.send, "b", array, timeout_s=HANG_S), pool.submit(b.send, "a", array, timeout_s=HANG_S)]
        for call in calls:
            call.result(HANG_S)
    assert np.array_equal(a.receive("b", timeout_s=HANG_S), array)
    assert np.array_equal(b.receive("a", timeout_s=HANG_S), array)


def check_receive_timeout(peers: PeersLike) -> None:
    """A receive that waits in vain says for whom and how long; the next value arrives all the same."""
    a, b = peers.make("a", "b")
    _assert_raises(PeerTimeout, lambda: b.receive("a", timeout_s=0.05), "'a'", "0.05")
    a.send("b", 1, timeout_s=HANG_S)
    assert b.receive("a", timeout_s=HANG_S) == 1
    _assert_raises(PeerTimeout, lambda: b.receive("a", timeout_s=0.0), "'a'")


def check_send_timeout(peers: PeersLike) -> None:
    """A send that is not taken in time says so, and nothing of its value arrives; all others do."""
    a, b = peers.make("a", "b")
    values = [(index, np.full(900_000, index % 100, dtype=np.uint8)) for index in range(100)]
    large = np.zeros(40_000_000, dtype=np.uint8)
    b_has = 0

    def send_all() -> None:
        nonlocal b_has
        for value in values:
            a.send("b", value, timeout_s=0.3)
            b_has += 1

    _assert_raises(PeerTimeout, lambda: a.send("b", large, timeout_s=0.5), "'b'", "0.5")  # begun, not ended
    _assert_raises(PeerTimeout, send_all, "'b'", "0.3")
    with _threads(1) as pool:
        last = pool.submit(a.send, "b", "last", timeout_s=HANG_S)
        for index in range(b_has):
            number, array = b.receive("a", timeout_s=HANG_S)
            assert number == index
            assert np.array_equal(array, values[index][1])
        assert b.receive("a", timeout_s=HANG_S) == "last"
        last.result(HANG_S)


def check_leave(peers: PeersLike) -> None:
    """What was sent before a close arrives; then both ends hear that the peer has left."""
    a, b, c = peers.make("a", "b", "c")
    a.send("c", 0, timeout_s=HANG_S)
    for index in range(20):
        b.send("a", np.full(3_000, index), timeout_s=HANG_S)
    b.close()
    for index in range(20):
        assert (a.receive("b", timeout_s=HANG_S) == index).all()
    _assert_raises(PeerLeft, lambda: a.receive("b", timeout_s=HANG_S), "'b'")
    assert c.receive("a", timeout_s=HANG_S) == 0
    c.close()
    _assert_raises(PeerLeft, lambda: [a.send("c", 1, timeout_s=HANG_S) for _ in range(_MAX_VALUES)], "'c'")


def check_crash(peers: PeersLike) -> None:
    """What was sent before a crash arrives; then both ends hear of the loss, also those that are already waiting."""
    a, b, c = peers.make("a", "b", "c")
    a.send("c", 0, timeout_s=HANG_S)
    c.send("a", 0, timeout_s=HANG_S)
    b.send("a", "before", timeout_s=HANG_S)
    peers.crash(b)
    assert a.receive("b", timeout_s=HANG_S) == "before"
    _assert_raises(PeerLost, lambda: a.receive("b", timeout_s=HANG_S), "'b'")
    assert a.receive("c", timeout_s=HANG_S) == 0
    with _threads(2) as pool:
        receive = pool.submit(a.receive, "c", timeout_s=HANG_S)
        send = pool.submit(lambda: [a.send("c", np.zeros(100_000), timeout_s=HANG_S) for _ in range(_MAX_VALUES)])
        time.sleep(0.2)  # for both to wait; no check passes or fails by it
        peers.crash(c)
        _assert_raises(PeerLost, lambda: receive.result(HANG_S), "'c'")
        _assert_raises(PeerLost, lambda: send.result(HANG_S), "'c'")


def check_return(peers: PeersLike) -> None:
    """A peer takes the name of one that has ended, and is reached by those who have heard of the end."""
    (a,) = peers.make("a")
    for generation in range(3):
        (b,) = peers.make("b")
        a.send("b", generation, timeout_s=HANG_S)
        assert b.receive("a", timeout_s=HANG_S) == generation
        b.send("a", generation, timeout_s=HANG_S)
        assert a.receive("b", timeout_s=HANG_S) == generation
        peers.crash(b)
        _assert_raises(PeerLost, lambda: a.receive("b", timeout_s=HANG_S))
        _assert_raises(PeerLost, lambda: [a.send("b", 0, timeout_s=HANG_S) for _ in range(_MAX_VALUES)])


TRANSPORT_CHECKS: tuple[Callable[[PeersLike], None], ...] = (
    check_sizes,
    check_large_structure,
    check_dtypes,
    check_strides,
    check_nested,
    check_privacy,
    check_keeping,
    check_unsupported,
    check_undecodable,
    check_order,
    check_senders_apart,
    check_threads,
    check_both_send_first,
    check_receive_timeout,
    check_send_timeout,
    check_leave,
    check_crash,
    check_return,
)
"""Each takes the peers of one check, raises AssertionError, and ends by itself where the transport hangs."""
