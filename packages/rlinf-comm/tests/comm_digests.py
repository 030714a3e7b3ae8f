"""The digest of one box at an address, by the CPU's program: what the device's tiles are held against."""

import numpy as np

from rlinf_comm.copies import DigestProgram, DigestTable, StridedBox


def digest_by_program(address, element_bytes, first_index, shape, memory_strides, index_strides):
    box = StridedBox(
        buffer=0,
        shape=shape,
        strides=memory_strides,
        dtype=f"bytes{element_bytes}",
        digest=0,
        first_index=first_index,
        index_strides=index_strides,
    )
    return DigestProgram(DigestTable.of([box])).run(np.array([address], np.int64))[0]
