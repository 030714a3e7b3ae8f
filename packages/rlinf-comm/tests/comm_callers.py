"""Callers that talk nonsense to what listens for the processes of a job (peers, directories, doors, launchers):
strangers without the secret, and members whose words are wrong. A listener has to serve everybody else as before.

with nothing_grows():
    disturb(Called(endpoint=..., key=..., messages=[...]), num_calls=3000, seed=0)
"""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from comm_mutations import mutated

from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.handshake import GREETING, MAGIC, PROOF_BYTES, Stranger, new_greeting, proof

HANG_S = 60.0
SETTLE_S = 30.0
"""For threads of calls that have ended to end."""
NUM_SOURCES = 200
"""Addresses 127.0.1.1, ... of this machine from which is called in turn: of each, the system has 28,000 ports."""
MAX_GROWTH_BYTES = 8 << 20
"""What the allocator may keep, whatever it is asked for. A leak of 170 bytes a call shows after 50,000 calls."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A listener."""

    endpoint: tuple[str, int]
    key: bytes
    """What its callers prove to know."""
    messages: Sequence[bytes]
    """Some that a rightful caller sends first, encoded, without length and tag."""


def disturb(called: Called, num_calls: int, seed: int) -> Counter[str]:
    """So many calls, one after the other, each until the listener has hung up; how many of each kind.

    Raises:
        AssertionError: a stranger was told more than a greeting; a caller was left hanging. It has the seed that
            repeats the call.
    """
    counts: Counter[str] = Counter()
    kinds = [_noise, _greeting, _proof, _noise_of_a_member, _untagged, _right_tag]
    for index in range(num_calls):
        numbers = random.Random(seed + index)
        kind = numbers.choice(kinds)
        try:
            kind(called, numbers)
        except Exception as error:
            raise AssertionError(
                f"{kind.__name__} with seed {seed + index}: {type(error).__name__}: {error}"
            ) from error
        counts[kind.__name__.strip("_")] += 1
    return counts


@contextmanager
def nothing_grows() -> Iterator[None]:
    """This process has as many descriptors and threads afterwards as before, and no more memory.

    Let a few hundred calls go before: what is imported and allocated once is no growth.
    """
    before = _held()
    yield
    end_s = time.monotonic() + SETTLE_S
    while _more(after := _held(), before) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not _more(after, before), f"(descriptors, threads) were {before[:2]} and are {after[:2]}"
    assert after[2] - before[2] <= MAX_GROWTH_BYTES, f"{after[2] - before[2]:,} bytes more than before"


def _more(after: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Whether there are more descriptors or threads; calls that came before may have ended since."""
    return after[0] > before[0] or after[1] > before[1]


def _held() -> tuple[int, int, int]:
    """Descriptors, threads, bytes of memory that is this process's own."""
    gc.collect()
    with open("/proc/self/status") as status:
        own = next(connection for connection in status if connection.startswith("RssAnon"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), 1024 * int(own.split()[1])


# --- strangers --------------------------------------------------------------------------------------------------------


def _noise(called: Called, numbers: random.Random) -> None:
    _as_stranger(called, numbers, numbers.randbytes(numbers.choice((0, 1, 23, 24, 56, 200, 100_000))))


def _greeting(called: Called, numbers: random.Random) -> None:
    """A greeting that is almost one, and perhaps something behind it."""
    behind = numbers.randbytes(numbers.choice((0, PROOF_BYTES, 500)))
    _as_stranger(called, numbers, mutated(new_greeting(), numbers) + behind)


def _proof(called: Called, numbers: random.Random) -> None:
    """A greeting, and a proof that is none: of another key, of another meeting, changed, or cut."""
    mine = new_greeting()
    right_key = proof(called.key, mine + new_greeting(), b"caller")
    wrong_key = proof(numbers.randbytes(32), mine + mine, b"caller")
    forgery = numbers.choice((right_key, wrong_key, mutated(right_key, numbers), right_key[: numbers.randrange(32)]))
    _as_stranger(called, numbers, mine + forgery)


def _as_stranger(called: Called, numbers: random.Random, message: bytes) -> None:
    source = f"127.0.1.{1 + numbers.randrange(NUM_SOURCES)}"
    with socket.create_connection(called.endpoint, timeout=HANG_S, source_address=(source, 0)) as connection:
        reply = _say_all(connection, message)
    assert len(reply) <= GREETING.size and MAGIC.startswith(reply[: len(MAGIC)]), f"a stranger was told {reply!r}"


# --- members ----------------------------------------------------------------------------------------------------------


def _noise_of_a_member(called: Called, numbers: random.Random) -> None:
    _as_member(called, lambda connection: numbers.randbytes(numbers.choice((0, 1, 4, 100, 5000))))


def _untagged(called: Called, numbers: random.Random) -> None:
    """A message that was changed, with its length and its tag: lengths beyond all bounds are among them."""
    _as_member(called, lambda connection: mutated(_tagged(connection, numbers.choice(called.messages)), numbers))


def _right_tag(called: Called, numbers: random.Random) -> None:
    """A changed message with the tag that belongs to it, and then perhaps another."""
    bodies = [mutated(numbers.choice(called.messages), numbers) for _ in range(numbers.choice((1, 1, 2)))]
    _as_member(called, lambda connection: b"".join(_tagged(connection, body) for body in bodies))


def _tagged(connection: Connection, body: bytes) -> bytes:
    assert connection._tags is not None
    return _LENGTH.pack(len(body)) + body + connection._tags.of_next(body)


def _as_member(called: Called, words: Callable[[Connection], bytes]) -> None:
    connection = _proven(called)
    try:
        _say_all(connection.socket, words(connection))
    finally:
        connection.shut()


def _proven(called: Called) -> Connection:
    try:
        return Connection.open(called.endpoint, called.key, "the listener", Deadline(HANG_S))
    except Stranger as error:
        raise AssertionError("a rightful caller was taken for a stranger") from error


def _say_all(connection: socket.socket, message: bytes) -> bytes:
    """Says it and no more; what was answered until the listener hung up."""
    connection.settimeout(HANG_S)
    reply = b""
    try:
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        while len(reply) < 1 << 20 and (more := connection.recv(1 << 16)):
            reply += more
    except (ConnectionError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
    return reply
