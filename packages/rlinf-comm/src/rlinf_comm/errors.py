"""All errors of this package, in one tree: `except CommError` catches everything that rlinf_comm raises on purpose.

Invalid arguments (a negative timeout, an item larger than the channel) are `ValueError`, as everywhere in Python. Names
without "Error" state what happened to the channel or peer, not a mistake of the caller.
"""

from __future__ import annotations


class CommError(Exception):
    """Base of all errors below."""


class ChannelError(CommError):
    """Base of the errors of one channel."""


class ChannelClosed(ChannelError):
    """A put on a channel that all its producers have closed."""


class ChannelAborted(ChannelError):
    """A process aborted the channel; the message is its reason."""


class ChannelTimeout(ChannelError):
    """A put or take did not finish within its `timeout_s`."""


class ChannelStalled(ChannelError):
    """A take waits for more items than the channel's capacity, while a producer waits for that capacity."""


class PeerLost(CommError):
    """The process on the other side is gone, or the shared memory that it created.

    `pids` are the processes that died while they used a channel; empty if one could not be opened.
    """

    def __init__(self, message: str, *, pids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pids = pids


class UnsupportedValueError(CommError, TypeError):
    """A value that cannot be sent to another process; the message names its place in the item."""


class DecodeError(CommError):
    """Received bytes that are not an encoded value, or that name a class which this process cannot build."""


class TornStream(DecodeError):
    """Bytes between two values violate the protocol; the connection cannot be used any more."""


class LayoutError(CommError, ValueError):
    """Layouts or tensors that do not match; the message names the tensor."""


class WeightMismatchError(CommError):
    """The available weights are not the expected ones.

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
    """The version did not arrive, or the peers did not receive the one before, within `timeout_s`."""


class PoolFull(CommError):
    """A shared pool had no free memory within `timeout_s`; the message says which process holds how much."""


class PeerLeft(PeerLost):
    """The peer on the other side has closed its connections on purpose."""


class PeerTimeout(CommError, TimeoutError):
    """A send, receive or connect between peers did not finish within its `timeout_s`."""


class NotTrusted(CommError):
    """Another process does not belong to this job, or this one has no secret to prove that it does; the message says
    how to provide it."""


class PeerNameTaken(CommError, ValueError):
    """Another living peer has this name."""


class NoTransport(CommError):
    """No transport works between two peers; the message has the reason for each."""


class IpcError(CommError):
    """Device memory that cannot be shared between two processes; the message says why."""
