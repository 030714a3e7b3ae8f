"""How two processes prove to each other that they know a key, before anything else is said between them.

    caller                                     called one
    greeting: magic, version, 16 random bytes  ->
                                               <-  the same, with its own random bytes
    HMAC(key, "caller" + both greetings)       ->
                                               <-  HMAC(key, "called" + both greetings)

This is challenge and response with HMAC-SHA256 (RFC 2104) in both directions, as in ISO/IEC 9798-4. The called one
proves nothing to a caller that has proven nothing; a recorded proof fits no other pair of greetings, and no side's
proof is the other's. From the same greetings both make a session key, which seals the messages of the meeting
(line.py).
"""

from __future__ import annotations

import hmac
import os
import struct

from rlinf_comm.errors import DecodeError

MAGIC = b"rlpeer"
VERSION = 3
"""Version of the whole protocol between peers; every change of the protocol increases it."""

GREETING = struct.Struct("<6sH16s")  # magic, version, random
PROOF_BYTES = 32

PROOF_TIMEOUT_S = 1.0
"""Seconds that a caller has to prove that it knows the key: many times what it needs on a busy machine."""


class Stranger(Exception):
    """The other side of a new connection does not know the key."""


class TurnedAway(Stranger):
    """The other side ended a new connection before either had proven anything: it has another key, or too many
    callers."""


def new_greeting() -> bytes:
    return GREETING.pack(MAGIC, VERSION, os.urandom(16))


def check_greeting(greeting: bytes, who: str) -> None:
    """Raises Stranger, or DecodeError for a peer of another version."""
    magic, version, _ = GREETING.unpack(greeting)
    if magic != MAGIC:
        raise Stranger(f"something else is there, which starts with {magic!r}")
    if version != VERSION:
        raise DecodeError(
            f"{who} speaks version {version} of the peer protocol, this process "
            f"version {VERSION}; install the same rlinf-comm on both sides"
        )


def proof(key: bytes, greetings: bytes, side: bytes) -> bytes:
    """What `side`, b"caller" or b"called", sends; `greetings` are the caller's and the called one's."""
    return hmac.digest(key, side + greetings, "sha256")


def check_proof(received: bytes, key: bytes, greetings: bytes, side: bytes) -> None:
    """Raises Stranger."""
    if not hmac.compare_digest(received, proof(key, greetings, side)):
        raise Stranger("it does not know the secret of this job")


class Seals:
    """The tags that show that a message of a meeting is the next one of the other side, whole and unchanged."""

    NUM_BYTES = 16

    def __init__(self, key: bytes, greetings: bytes, side: bytes) -> None:
        """`side` is this process: b"caller" or b"called"."""
        self._session = hmac.digest(key, b"session" + greetings, "sha256")
        self._side = side
        self._num_said = self._num_heard = 0

    def next_of_mine(self, body: bytes) -> bytes:
        self._num_said += 1
        return self._tag(self._side, self._num_said, body)

    def is_next(self, body: bytes, tag: bytes) -> bool:
        self._num_heard += 1
        other = b"called" if self._side == b"caller" else b"caller"
        return hmac.compare_digest(tag, self._tag(other, self._num_heard, body))

    def _tag(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._session, side + number.to_bytes(8, "little") + body, "sha256")[: self.NUM_BYTES]
