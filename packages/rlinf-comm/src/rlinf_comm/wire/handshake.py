"""How two processes that connect find out whom they have before them: a proof, and then a hello of each.

**The proof** (TCP), before anything else is sent:

    caller                                     called
    greeting: magic, version, 16 random bytes  ->
                                               <-  the same, with its own random bytes
    HMAC(key, "caller" + both greetings)       ->
                                               <-  HMAC(key, "called" + both greetings)

This is challenge and response with HMAC-SHA256 (RFC 2104) in both directions, as in ISO/IEC 9798-4. The called side
proves nothing to a caller that has proven nothing; a recorded proof fits no other pair of greetings, and no side's
proof is the other's. From the same greetings both make a session key, which authenticates the messages of the
handshake (Tags). On a Unix socket the kernel tells whose process it is, and a pipe is inherited: no proof is needed.

**The hello** says who is calling, for what, and which protocols it speaks. Its form never changes: a JSON object, in
which a reader passes over what it does not know. What comes after it may change with the protocols, since it is read
only where both sides have the same.
"""

from __future__ import annotations

import hmac
import os
import platform
import struct
import sys
from typing import TYPE_CHECKING

import msgspec

from rlinf_comm.errors import CommError, DecodeError
from rlinf_comm.protocol import PROTOCOL
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import Deadline

if TYPE_CHECKING:
    from rlinf_comm.wire.connection import Connection

MAGIC = b"rlpeer"
VERSION = 4
"""Version of the proof, the frames and the stream of values; every change of them increases it."""

GREETING = struct.Struct("<6sH16s")  # magic, version, random
PROOF_BYTES = 32

PROOF_TIMEOUT_S = 1.0
"""Seconds that a caller has to prove that it knows the key: many times what it needs on a busy machine."""
MAX_HANDSHAKE_BYTES = 1 << 20
"""Of one message during the handshake."""


class Stranger(Exception):
    """The other side of a new connection does not know the key."""


class TurnedAway(Stranger):
    """The other side ended a new connection before either had proven anything: it has another key, or too many
    callers."""


class Refused(CommError):
    """The other side knows who is calling and refuses the connection; the text is its reason."""


# --- the proof --------------------------------------------------------------------------------------------------------


def new_greeting() -> bytes:
    return GREETING.pack(MAGIC, VERSION, os.urandom(16))


def check_greeting(greeting: bytes, who: str) -> None:
    """Raises Stranger, or DecodeError for a process of another version."""
    magic, version, _ = GREETING.unpack(greeting)
    if magic != MAGIC:
        raise Stranger(f"something else is there, which starts with {magic!r}")
    if version != VERSION:
        raise DecodeError(
            f"{who} speaks version {version} of the peer protocol, this process "
            f"version {VERSION}; install the same rlinf-comm on both sides"
        )


def proof(key: bytes, greetings: bytes, side: bytes) -> bytes:
    """What `side`, b"caller" or b"called", sends; `greetings` are the caller's and the called side's."""
    return hmac.digest(key, side + greetings, "sha256")


def check_proof(received: bytes, key: bytes, greetings: bytes, side: bytes) -> None:
    """Raises Stranger."""
    if not hmac.compare_digest(received, proof(key, greetings, side)):
        raise Stranger("it does not know the secret of this job")


class Tags:
    """They show that a message of the handshake is the next one of the other side, whole and unchanged."""

    NUM_BYTES = 16

    def __init__(self, key: bytes, greetings: bytes, side: bytes) -> None:
        """`side` is this process: b"caller" or b"called"."""
        self._session = hmac.digest(key, b"session" + greetings, "sha256")
        self._side = side
        self._num_sent = self._num_received = 0

    def of_next(self, body: bytes) -> bytes:
        """The tag of the next message of this side."""
        self._num_sent += 1
        return self._tag(self._side, self._num_sent, body)

    def is_next(self, body: bytes, tag: bytes) -> bool:
        """Whether it is the next message of the other side."""
        self._num_received += 1
        other = b"called" if self._side == b"caller" else b"caller"
        return hmac.compare_digest(tag, self._tag(other, self._num_received, body))

    def _tag(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._session, side + number.to_bytes(8, "little") + body, "sha256")[: self.NUM_BYTES]


