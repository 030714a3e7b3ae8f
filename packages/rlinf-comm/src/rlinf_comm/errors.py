"""All errors of this package. One tree: `except CommError` catches everything that rlinf_comm raises on purpose.

Plain mistakes in a call (a negative timeout, an item larger than the channel) are `ValueError`, as everywhere in
Python. Names without "Error" say what happened to the channel or peer, not that somebody erred.
"""

from __future__ import annotations


class CommError(Exception):
    """Base of all errors below."""


class ChannelError(CommError):
    """Base of the errors of one channel."""


class ChannelClosed(ChannelError):
    """A put on a channel that all its producers have closed."""


class ChannelAborted(ChannelError):
    """Somebody gave up on the channel; the text is the reason they gave."""


class ChannelTimeout(ChannelError):
    """A put or take did not finish within its `timeout_s`."""


class ChannelStalled(ChannelError):
    """A take waits for more items than the channel has room for, while a producer waits for that room."""


class PeerLost(CommError):
    """The process on the other side is gone, or the shared memory that it created.

    `pids` are the processes that died while they used a channel; empty where one could not be opened.
    """

    def __init__(self, message: str, *, pids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pids = pids


class UnsupportedValueError(CommError, TypeError):
    """A value that cannot cross a process border; the text names its place in the item."""


class DecodeError(CommError):
    """Received bytes that are no encoded value, or that name a class which this process cannot build."""


class TornStream(DecodeError):
    """Bytes between two values are not what the protocol says: there is no going on with this connection."""


class LayoutError(CommError, ValueError):
    """Layouts or tensors that do not fit each other; the text names the tensor."""


class WeightMismatchError(CommError):
    """The weights at hand are not the weights asked for.

    `tensors` names those that differ or are missing, sorted; empty when only the version is wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        tensors: tuple[str, ...] = (),
        expected_version: int | None = None,
        found_version: int | None = None,
    ) -> None:
        super().__init__(message)
        self.tensors = tensors
        self.expected_version = expected_version
        self.found_version = found_version


class WeightTimeout(WeightMismatchError):
    """The version asked for did not arrive, or the peers did not take the one before, within `timeout_s`."""


class PoolFull(CommError):
    """A shared pool had no room within `timeout_s`; the text says who holds how much of it."""


class PeerLeft(PeerLost):
    """The peer on the other side has closed its connections on purpose."""


class PeerTimeout(CommError, TimeoutError):
    """A send, receive or connect between peers did not finish within its `timeout_s`."""


class NotTrusted(CommError):
    """Another process is not of this job, or this one has no secret to show that it is; says how to give it one."""


class PeerNameTaken(CommError, ValueError):
    """Another living peer has this name."""


class NoTransport(CommError):
    """No transport works between two peers; the text gives the reason of each."""


class IpcError(CommError):
    """Device memory that cannot be shared between two processes; the text says why."""
