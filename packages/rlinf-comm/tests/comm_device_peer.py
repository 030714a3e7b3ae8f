"""Another process with a peer and a fake device: `comm_device_peer.py ROLE PACKED_ARGUMENTS`."""

from __future__ import annotations

import sys

from comm_fake_accelerator import FakeAccelerator

from rlinf_comm import unpack
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


if __name__ == "__main__":
    print("ready", flush=True)
    globals()[sys.argv[1]](*unpack(bytes.fromhex(sys.argv[2])))
