"""The kernel that copies and digests in one pass, run on the CPU with its own index arithmetic: what it writes is what
the copy kernel writes, and its digests are those of the CPU's program over what was written."""

import numpy as np
import pytest
import torch
from comm_digests import digest_by_program
from comm_properties import holds_for
from hypothesis import strategies as st

from rlinf_comm import _C
from rlinf_comm.copies import CODE_BYTES, CopyTable, DigestTable, StridedBox, StridedCopy
from rlinf_comm.cuda import CudaCopyProgram

ALIGNMENT = 64
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float16"),
          ("bfloat16", "float16"), ("float16", "bfloat16"), *((name, name) for name in (
              "bfloat16", "float32", "bytes1", "bytes2", "bytes4", "bytes8", "bytes16"))]  # fmt: skip
SIZE_OF = dict(zip(("float32", "bfloat16", "float16", "bytes1", "bytes2", "bytes4", "bytes8", "bytes16"),
                   CODE_BYTES.tolist(), strict=True))  # fmt: skip
TOGETHER = np.dtype(
    [("copy", "V48"), ("num_columns", "<u4"), ("num_rows", "<u4"), ("copy_rest", "V8"), ("rest", "V24")]
)  # DigestedCopyTile


def aligned(num_bytes):
    """Zeroed bytes at a multiple of ALIGNMENT."""
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


class DigestedCopy:
    """A box of a tensor of `full` elements that begins at `start`, copied from bytes `source` to bytes `target`."""

    def __init__(self, dtypes, shape, full, start, src, dst):
        (self.source, src_offset, src_strides), (self.target, self.offset, self.strides) = src, dst
        self.shape, self.size = shape, SIZE_OF[dtypes[1]]
        self.index_strides = [int(np.prod(full[axis + 1 :])) for axis in range(len(full))]
        self.first_index = int(np.dot(start, self.index_strides))
        copy = StridedCopy(
            src_buffer=0, src_offset=src_offset, src_strides=src_strides, src_dtype=dtypes[0],
            dst_buffer=0, dst_offset=self.offset, dst_strides=self.strides, dst_dtype=dtypes[1], shape=shape,
        )  # fmt: skip
        box = StridedBox(
            buffer=0, shape=shape, strides=src_strides, dtype=dtypes[0], as_dtype=dtypes[1], digest=0,
            first_index=self.first_index, index_strides=self.index_strides,
        )  # fmt: skip
        self.program = CudaCopyProgram(CopyTable.of([copy]), DigestTable.of([box]))
        self.pointers = [self.source.ctypes.data], [self.target.ctypes.data]
        self.tiles = self.program.lower_with_digests(*self.pointers)

    def run(self):
        ((low, high),) = _C.run_digested_copy_tiles_on_cpu(*self.tiles, 1)
        return low | high << 64

    def copied_alone(self):
        """What the target holds after a copy without digests; it is blank again afterwards."""
        _C.run_copy_tiles_on_cpu(self.program.lower(*self.pointers))
        copied = self.target.copy()
        self.target[:] = 0
        return copied

    def expected_digest(self):
        address = self.target.ctypes.data + self.offset
        return digest_by_program(address, self.size, self.first_index, self.shape, self.strides, self.index_strides)


def draw_place(data, shape, size):
    """(bytes, offset, strides in bytes) of a box whose axes lie in some order, with gaps."""
    order = data.draw(st.sampled_from([range(len(shape)), data.draw(st.permutations(range(len(shape))))]))
    extent, strides = size, [0] * len(shape)
    for axis in reversed(list(order)):
        strides[axis] = extent
        extent = extent * shape[axis] + data.draw(st.sampled_from([0, 0, 0, 16, 8 * size, size]))
    offset = data.draw(st.sampled_from([0, 0, 16, 8, 1, 2])) * size
    return aligned(extent + offset), offset, strides


