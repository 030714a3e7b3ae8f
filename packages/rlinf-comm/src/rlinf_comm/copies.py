"""Tables of strided copies: what a reshard plan tells an executor to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COPY_DTYPES = ("float32", "bfloat16", "float16", "bytes1", "bytes2", "bytes4", "bytes8", "bytes16")
"""Element types by code. The first three are cast to each other; the others are moved as plain bytes."""


@dataclass(frozen=True, eq=False)
class CopyTable:
    """n strided copies of up to D dimensions between buffers, outermost dimension first.

    Unused dimensions come first, with length 1 and stride 0.
    """

    src_buffer: NDArray[np.int32]
    """[n]"""
    dst_buffer: NDArray[np.int32]
    """[n]"""
    src_offset: NDArray[np.int64]
    """[n] bytes"""
    dst_offset: NDArray[np.int64]
    """[n] bytes"""
    lengths: NDArray[np.int64]
    """[n, D] elements"""
    src_strides: NDArray[np.int64]
    """[n, D] bytes"""
    dst_strides: NDArray[np.int64]
    """[n, D] bytes"""
    src_dtype: NDArray[np.uint8]
    """[n] index into COPY_DTYPES"""
    dst_dtype: NDArray[np.uint8]
    """[n]"""
    src_bytes: NDArray[np.int64] | None = None
    """[number of source buffers] their sizes, used or not: what an executor expects addresses for."""
    dst_bytes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.src_buffer)
