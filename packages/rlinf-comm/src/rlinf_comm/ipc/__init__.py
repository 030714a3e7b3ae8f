"""Device memory that processes of one machine share: a sender's arena, opened where it is read, without a copy.

    arena = IpcArena.create(device=0, capacity_bytes=1 << 30)     # in the sender
    weights = arena.empty((4096, 4096), torch.bfloat16)           # a torch tensor in it
    record = arena.export(weights)                                # small, packable: put it through any channel
    same = open_record(record)                                    # in the receiver: a tensor of the same memory
    theirs = cupy.from_dlpack(same)                               # the same as CuPy's; so with all tensors from here

rlinf_comm.ipc.driver      the driver's functions, as a protocol that tests replace
rlinf_comm.ipc.transport   which way two processes share device memory, from facts and an echo
rlinf_comm.ipc.arena       the arena and its records
rlinf_comm.ipc.opened      opened arenas, counted
rlinf_comm.ipc.leases      whose turn it is to use a bucket: event, flag, wait, acknowledgement
rlinf_comm.ipc.probe       the echo between two processes

The arena is its own allocation, exported once: handles of the caching allocator's blocks would show its neighbours, and
go stale whenever it gives memory back. Devices are named by UUID, since ordinals differ with CUDA_VISIBLE_DEVICES.
"""

from rlinf_comm.ipc.arena import ArenaHandle, IpcArena, IpcRecord, open_record
from rlinf_comm.ipc.driver import load_driver
from rlinf_comm.ipc.leases import BucketReader, BucketWriter, LeaseAddress
from rlinf_comm.ipc.probe import answer_probe, probe
from rlinf_comm.ipc.transport import Facts, IpcChoice, choose, facts_of

__all__ = [
    "IpcArena",
    "IpcRecord",
    "ArenaHandle",
    "open_record",
    "BucketWriter",
    "BucketReader",
    "LeaseAddress",
    "probe",
    "answer_probe",
    "IpcChoice",
    "Facts",
    "choose",
    "facts_of",
    "load_driver",
]
