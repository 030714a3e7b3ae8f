"""Tensors of one process that others read where they lie.

torch moves the storages under the tensors into shared memory, in place: whatever else is a view of them stays one, and
their values do not change. Other processes of the same user map that memory through the descriptors of the process that
has it, and cannot write it.
"""

from __future__ import annotations

import mmap
import os
import resource
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.errors import PeerLost

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

EMPTY_FD = -1
"""In the place of a tensor without elements."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where a tensor begins."""

    fd: int
    """A descriptor of the process that shares."""
    inode: int
    """Tells the file from another one that was given the same descriptor later."""
    offset_bytes: int


class LastingStorages:
    """Recognizes tensors whose memory is that of the last time: what is made anew each time would be shared each
    time."""

    def __init__(self) -> None:
        self._storages: list[int] = []
        self._references: list[StorageWeakRef] = []

    def are_known(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the storages are those of the last call, and have been there since."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storages = [tensor.untyped_storage() for tensor in tensors]
        identities = [storage._cdata for storage in storages]
        # Where one has gone, another may have its identity.
        if identities == self._storages and not any(reference.expired() for reference in self._references):
            return True
        self._storages, self._references = identities, [StorageWeakRef(storage) for storage in storages]
        return False


class SharedTensors:
    """Host tensors that are lent again and again."""

    def __init__(self) -> None:
        self._lasting = LastingStorages()
        self._pointers: list[int] = []
        self._places: list[SharedPlace] | None = None
        """Where the tensors with those pointers are."""
        self.num_moved = 0
        """Storages that were moved into shared memory so far."""

    def places_of(self, tensors: Sequence[torch.Tensor]) -> list[SharedPlace] | None:
        """Where others find the tensors, whose memory moves there at most once.

        Returns:
            None where they cannot be lent: they have not the memory of those that were asked for the last time, one is
            not contiguous or pinned for a GPU, half of the descriptors that this process may open are taken, or
            /dev/shm has no room.
        """
        are_known = self._lasting.are_known(tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if not are_known:
            self._places = None
        elif self._places is None or pointers != self._pointers:
            new = {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_shared()}
            self._places = _share(tensors, len(new))
            self.num_moved += 0 if self._places is None else len(new)
            pointers = [tensor.data_ptr() for tensor in tensors]
        self._pointers = pointers
        return self._places


def _share(tensors: Sequence[torch.Tensor], num_new: int) -> list[SharedPlace] | None:
    """Moves what is not in shared memory yet. Where that ends early, some tensors have moved, which changes nothing for
    who uses them.

    Args:
        num_new: storages that have to move.
    """
    if any(tensor.is_pinned() or not tensor.is_contiguous() for tensor in tensors):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    if len(os.listdir("/proc/self/fd")) + num_new > limit:
        _warn(f"{num_new} descriptors are needed, and half of those that it may open are {limit} (ulimit -n)")
        return None
    try:
        return [_place_of(tensor) for tensor in tensors]
    except RuntimeError as error:  # torch could not allocate the shared memory
        _warn(f"{error}; /dev/shm needs room for them")
        return None


def _warn(reason: str) -> None:
    """Once for a process and reason, as Python's filter has it."""
    warnings.warn(f"weights go through the store and not straight from this process: {reason}", stacklevel=4)


def _place_of(tensor: torch.Tensor) -> SharedPlace:
    if not tensor.numel():
        return SharedPlace(EMPTY_FD, 0, 0)
    storage = tensor.untyped_storage()
    fd, _ = storage._share_fd_cpu_()
    return SharedPlace(fd, os.fstat(fd).st_ino, tensor.data_ptr() - storage.data_ptr())


class Mappings:
    """Memory that one other process shares, mapped for reading; of each file once."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int, int], tuple[mmap.mmap, np.ndarray]] = {}
        self.num_maps = self.num_unmaps = 0
        """Files that were mapped, and given up, so far."""

    def addresses_of(self, pid: int, places: Iterable[SharedPlace]) -> np.ndarray:
        """[places] int64; 0 for a tensor without elements. What was mapped before and is not asked for is given up.

        Raises: PeerLost where the process, or what it shared, is gone.
        """
        before, self._mapped = self._mapped, {}
        addresses = []
        for place in places:
            if place.fd == EMPTY_FD:
                addresses.append(0)
                continue
            key = (pid, place.fd, place.inode)
            mapping = self._mapped.get(key) or before.pop(key, None)
            if mapping is None:
                mapping = _mapped(pid, place)
                self.num_maps += 1
            self._mapped[key] = mapping
            addresses.append(mapping[1].ctypes.data + place.offset_bytes)
        self.num_unmaps += len(before)
        return np.array(addresses, np.int64)


def _mapped(pid: int, place: SharedPlace) -> tuple[mmap.mmap, np.ndarray]:
    path = f"/proc/{pid}/fd/{place.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"weights in the memory of process {pid}: {path} cannot be opened: {error}") from error
    try:
        stat = os.fstat(fd)
        if stat.st_ino != place.inode:
            raise PeerLost(f"weights in the memory of process {pid}: {path} is not what it shared any more")
        memory = mmap.mmap(fd, stat.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return memory, np.frombuffer(memory, np.uint8)
