"""A peer with a fake device, for another process (comm_nursery.py)."""

from __future__ import annotations

from comm_fake_accelerator import FakeAccelerator

from rlinf_comm.errors import PeerLost
from rlinf_comm.peers import Peer, PeerAddress
from rlinf_comm.peers.transports.cuda_ipc import CudaIpcTransport

HANG_S = 60.0


def accelerator() -> FakeAccelerator:
    return FakeAccelerator()


def echo(parent: PeerAddress) -> None:
    """Sends back what comes, until the parent is gone."""
    with Peer.listen("echo", transports=(CudaIpcTransport(accelerator), "shared")) as me:
        me.connect(parent)
        me.send("parent", "here", timeout_s=HANG_S)
        try:
            while True:
                me.send("parent", me.receive("parent", timeout_s=HANG_S), timeout_s=HANG_S)
        except PeerLost:
            return
