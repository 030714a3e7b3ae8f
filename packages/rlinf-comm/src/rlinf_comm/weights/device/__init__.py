"""The weight store with its slots in device memory: no version passes through host memory.

A sender packs its share of a version, in the serving dtype, into its own arena (rlinf_comm.ipc) and writes into the
store's shared memory how to open the arena, with the digests of what it packed. A receiver opens the arena, copies its
boxes from there into its own tensors on the device, and digests *those tensors* there. Versions, turns and deaths are
recorded in the words of the store (rlinf_comm.weights.store), whose two ends these are.

The hosts synchronize with their devices before they announce that something is available or was received, so no events
are shared.

A sender keeps a version from `publish` until every receiver has received it, and then frees the memory, in a thread
that waits for that. So a version can be received only once. `mailbox_bytes` is the size of that memory.

device.py                the device protocol; a CUDA device
memory.py                where the arenas are recorded, and the offsets of pieces in them
sender.py, receiver.py   the two ends
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
