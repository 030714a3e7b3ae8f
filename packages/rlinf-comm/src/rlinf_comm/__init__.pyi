from ._C import (
    __version__ as __version__,
    has_cuda_kernels as has_cuda_kernels,
    num_cuda_devices as num_cuda_devices,
)
from .channel import (
    Channel as Channel,
    ChannelAddress as ChannelAddress,
    ChannelStats as ChannelStats,
    Item as Item,
)
from .codec import (
    Encoded as Encoded,
    decode as decode,
    encode as encode,
    pack as pack,
    unpack as unpack,
)
from .cuda import DeviceUnavailable as DeviceUnavailable
from .errors import (
    ChannelAborted as ChannelAborted,
    ChannelClosed as ChannelClosed,
    ChannelError as ChannelError,
    ChannelStalled as ChannelStalled,
    ChannelTimeout as ChannelTimeout,
    CommError as CommError,
    DecodeError as DecodeError,
    IpcError as IpcError,
    LayoutError as LayoutError,
    NoTransport as NoTransport,
    NotTrusted as NotTrusted,
    PeerLeft as PeerLeft,
    PeerLost as PeerLost,
    PeerNameTaken as PeerNameTaken,
    PeerTimeout as PeerTimeout,
    PoolFull as PoolFull,
    TornStream as TornStream,
    UnsupportedValueError as UnsupportedValueError,
    WeightMismatchError as WeightMismatchError,
    WeightTimeout as WeightTimeout,
)
from .memory import copy_into as copy_into
from .peers import Peer as Peer
from .pool import (
    PoolAddress as PoolAddress,
    PoolStats as PoolStats,
    SharedPool as SharedPool,
)
from .records import (
    modules_of as modules_of,
    record as record,
)
from .remote import (
    ChannelServer as ChannelServer,
    ServerAddress as ServerAddress,
)
