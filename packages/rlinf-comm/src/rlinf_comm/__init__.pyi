from ._C import (
    __version__ as __version__,
)
from ._C import (
    has_cuda_kernels as has_cuda_kernels,
)
from ._C import (
    num_cuda_devices as num_cuda_devices,
)
from .channel import (
    Channel as Channel,
)
from .channel import (
    ChannelAddress as ChannelAddress,
)
from .channel import (
    ChannelStats as ChannelStats,
)
from .channel import (
    Item as Item,
)
from .codec import (
    Encoded as Encoded,
)
from .codec import (
    decode as decode,
)
from .codec import (
    encode as encode,
)
from .codec import (
    pack as pack,
)
from .codec import (
    unpack as unpack,
)
from .cuda import DeviceUnavailable as DeviceUnavailable
from .errors import (
    ChannelAborted as ChannelAborted,
)
from .errors import (
    ChannelClosed as ChannelClosed,
)
from .errors import (
    ChannelError as ChannelError,
)
from .errors import (
    ChannelStalled as ChannelStalled,
)
from .errors import (
    ChannelTimeout as ChannelTimeout,
)
from .errors import (
    CommError as CommError,
)
from .errors import (
    DecodeError as DecodeError,
)
from .errors import (
    IpcError as IpcError,
)
from .errors import (
    LayoutError as LayoutError,
)
from .errors import (
    NoTransport as NoTransport,
)
from .errors import (
    NotTrusted as NotTrusted,
)
from .errors import (
    PeerLeft as PeerLeft,
)
from .errors import (
    PeerLost as PeerLost,
)
from .errors import (
    PeerNameTaken as PeerNameTaken,
)
from .errors import (
    PeerTimeout as PeerTimeout,
)
from .errors import (
    PoolFull as PoolFull,
)
from .errors import (
    TornStream as TornStream,
)
from .errors import (
    UnsupportedValueError as UnsupportedValueError,
)
from .errors import (
    WeightMismatchError as WeightMismatchError,
)
from .errors import (
    WeightTimeout as WeightTimeout,
)
from .memory import copy_into as copy_into
from .peers import Peer as Peer
from .pool import (
    PoolAddress as PoolAddress,
)
from .pool import (
    PoolStats as PoolStats,
)
from .pool import (
    SharedPool as SharedPool,
)
from .records import (
    modules_of as modules_of,
)
from .records import (
    record as record,
)
from .remote import (
    ChannelServer as ChannelServer,
)
from .remote import (
    ServerAddress as ServerAddress,
)
