"""Other processes with named peers: reads `ROLE ARGUMENTS` lines, forks a child for each, and prints its pid.

Forked from one process without torch and without threads, a child is there in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

from rlinf_comm import PeerLost, unpack
from rlinf_comm.peers import Peer, PeerAddress

HANG_S = 60.0
PARENT = "parent"


def number_of(index: int) -> np.ndarray:
    """What value `index` of traffic() is full of, and its size; now and then larger than the capacity."""
    num_bytes = (index * 7919) % 30_000 + (1_500_000 if index % 20 == 19 else 0)
    return np.full(num_bytes, index % 251, dtype=np.uint8)


def echo(name: str, parent: PeerAddress, transport: str) -> None:
    """Sends back what comes, until the parent is gone."""
    with Peer.listen(name, transports=(transport,)) as me:
        me.connect(parent)
        try:
            while True:
                me.send(PARENT, me.receive(PARENT, timeout_s=HANG_S))
        except PeerLost:
            return


def halve(name: str, parent: PeerAddress, transport: str) -> None:
    """Changes the tensors in place and sends them back."""
    me = Peer.listen(name, transports=(transport,))
    me.connect(parent)
    while True:
        tensors = list(me.receive(PARENT, timeout_s=HANG_S).values())
        for tensor in tensors:
            tensor *= 0.5
        me.send(PARENT, tensors)
        del tensors, tensor


def traffic(name: str, parent: PeerAddress, transport: str) -> None:
    """Sends and receives as fast as it can until it is killed."""
    me = Peer.listen(name, transports=(transport,), capacity_bytes=1 << 20)
    me.connect(parent)

    def send() -> None:
        index = 0
        while True:
            me.send(PARENT, (index, number_of(index)), timeout_s=HANG_S)
            index += 1

    threading.Thread(target=send, daemon=True).start()
    while True:
        me.receive(PARENT, timeout_s=HANG_S)


def fork_and_wait(name: str, parent: PeerAddress, transport: str) -> None:
    """Has a child of its own that outlives it, as a data loader may."""
    me = Peer.listen(name, transports=(transport,))
    me.connect(parent)
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(HANG_S))
        signal.pause()
    me.send(PARENT, pid)
    signal.pause()


def connect_and_go(name: str, parent: PeerAddress, transport: str) -> None:
    """One value, and no farewell."""
    me = Peer.listen(name, transports=(transport,))
    me.connect(parent)
    me.send(PARENT, name)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        role, arguments = line.split()
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(2 * HANG_S))
            try:
                globals()[role](*unpack(bytes.fromhex(arguments)))
            finally:
                os._exit(0)
        print(pid, flush=True)
