"""Tensors in memory that several processes share; a channel hands them over by reference, in constant time.

    pool = SharedPool.create("rollouts", capacity_bytes=4 << 30, prefault=True)
    tokens = pool.empty((64, 8192), dtype=torch.int32)
    ...                                                       # write into it
    channel.put({"tokens": tokens})                           # nothing is copied, however large it is
    (item,) = channel.take()                                  # anywhere: item.value["tokens"] is the same memory

BY REFERENCE means: both sides see the same bytes. What the sender writes after `put` shows in the receiver's tensor,
and the other way round. Write first, put, and then leave the tensor alone, or put `tokens.clone()`.

Any view of such a tensor crosses like that, also one that is not contiguous, and what was received can be put into the
next channel. The memory is given back when the last tensor of the last process is gone; processes that die give back
theirs (csrc/comm/pool.cc). Tensors with a gradient, and numpy arrays, are copied into the channel as always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rlinf_comm import _C, codec
from rlinf_comm._arrays import dtype_name
from rlinf_comm.errors import PeerLost, PoolFull
from rlinf_comm.memory import copy_into
from rlinf_comm.records import record

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 60.0
"""Long enough for consumers that are merely slow; a pool that nobody gives anything back to must not hang for ever."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAddress:
    """How a process of the same machine and user opens a pool. Valid while the creating SharedPool object lives."""

    name: str
    creator_pid: int
    creator_start_ticks: int
    """Start time of that process, which tells it from a later one with its pid."""
    fd: int
    """The pool's memory, as a file descriptor of the creator, which hands it to peers."""
    nonce: int
    """Tells the memory from another that was given the same descriptor later."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """A pool at one instant."""

    capacity_bytes: int
    used_bytes: int
    """Bytes in tensors that somebody holds, each rounded up to 64 bytes."""
    largest_hole_bytes: int
    """Bytes of the largest tensor that would fit now."""
    num_blocks: int
    """Tensors as they were allocated; views of one count once."""
    num_holds: int
    """One for each block and process that looks at it, and one for each reference in a channel."""
    max_holds: int
    held_bytes: Mapping[int, int]
    """Process id -> bytes that it looks at. What two processes look at counts for both."""
    in_flight_bytes: Mapping[int, int]
    """Process id -> bytes that it has put into channels and nobody has taken."""

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


class SharedPool:
    """Shared memory of a fixed size for tensors that cross channels by reference.

    The pool lives as long as the process that created it. Its object may be dropped while tensors of it are alive.
    After the creator's end those that others look at stay valid; a reference that is still on its way ends in PeerLost
    for a process that does not have the pool mapped. A sender that ends after its put does no harm: the item stays.

    A tensor of the pool is in use for as long as a name leads to it: in `for value in channel`, the last value lives
    until the next one has come, unless the loop ends with `del value`.
    """

    def __init__(self, native: _C.Pool, address: PoolAddress) -> None:
        """Private: use SharedPool.create or SharedPool.open."""
        self._native = native
        self._address = address

    @classmethod
    def create(cls, name: str, *, capacity_bytes: int, prefault: bool = False) -> SharedPool:
        """A new pool of this process.

        Args:
            name: Appears in messages and in /proc/<pid>/maps.
            capacity_bytes: The most bytes that all tensors may take at once. Memory is only used as far as tensors have
                reached.
            prefault: Take all of it now: the first write to a fresh page costs about ten times a later one.
        """
        if capacity_bytes < 1:
            raise ValueError(f"pool {name!r}: capacity_bytes={capacity_bytes}; at least 1")
        native = _C.Pool.create(name, capacity_bytes)
        if prefault:
            native.prefault()
        pid, start_ticks, fd, nonce = native.address()
        address = PoolAddress(name=name, creator_pid=pid, creator_start_ticks=start_ticks, fd=fd, nonce=nonce)
        return cls(native, address)

    @classmethod
    def open(cls, address: PoolAddress) -> SharedPool:
        """The pool at `address`, to allocate from it too. Receivers need not: taking a tensor opens its pool.

        Raises:
            PeerLost: the creating process is gone or has dropped its pool.
        """
        try:
            native = _C.Pool.open((address.creator_pid, address.creator_start_ticks, address.fd, address.nonce))
        except ValueError as error:
            raise PeerLost(f"pool {address.name!r}: {error}") from error
        return cls(native, address)

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def address(self) -> PoolAddress:
        return self._address

    def __repr__(self) -> str:
        return f"<SharedPool {self.name!r} of process {self._address.creator_pid}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"pool {self.name!r} is not picklable; send pool.address, and SharedPool.open it over there")

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        timeout_s: float | None = _TIMEOUT_S,
    ) -> torch.Tensor:
        """A contiguous tensor in the pool; its contents are whatever was there before.

        Args:
            shape: Lengths; an int for one dimension.
            dtype: float32 when not given.
            timeout_s: Seconds to wait for others to give memory back; 0.0 does not wait, None waits without a limit.

        Raises:
            PoolFull: no room in time; says who holds how much.
            ValueError: larger than the pool, or a negative length.
        """
        import torch

        dtype = torch.float32 if dtype is None else dtype
        lengths = [shape] if isinstance(shape, int) else [int(length) for length in shape]
        name = dtype_name(dtype)
        if name is None:
            raise ValueError(f"pool {self.name!r}: dtype {dtype} cannot cross a channel")
        if any(length < 0 for length in lengths):
            raise ValueError(f"pool {self.name!r}: shape {tuple(lengths)}; lengths must not be negative")
        num_bytes = math.prod(lengths) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(lengths, dtype=dtype)
        if num_bytes > self._native.capacity_bytes:
            raise ValueError(
                f"pool {self.name!r}: a {dtype} tensor of shape {tuple(lengths)} needs {num_bytes} bytes, more than "
                f"capacity_bytes={self._native.capacity_bytes}; create a larger pool"
            )
        allocated = self._native.allocate(codec.NATIVE, name, lengths, num_bytes, timeout_s)
        if isinstance(allocated, int):
            raise self._full(num_bytes, timeout_s)
        return allocated

    def copy_of(self, tensor: torch.Tensor, *, timeout_s: float | None = _TIMEOUT_S) -> torch.Tensor:
        """A contiguous copy in the pool, of a tensor on any device. Raises as `empty` does."""
        import torch

        copy = self.empty(tensor.shape, tensor.dtype, timeout_s=timeout_s)
        with torch.no_grad():
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
                copy_into(copy, tensor.detach())  # past the caches where it is large
            else:
                copy.copy_(tensor)
        return copy

    def stats(self) -> PoolStats:
        """Drops what dead processes and lost items held, and counts the rest."""
        self._native.reclaim()
        return PoolStats(**self._native.counts())

    def _full(self, num_bytes: int, timeout_s: float | None) -> PoolFull:
        stats = PoolStats(**self._native.counts())
        holders = [f"process {pid} holds {held} bytes" for pid, held in sorted(stats.held_bytes.items())]
        holders += [
            f"{sent} bytes of process {pid} wait in channels" for pid, sent in sorted(stats.in_flight_bytes.items())
        ]
        return PoolFull(
            f"pool {self.name!r}: no room for {num_bytes} bytes within timeout_s={timeout_s}: "
            f"{stats.free_bytes} of capacity_bytes={stats.capacity_bytes} are free, the largest hole has "
            f"{stats.largest_hole_bytes}, {stats.num_holds} of {stats.max_holds} holds are in use; "
            f"{', '.join(holders)}; drop tensors and their views, take the items, or create a larger pool"
        )
