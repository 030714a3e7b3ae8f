"""Moving values and weights between processes, of one machine and of several.

rlinf_comm.channel   bounded shared-memory queues
rlinf_comm.remote    channels from other hosts
rlinf_comm.pool      tensors in shared memory, which cross a channel by reference
rlinf_comm.codec     values to bytes and back, without pickle
rlinf_comm.records   which classes may cross
rlinf_comm.memory    copies past the caches
rlinf_comm.peers     values between named peers, over the best transport for each pair
rlinf_comm.weights   layouts, reshard plans, and attested weight hand-over (imports torch)
rlinf_comm.testing   bitwise comparison, conformance checks
rlinf_comm.errors    the error tree
"""

from __future__ import annotations

from rlinf_comm._C import __version__, has_cuda_kernels, num_cuda_devices
from rlinf_comm.channel import Channel, ChannelAddress, ChannelStats, Item
from rlinf_comm.codec import Encoded, decode, encode, pack, unpack
from rlinf_comm.errors import (
    ChannelAborted,
    ChannelClosed,
    ChannelError,
    ChannelStalled,
    ChannelTimeout,
    CommError,
    DecodeError,
    LayoutError,
    NoTransport,
    NotTrusted,
    PeerLeft,
    PeerLost,
    PeerNameTaken,
    PeerTimeout,
    PoolFull,
    UnsupportedValueError,
    WeightMismatchError,
    WeightTimeout,
)
from rlinf_comm.memory import copy_into
from rlinf_comm.pool import PoolAddress, PoolStats, SharedPool
from rlinf_comm.records import record

__all__ = [
    "Channel",
    "ChannelAddress",
    "ChannelStats",
    "Item",
    "Encoded",
    "encode",
    "decode",
    "pack",
    "unpack",
    "record",
    "copy_into",
    "CommError",
    "ChannelError",
    "ChannelClosed",
    "ChannelAborted",
    "ChannelTimeout",
    "ChannelStalled",
    "PeerLost",
    "UnsupportedValueError",
    "DecodeError",
    "LayoutError",
    "WeightMismatchError",
    "WeightTimeout",
    "has_cuda_kernels",
    "num_cuda_devices",
    "SharedPool",
    "PoolAddress",
    "PoolStats",
    "PoolFull",
    "__version__",
    "NoTransport",
    "NotTrusted",
    "PeerLeft",
    "PeerNameTaken",
    "PeerTimeout",
]
