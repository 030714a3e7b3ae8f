"""The receiving process of test_comm_streaming: serves what "trainer" publishes, and sends it back."""

from __future__ import annotations

import sys

import torch

from rlinf_comm import unpack
from rlinf_comm.peers import Peer
from rlinf_comm.weights import WeightStreamReceiver

if __name__ == "__main__":
    address, reshard = unpack(bytes.fromhex(sys.argv[1]))
    with Peer.listen("engine") as me:
        me.connect(address)
        me.send("trainer", "ready")
        receiver = WeightStreamReceiver(reshard, 0, me, ["trainer"] * reshard.num_src_ranks)
        tensors = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for name, spec in reshard.dst_buffers[0].items()
        }
        version = 0
        while True:
            receiver.receive(tensors, version, timeout_s=60.0)
            me.send("trainer", tensors)
            version += 1
