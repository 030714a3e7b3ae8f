"""Memory of pictures: a pool from which any process reads by reference.

Without a pool each channel copies them, and those of a simulator process are first copied into its parent.
docs/environments.md has the cost of a simulator's picture with and without the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_comm import PoolFull, SharedPool
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture

_CAPACITY_BYTES = 2 << 30
"""Size of the address range; memory is used only as far as pictures reach. A group has at most three batches alive (one
that its policy reads, one in transit, one that is being rendered) and as many batches of final observations: together
116 MB for 64 environments with two pictures of 224 x 224."""


class PicturePool:
    """A `rlinf_envs.core.picture_memory.PictureMemory`, created by the process that renders pictures, or that makes
    prompts with some.

    Args:
        note: called once, with a sentence, when the pool is full and pictures are copied twice.
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

    def place(self, picture: ProcessedPicture) -> ProcessedPicture:
        """The same picture in the pool, as far as it fits."""
        return replace(picture, arguments={name: self.place_tensor(one) for name, one in picture.arguments.items()})

    def place_all(self, pictures: Pictures) -> Pictures:
        """`place` for those of a sequence."""
        return replace(pictures, pictures=tuple(map(self.place, pictures.pictures)))

    def place_tensor(self, tensor: Tensor) -> Tensor:
        """The same tensor in the pool, if it fits."""
        return tensor if (place := self.empty(tensor.shape, tensor.dtype)) is None else place.copy_(tensor)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor | None:
        try:
            return self._pool.empty(shape, dtype, timeout_s=0.0)
        except (PoolFull, ValueError) as error:  # too little is free, or the request exceeds the whole pool
            if not self._was_full:
                self._was_full = True
                self._note(f"pictures are copied into their channel, because their pool is full: {error}")
            return None

    def offset(self, tensor: Tensor) -> int:
        return tensor.data_ptr() - self._address


def _offset_in_file(tensor: Tensor) -> int:
    """Offset of the tensor, in bytes, in the file that is mapped at its address."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, _, file_offset, *_ = line.split()
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if first <= tensor.data_ptr() < end:
                return int(file_offset, 16) + tensor.data_ptr() - first
    raise AssertionError(f"the tensor at {tensor.data_ptr():#x} lies in no mapping of this process")
