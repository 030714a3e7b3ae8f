"""rlinf_comm.SharedPool in one process: what crosses by reference, what it costs the pool, and what is refused."""

import enum
import gc
import os
import pickle
import struct
import threading

import numpy as np
import pytest
import torch

from rlinf_comm import (
    _C,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    DecodeError,
    PeerLost,
    PoolFull,
    SharedPool,
    codec,
    pack,
    record,
    records,
    unpack,
)
from rlinf_comm.channel import native_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn]
CAPACITY = 1 << 20


@pytest.fixture
def pool():
    return SharedPool.create("tested", capacity_bytes=CAPACITY)


@pytest.fixture
def channel():
    return Channel.create("carrier", capacity_bytes=100_000)


def take(channel):
    return channel.take(timeout_s=60)[0].value


def is_same_memory(a, b):
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pooled_tensor_arrives_as_the_same_memory(dtype, pool, channel):
    tensor = pool.empty((3, 5), dtype)
    tensor.view(torch.uint8).copy_(torch.arange(tensor.nbytes).view(3, -1) % 2)
    channel.put({"t": tensor, "n": 1})
    back = take(channel)["t"]
    assert is_same_memory(back, tensor)
    back.view(torch.uint8)[2, -1] = 7
    assert tensor.view(torch.uint8)[2, -1] == 7


