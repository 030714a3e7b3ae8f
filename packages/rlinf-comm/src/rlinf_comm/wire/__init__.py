"""How two processes of a job connect: one handshake, one framed message, one place for the secret and for deadlines.

secret.py        the secret of the job: who knows it belongs to the job
deadline.py      when a wait ends
address.py       who a process is, and where it can be reached
frame.py         a message on a socket: its length, and that many bytes at most
handshake.py     the proof of the secret, and the first message: who is calling, for what, with which protocols
connection.py    a connected socket between two processes that have proven who they are
listener.py      accepts connections, and lets in those who have proven that they know the secret
lifeline.py      tells when the other side of a connection ends
values.py        the stream of encoded values on a connection
stream.py        sends and receives values on a connection
buffers.py       memory for the buffers of a received value
"""

from __future__ import annotations

from rlinf_comm.wire.address import HostIdentity, PeerAddress, this_host
from rlinf_comm.wire.connection import Connection
from rlinf_comm.wire.deadline import FOREVER, Deadline
from rlinf_comm.wire.handshake import (
    Hello,
    Refused,
    Stranger,
    accept_handshake,
    disagreement,
    encode_hello,
    introduce,
    receive_hello,
    refusing,
    send_hello,
)
from rlinf_comm.wire.listener import Listener
from rlinf_comm.wire.secret import FILE_VARIABLE, SECRET_VARIABLE, is_loopback, job_secret, key_for

__all__ = [
    "Connection",
    "Listener",
    "HostIdentity",
    "PeerAddress",
    "this_host",
    "Deadline",
    "FOREVER",
    "Hello",
    "Refused",
    "Stranger",
    "introduce",
    "accept_handshake",
    "send_hello",
    "receive_hello",
    "encode_hello",
    "refusing",
    "disagreement",
    "SECRET_VARIABLE",
    "FILE_VARIABLE",
    "job_secret",
    "key_for",
    "is_loopback",
]