# --- the hello --------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, kw_only=True, frozen=True, tag_field="rlinf", tag="hello"):
    """The first message of each side.

    Example: Hello(service="channel", name="samples", caller=PeerAddress(...)), answered by Hello(details=b"...").
    """

    interpreter: str = sys.executable
    python: str = platform.python_version()
    protocols: dict[str, int] = msgspec.field(default_factory=lambda: {"rlinf-comm": PROTOCOL})
    """Distribution -> the number of the protocol that it speaks in this process."""
    service: str = ""
    """What a caller wants, and what the called side is: "peer", "channel", "launcher", "worker" or "engine"."""
    name: str = ""
    """Of the one that is called."""
    caller: PeerAddress | None = None
    details: bytes = b""
    """What the service needs besides, as the service encodes it."""
    refusal: str = ""
    """In an answer: why the connection is refused."""


class _Other(msgspec.Struct, tag_field="rlinf", tag="other"):
    """Never sent: msgspec looks at the tag of a message only where there are two kinds."""


encode_hello = msgspec.json.Encoder().encode
"""Encodes the first message of a connection as JSON."""
_decode = msgspec.json.Decoder(Hello | _Other).decode


def introduce(connection: Connection, hello: Hello, deadline: Deadline) -> Hello:
    """The caller's half: sends its hello, and returns that of the called side.

    Raises:
        Refused: with the other side's reason.
        DecodeError: the other side speaks other protocols.
        PeerLost: the connection broke.
        PeerTimeout: the deadline passed.
    """
    send_hello(connection, hello, deadline)
    answer = receive_hello(connection, deadline)
    if answer.refusal:
        raise Refused(answer.refusal)
    problem = disagreement(hello, answer)
    if problem is not None:
        raise DecodeError(problem)
    return answer


def accept_handshake(connection: Connection, own: Hello, deadline: Deadline) -> Hello:
    """The called side's half: receives the hello of a caller that wants `own.service`; send_hello() answers it.

    Raises:
        DecodeError: it wants something else, or speaks other protocols; it is told so.
        PeerLost: the connection broke.
        PeerTimeout: the deadline passed.
    """
    hello = receive_hello(connection, deadline)
    problem = disagreement(own, hello)
    if problem is None and hello.service == own.service:
        return hello
    wrong = f"the service {hello.service!r} was called, and this is {own.service!r}"
    send_hello(connection, own if problem else refusing(own, wrong), deadline)  # a hello says which protocols it speaks
    raise DecodeError(problem or wrong)


def refusing(own: Hello, why: str) -> Hello:
    """The answer that refuses a connection."""
    return msgspec.structs.replace(own, refusal=why)


def send_hello(connection: Connection, hello: Hello, deadline: Deadline) -> None:
    """Sends one. Raises PeerLost, PeerTimeout."""
    connection.send_bytes(encode_hello(hello), deadline)


def receive_hello(connection: Connection, deadline: Deadline) -> Hello:
    """The hello of the other side, of whatever version. Raises DecodeError, PeerLost, PeerTimeout."""
    body = connection.receive_bytes(deadline, max_bytes=MAX_HANDSHAKE_BYTES)
    try:
        hello = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"{connection.who} sent no hello of RLinf ({error}): {body[:80]!r}") from error
    if not isinstance(hello, Hello):
        raise DecodeError(f"{connection.who} sent no hello of RLinf: {body[:80]!r}")
    return hello


def disagreement(own: Hello, other: Hello) -> str | None:
    """The text of the error where `other` does not speak the protocols of `own`: both versions, both interpreters, and
    what to do."""
    differ = [name for name, number in own.protocols.items() if other.protocols.get(name) != number]
    if not differ:
        return None
    spoken = ", ".join(f"{name}: {other.protocols.get(name, 'none')} against {own.protocols[name]}" for name in differ)
    return (
        f"{other.interpreter} (Python {other.python}) speaks other protocols than {own.interpreter} "
        f"(Python {own.python}), {spoken}; install the same versions of {' and '.join(differ)} in both"
    )