VIEWS = {
    "row": lambda t: t[2],
    "element": lambda t: t[1, 2, 3],
    "transposed": lambda t: t.permute(2, 0, 1),
    "every other": lambda t: t[::2, 1:, 1::3],
    "expanded": lambda t: t[:1, :1].expand(4, 5, 6),
    "diagonal": lambda t: t[0].diagonal(),
    "windows": lambda t: t.view(-1).unfold(0, 4, 1),
    "other dtype": lambda t: t.view(torch.int16)[..., 1:],
    "last element": lambda t: t.view(-1)[-1:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_view_crosses_as_the_same_memory(name, pool, channel):
    whole = pool.empty((4, 5, 6)).copy_(torch.arange(120.0).view(4, 5, 6))
    view = VIEWS[name](whole)
    expected = view.clone()
    channel.put(view)
    del whole
    back = take(channel)
    assert is_same_memory(back, view) and back.equal(expected)
    del view
    gc.collect()
    assert back.equal(expected) and pool.stats().num_blocks == 1
    del back
    assert pool.stats().num_blocks == 0


def test_a_tensor_as_large_as_the_pool_crosses_a_small_channel(pool, channel):
    tensor = pool.empty(CAPACITY, torch.uint8).fill_(3)
    channel.put(tensor)
    assert channel.stats().num_bytes < 300
    assert is_same_memory(take(channel), tensor)


def test_the_same_block_is_held_once_by_a_process_and_once_by_each_reference_in_a_channel(pool, channel):
    tensor = pool.empty(100)
    assert (pool.stats().num_holds, pool.stats().used_bytes) == (1, 448)
    channel.put([tensor, tensor[50:]])
    stats = pool.stats()
    assert (stats.num_holds, stats.num_blocks, stats.used_bytes) == (3, 1, 448)
    assert stats.held_bytes == {os.getpid(): 448} and stats.in_flight_bytes == {os.getpid(): 896}
    del tensor
    gc.collect()
    assert (pool.stats().num_holds, pool.stats().held_bytes) == (2, {})
    first, second = take(channel)
    assert (pool.stats().num_holds, pool.stats().in_flight_bytes) == (1, {})
    del first
    assert pool.stats().used_bytes == 448
    del second
    assert (pool.stats().used_bytes, pool.stats().num_holds, pool.stats().largest_hole_bytes) == (0, 0, CAPACITY)


def test_what_is_not_a_plain_view_of_a_pool_is_copied_as_ever(pool, channel):
    pooled = pool.empty(8).copy_(torch.arange(8.0))
    values = {
        "array": pooled.numpy(),
        "gradient": pooled.clone().requires_grad_(),
        "pooled gradient": pooled.detach().requires_grad_(),
        "negated": pool.empty(4, torch.complex64).fill_(1j).conj().imag,
        "own": torch.arange(8.0),
        "none": pool.empty(0),
    }
    for name, value in values.items():
        channel.put(value)
        back = take(channel)
        expected = np.asarray(value.detach().resolve_neg() if isinstance(value, torch.Tensor) else value)
        assert np.array_equal(np.asarray(back), expected), name
        if back.size if isinstance(back, np.ndarray) else back.numel():
            address = back.ctypes.data if isinstance(back, np.ndarray) else back.data_ptr()
            assert not pooled.data_ptr() <= address < pooled.data_ptr() + CAPACITY, name


def test_pack_and_encode_copy(pool):
    tensor = pool.empty(8).fill_(1)
    encoded = codec.encode(tensor)
    assert [buffer.nbytes for buffer in encoded.buffers] == [32]
    back = unpack(pack(tensor))
    tensor.fill_(2)
    assert back.eq(1).all()
    assert pool.stats().num_holds == 1


def test_without_the_exchange_interface_of_torch_it_is_the_same(monkeypatch, pool, channel):
    """As on torch before 2.10: views are described and built by Python."""
    from test_comm_codec_native import without_dlpack

    monkeypatch.setattr(codec, "NATIVE", without_dlpack)
    tensor = pool.empty((4, 6), torch.bfloat16).fill_(1)
    for view in (tensor, tensor.t()[1:, ::2], tensor[3, 5]):
        channel.put(view)
        assert is_same_memory(take(channel), view)
    channel.put(tensor.float().requires_grad_())
    assert take(channel).eq(1).all()
    del view
    tensor = tensor.clone()
    assert pool.stats().num_blocks == 0


def test_copy_of(pool):
    for source in (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).t(), torch.ones(3, requires_grad=True)):
        copy = pool.copy_of(source)
        assert copy.equal(source) and copy.is_contiguous() and not copy.requires_grad
        copy += 1
        assert not copy.equal(source)
    assert pool.stats().num_blocks == 1


def test_threads_of_one_process_share_blocks(pool):
    """Four at once receive and drop references to the same block: it is held once, and never given back too early."""
    channel = Channel.create("threads", capacity_items=64)
    wrong = []

    def consume():
        while items := channel.take(max_items=2):
            for item in items:
                if not item.value.eq(7).all():
                    wrong.append(item.sequence)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        tensor = pool.empty(256).fill_(7)
        for _ in range(4):
            channel.put(tensor)
        del tensor
    channel.close()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert pool.stats().num_holds == 0


# --- what fails leaves nothing ----------------------------------------------------------------------------------------


def test_a_put_that_fails_leaves_no_hold(pool):
    tensor = pool.empty(10)
    full = Channel.create("full", capacity_items=1)
    full.put(0)
    with pytest.raises(ChannelTimeout):
        full.put(tensor, timeout_s=0.05)
    closed = Channel.create("closed")
    closed.close()
    with pytest.raises(ChannelClosed):
        closed.put(tensor)
    with pytest.raises(ValueError, match="does not fit"):
        Channel.create("tiny", capacity_bytes=64).put([tensor] * 10)

    assert pool.stats().num_holds == 1
    del tensor
    gc.collect()
    assert pool.stats().num_blocks == 0


def test_items_lost_with_their_channel_give_back_their_memory(pool):
    channel = Channel.create("dropped")
    for _ in range(3):
        channel.put(pool.empty(CAPACITY // 4, torch.uint8))
    assert pool.stats().num_blocks == 3
    del channel
    assert pool.empty(CAPACITY, torch.uint8, timeout_s=0.0).numel() == CAPACITY


@record
class Vanishing(enum.Enum):
    A = 1


def test_an_item_that_does_not_decode_gives_back_its_memory(monkeypatch, pool, channel):
    channel.put([pool.empty(CAPACITY, torch.uint8), Vanishing.A])
    monkeypatch.delitem(records._classes, f"{__name__}:Vanishing")
    codec.NATIVE.forget_classes()
    with pytest.raises(DecodeError, match="Vanishing"):
        channel.take()
    assert pool.empty(CAPACITY, torch.uint8, timeout_s=0.0).numel() == CAPACITY


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_full_pool_says_who_holds_what(pool, channel):
    tensor = pool.empty(CAPACITY // 2, torch.uint8)
    channel.put(pool.empty(CAPACITY // 4, torch.uint8))
    with pytest.raises(PoolFull) as caught:
        pool.empty((CAPACITY // 2,), torch.uint8, timeout_s=0.01)
    text = str(caught.value)
    for part in (
        "pool 'tested': no room for 524288 bytes within timeout_s=0.01",
        f"{CAPACITY // 4} of capacity_bytes={CAPACITY} are free",
        "the largest hole has 262144",
        f"process {os.getpid()} holds 524288 bytes",
        f"262144 bytes of process {os.getpid()} wait in channels",
        "create a larger pool",
    ):
        assert part in text
    del tensor
    assert pool.empty((CAPACITY // 2,), torch.uint8, timeout_s=0.0).numel() == CAPACITY // 2


def test_a_full_table_of_holds_is_an_error_that_leaves_nothing(pool):
    tensor = pool.empty(1)
    max_holds = pool.stats().max_holds
    roomy = Channel.create("roomy", capacity_bytes=1 << 20)
    with pytest.raises(PoolFull, match=f"all {max_holds} holds are in use"):
        roomy.put([tensor] * max_holds)
    assert (pool.stats().num_holds, roomy.stats().num_items, roomy.stats().num_held_items) == (1, 0, 0)
    roomy.put([tensor] * (max_holds - 2))
    with pytest.raises(PoolFull, match=f"{max_holds - 1} of {max_holds} holds"):
        pool.empty(1, timeout_s=0.0)
    assert len(take(roomy)) == max_holds - 2  # a full table keeps nobody from taking
    assert pool.stats().num_holds == 1


def header_in(channel):
    """The encoded structure of the one item in a channel, which is a tensor in a pool: a view of the channel's memory.
    Its length is read from the block's header of 128 bytes."""
    memory = memoryview(_C.Segment.open(native_of(channel).address()))
    start = bytes(memory).index(bytes([0x92, 0x90, 0x9C, 13]))
    (num_bytes,) = struct.unpack_from("<Q", memory, start - 24)
    return memory[start : start + num_bytes]


def test_a_reference_that_is_used_twice_is_refused(pool):
    """Somebody who kept the bytes of an item could put such a reference."""
    channel = Channel.create("kept", capacity_bytes=10_000)
    channel.put(pool.empty(4).fill_(5))
    header = bytes(header_in(channel))
    first = take(channel)
    assert first.tolist() == [5.0] * 4
    again = Channel.create("again", capacity_bytes=10_000)
    again.put(pool.empty(4))
    header_in(again)[:] = header
    with pytest.raises(
        PeerLost, match=r"channel 'again', item 0: .*pool 'tested' of process \d+: its memory was given"
    ):
        again.take()
    channel.put(first)
    assert take(channel).tolist() == [5.0] * 4


def test_a_reference_that_came_another_way_than_through_a_channel_is_refused(pool):
    channel = Channel.create("sniffed", capacity_bytes=10_000)
    channel.put(pool.empty(4).fill_(5))
    with pytest.raises(DecodeError, match="a tensor in a pool, which crosses channels alone"):
        codec.decode(bytes(header_in(channel)), ())
    assert take(channel).tolist() == [5.0] * 4


def test_references_that_lead_outside_of_their_block_are_refused(pool):
    channel = Channel.create("forged", capacity_bytes=10_000)
    for wrong in range(1, 4):
        channel.put(pool.empty(16).fill_(5))
        header = header_in(channel)
        # At the end: byte offset, dtype, number of dimensions, length, stride
        assert bytes(header[-3:]) == bytes([1, 16, 1]) and header[-12] == 0
        header[{1: -1, 2: -2, 3: -12}[wrong]] = 17
        with pytest.raises(DecodeError, match=r"64 bytes|47 bytes"):
            channel.take()
        channel = Channel.create("forged", capacity_bytes=10_000)
    assert pool.stats().num_blocks == 0


def test_mistakes_are_named(pool):
    with pytest.raises(ValueError, match=r"'tested'.*shape \(2, -1\)"):
        pool.empty((2, -1))
    with pytest.raises(ValueError, match=f"needs {CAPACITY * 4} bytes, more than capacity_bytes={CAPACITY}"):
        pool.empty(CAPACITY)
    with pytest.raises(ValueError, match="capacity_bytes=0"):
        SharedPool.create("nothing", capacity_bytes=0)
    with pytest.raises(ValueError, match="timeout_s"):
        pool.empty(1, timeout_s=-1.0)
    with pytest.raises(TypeError, match=r"pool.address"):
        pickle.dumps(pool)