@holds_for(st.data(), num=150, num_slow=3000)
def test_a_pass_writes_and_digests_what_two_do(data):
    dtypes = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 64, 257, 1100]), min_size=1, max_size=3))
    while np.prod(shape) > 30_000:
        shape.pop()
    start = [data.draw(st.sampled_from([0, 0, 1, 8])) for _ in shape]
    full = [n + first + data.draw(st.sampled_from([0, 0, 3, 8])) for n, first in zip(shape, start, strict=True)]
    src, dst = (draw_place(data, shape, SIZE_OF[dtype]) for dtype in dtypes)
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    src[0][:] = random.integers(0, 256, len(src[0]))
    copy = DigestedCopy(dtypes, shape, full, start, src, dst)
    expected = copy.copied_alone()
    digest = copy.run()
    np.testing.assert_array_equal(copy.target, expected)
    assert digest == copy.expected_digest()


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bytes1", "bytes1")], ids=str)
@pytest.mark.parametrize("full", [[64, 1024], [96, 2048]], ids=["a whole tensor", "a shard of both dimensions"])
def test_weights_are_copied_and_digested_by_the_one_kernel_alone(dtypes, full):
    shape, sizes = [64, 1024], [SIZE_OF[dtype] for dtype in dtypes]
    places = [(aligned(size * 64 * 1024), 0, [1024 * size, size]) for size in sizes]
    copy = DigestedCopy(dtypes, shape, full, [full[0] - 64, full[1] - 1024], *places)
    together, copies, digests = copy.tiles
    assert (len(copies), len(digests)) == (0, 0)
    tiles = np.frombuffer(together, TOGETHER)
    units = int((tiles["num_columns"].astype(np.int64) * tiles["num_rows"]).sum())
    assert units * (8 if dtypes[0] != dtypes[1] else 16 // sizes[1]) == 64 * 1024
    assert copy.run() == copy.expected_digest()


def test_only_the_ends_of_a_run_that_begins_within_a_word_are_digested_apart():
    place = (aligned(2 * 5000), 2 * 5, [2])
    copy = DigestedCopy(("bytes2", "bytes2"), [4001], [9000], [5], (*place,), (aligned(2 * 5000), 2 * 5, [2]))
    copy.source[:] = np.arange(len(copy.source)) % 251
    together, copies, _ = copy.tiles
    tiles = np.frombuffer(together, TOGETHER)
    assert int(tiles["num_columns"].sum()) == (4001 - 3) // 8, "all but 3 elements at the start and 6 at the end"
    assert 0 < len(copies) <= 2 * 64
    assert copy.run() == copy.expected_digest()


def test_boxes_of_one_tensor_add_up():
    """Two halves of a tensor, which share one digest."""
    tensor = torch.randn(32, 512, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(32, 512, dtype=torch.bfloat16)
    copies, boxes = [], []
    for half in range(2):
        strides = {"src_strides": [2048, 4], "dst_strides": [1024, 2]}
        copies.append(
            StridedCopy(src_buffer=0, dst_buffer=0, shape=[16, 512], src_dtype="float32", dst_dtype="bfloat16",
                        src_offset=half * 16 * 2048, dst_offset=half * 16 * 1024, **strides)
        )  # fmt: skip
        boxes.append(
            StridedBox(buffer=0, shape=[16, 512], strides=[2048, 4], dtype="float32", as_dtype="bfloat16", digest=0,
                       first_index=half * 16 * 512, index_strides=[512, 1])
        )  # fmt: skip
    program = CudaCopyProgram(CopyTable.of(copies), DigestTable.of(boxes))
    tiles = program.lower_with_digests([tensor.data_ptr()], [target.data_ptr()])
    ((low, high),) = _C.run_digested_copy_tiles_on_cpu(*tiles, 1)
    assert torch.equal(target, tensor.bfloat16())
    assert low | high << 64 == digest_by_program(target.data_ptr(), 2, 0, [32, 512], [1024, 2], [512, 1])


def test_digests_of_other_boxes_are_refused():
    copy = StridedCopy(src_buffer=0, dst_buffer=0, shape=[4], src_strides=[2], dst_strides=[2], src_dtype="bytes2",
                       dst_dtype="bytes2")  # fmt: skip
    box = StridedBox(buffer=0, shape=[5], strides=[2], dtype="bytes2", digest=0, first_index=0, index_strides=[1])
    with pytest.raises(ValueError, match="row i of the digests must be the box of copy i"):
        CudaCopyProgram(CopyTable.of([copy]), DigestTable.of([box]))
