"""Arrays shared by two processes: the payload between a `SubprocessVector` and one of its children.

The memory is an anonymous file (memfd), which disappears with the last process that maps it, even after a crash.
Messages over a separate connection order reads and writes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlinf_envs.core.protocol import ActionSpec, FieldSpec

_ALIGNMENT_BYTES = 64  # a cache line: no two arrays share one


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """Determines the layout; both processes compute the same offsets from it."""

    num_rows: int
    num_actions: int
    """Largest chunk that fits."""
    action_spec: ActionSpec
    observation_spec: Mapping[str, FieldSpec]

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Returns name -> (shape, dtype) of every array, in memory order."""
        rows, chunk = self.num_rows, (self.num_rows, self.num_actions)
        action_dtype = np.dtype(np.float32 if self.action_spec.kind == "continuous" else np.int64)
        arrays: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "actions": ((*chunk, *self.action_spec.shape), action_dtype),
            "rewards": (chunk, np.dtype(np.float32)),
            "terminated": ((rows,), np.dtype(np.bool_)),
            "truncated": ((rows,), np.dtype(np.bool_)),
            "num_steps": ((rows,), np.dtype(np.int64)),
        }
        for name, field in sorted(self.observation_spec.items()):
            if field.dtype != "text":
                for part in ("observation", "final_observation"):
                    arrays[f"{part}/{name}"] = ((rows, *field.shape), np.dtype(field.dtype))
        return arrays


class SharedBlock:
    """The arrays of one `BlockShape` in the memory behind `fd`, which is enlarged if it is too small."""

    def __init__(self, fd: int, shape: BlockShape) -> None:
        self.shape = shape
        offsets: dict[str, int] = {}
        size = 0
        for name, (array_shape, dtype) in shape.arrays().items():
            offsets[name] = size
            size += -(-int(np.prod(array_shape)) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, max(size, 1))
        self._arrays = {
            name: np.ndarray(array_shape, dtype=dtype, buffer=self._memory, offset=offsets[name])
            for name, (array_shape, dtype) in shape.arrays().items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def fields(self, part: str) -> dict[str, np.ndarray]:
        """Returns the tensor fields of "observation" or "final_observation" by name."""
        return {key.partition("/")[2]: array for key, array in self._arrays.items() if key.startswith(f"{part}/")}
