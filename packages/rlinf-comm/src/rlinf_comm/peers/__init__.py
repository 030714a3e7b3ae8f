"""Values between named peers of one job, over the best transport for each pair (peer.py)."""

from __future__ import annotations

from rlinf_comm.peers.peer import DEFAULT_CAPACITY_BYTES, Peer
from rlinf_comm.peers.transports.base import ChosenTransport, Transport
from rlinf_comm.wire.address import HostIdentity, PeerAddress
from rlinf_comm.wire.secret import job_secret

__all__ = [
    "Peer",
    "PeerAddress",
    "HostIdentity",
    "ChosenTransport",
    "Transport",
    "DEFAULT_CAPACITY_BYTES",
    "job_secret",
]
