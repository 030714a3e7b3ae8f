"""Moving values and weights between processes, of one machine and of several.

This module, and the top of the packages below, state what other packages may import; all else is private.

rlinf_comm           channels, pools, peers, values as bytes, records, errors
rlinf_comm.wire      connections: handshake, secret, deadlines
rlinf_comm.weights   layouts, reshard plans, and attested weight hand-over (imports torch); with .layouts and .device
rlinf_comm.testing   bitwise comparison, conformance checks
rlinf_comm.protocol  the number of the protocol, for who must not import anything
rlinf_comm.cuda, .ipc, .nccl    device memory, for who uses this package alone

Names are imported when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_comm._C import __version__, has_cuda_kernels, num_cuda_devices
    from rlinf_comm.channel import Channel, ChannelAddress, ChannelStats, Item
    from rlinf_comm.codec import Encoded, decode, encode, pack, unpack
    from rlinf_comm.cuda import DeviceUnavailable
    from rlinf_comm.errors import (
        ChannelAborted,
        ChannelClosed,
        ChannelError,
        ChannelStalled,
        ChannelTimeout,
        CommError,
        DecodeError,
        IpcError,
        LayoutError,
        NoTransport,
        NotTrusted,
        PeerLeft,
        PeerLost,
        PeerNameTaken,
        PeerTimeout,
        PoolFull,
        TornStream,
        UnsupportedValueError,
        WeightMismatchError,
        WeightTimeout,
    )
    from rlinf_comm.memory import copy_into
    from rlinf_comm.peers import Peer
    from rlinf_comm.pool import PoolAddress, PoolStats, SharedPool
    from rlinf_comm.records import modules_of, record
    from rlinf_comm.remote import ChannelServer, ServerAddress

_MODULES = {
    "_C": "__version__ has_cuda_kernels num_cuda_devices",
    "channel": "Channel ChannelAddress ChannelStats Item",
    "codec": "Encoded decode encode pack unpack",
    "cuda": "DeviceUnavailable",
    "errors": (
        "ChannelAborted ChannelClosed ChannelError ChannelStalled ChannelTimeout CommError DecodeError "
        "IpcError LayoutError NoTransport NotTrusted PeerLeft PeerLost PeerNameTaken PeerTimeout PoolFull "
        "TornStream UnsupportedValueError WeightMismatchError WeightTimeout"
    ),
    "memory": "copy_into",
    "peers": "Peer",
    "pool": "PoolAddress PoolStats SharedPool",
    "records": "modules_of record",
    "remote": "ChannelServer ServerAddress",
}
"""Module -> the names that it defines."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "__version__",
    "has_cuda_kernels",
    "num_cuda_devices",
    "Channel",
    "ChannelAddress",
    "ChannelStats",
    "Item",
    "Encoded",
    "decode",
    "encode",
    "pack",
    "unpack",
    "DeviceUnavailable",
    "ChannelAborted",
    "ChannelClosed",
    "ChannelError",
    "ChannelStalled",
    "ChannelTimeout",
    "CommError",
    "DecodeError",
    "IpcError",
    "LayoutError",
    "NoTransport",
    "NotTrusted",
    "PeerLeft",
    "PeerLost",
    "PeerNameTaken",
    "PeerTimeout",
    "PoolFull",
    "TornStream",
    "UnsupportedValueError",
    "WeightMismatchError",
    "WeightTimeout",
    "copy_into",
    "Peer",
    "PoolAddress",
    "PoolStats",
    "SharedPool",
    "modules_of",
    "record",
    "ChannelServer",
    "ServerAddress",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"rlinf_comm.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
