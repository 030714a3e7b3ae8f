"""Where an env worker's pictures lie: in a pool that the policy reads by reference, whichever process it is.

Without one the channel copies what it is given, and a simulator's process has its pictures copied into its parent's
first. What a picture costs on its way with a pool and without stands in docs/environments.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_comm import PoolFull, SharedPool

_CAPACITY_BYTES = 2 << 30
"""Addresses, not memory, which is used as far as pictures reach. A group has at most three batches and as many true
last ones alive (what its policy looks at, what is on its way, what is being drawn), for 64 environments with two
pictures of 224 x 224 together 116 MB."""


class PicturePool:
    """A `rlinf_envs.core.picture_memory.PictureMemory`, made by the process that shows pictures.

    Args:
        note: told, in a sentence and once, that there was no room, so that pictures are copied twice.
    """

    def __init__(self, note: Callable[[str], None], *, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._note = note
        self._pool = SharedPool.create("pictures", capacity_bytes=capacity_bytes)
        self._was_full = False
        first = self._pool.empty(1, torch.uint8)
        self._address = first.data_ptr() - _offset_in_file(first)

    @property
    def fd(self) -> int:
        return self._pool.address.fd

    def empty(self, shape: Sequence[int]) -> Tensor | None:
        try:
            return self._pool.empty(shape, torch.uint8, timeout_s=0.0)
        except (PoolFull, ValueError) as error:  # too little is free, or more is asked for than there is
            if not self._was_full:
                self._was_full = True
                self._note(f"pictures are copied into their channel, as their pool has no room: {error}")
            return None

    def offset(self, tensor: Tensor) -> int:
        return tensor.data_ptr() - self._address


def _offset_in_file(tensor: Tensor) -> int:
    """Bytes from the beginning of the file, which is mapped where the tensor lies, to the tensor."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, _, file_offset, *_ = line.split()
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if first <= tensor.data_ptr() < end:
                return int(file_offset, 16) + tensor.data_ptr() - first
    raise AssertionError(f"the tensor at {tensor.data_ptr():#x} lies in no mapping of this process")
