"""The store of weights with its slots in device memory: nothing of a version passes through the host's.

A sender packs its share of a version, in the dtype that is served, into an arena of its own (rlinf_comm.ipc) and writes
into the store's shared memory how the arena is mapped, with the digests of what it packed. A receiver maps the arena,
copies its boxes from there into its own tensors, on the device, and digests *those tensors* there. Versions, turns and
deaths are words of the store (rlinf_comm.weights.store), whose two ends these are.

The hosts wait for their devices before they say that something is there or was taken, so no events are shared.

Arenas and their mappings stay from version to version. A sender has one arena for each version that receivers still
need when it publishes the next, so one where they take each version before the next is published. The memory of a
version is used again once every receiver has checked it, so a version can be taken once. `mailbox_bytes` says how much
memory it is. memory.py says how memory is freed that others may have mapped.

device.py                what one device does, as a protocol; a CUDA device
memory.py                the words and records about memory that receivers map, and where pieces lie in it
exports.py, mappings.py  the two ends of it
sender.py, receiver.py   the two ends of the store
"""

from __future__ import annotations

from rlinf_comm.weights.device.device import CudaDevice, TransferDevice
from rlinf_comm.weights.device.memory import create_device_store, mailbox_bytes
from rlinf_comm.weights.device.receiver import DeviceWeightReceiver
from rlinf_comm.weights.device.sender import DeviceWeightSender

__all__ = [
    "create_device_store",
    "mailbox_bytes",
    "DeviceWeightSender",
    "DeviceWeightReceiver",
    "TransferDevice",
    "CudaDevice",
]
