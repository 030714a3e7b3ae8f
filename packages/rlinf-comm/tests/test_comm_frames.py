"""The stream of values on a TCP connection: flipped bits and absurd lengths end it."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from comm_fuzz import MemorySocket

from rlinf_comm import codec
from rlinf_comm.errors import TornStream
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.wire import values as frames
from rlinf_comm.wire.values import Outbox, StreamReader

NUM_FLIPS = 1000
PREFIX = struct.Struct("<4sIIQI")


class Taking:
    """The sender's socket: keeps what is written, a limited number of bytes at a time."""

    def __init__(self) -> None:
        self.written = bytearray()

    def sendmsg(self, pieces: list[memoryview]) -> int:
        data = b"".join(pieces)[:70_000]
        self.written += data
        return len(data)


def written(*values: object) -> bytearray:
    taking = Taking()
    for value in values:
        outbox = Outbox(codec.encode(value))
        while outbox:
            outbox.write(taking)  # pyright: ignore[reportArgumentType]
    return taking.written


def read(data: bytes) -> StreamReader:
    reader = StreamReader(MemorySocket(data))  # pyright: ignore[reportArgumentType]
    while not reader.has_ended:
        reader.pump_bytes(1 << 60)
    return reader


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(frames, "_CHUNK_BYTES", 20_000)


def test_values_of_several_chunks_arrive(small_chunks):
    values = [{"w": np.arange(9_000.0), "text": "t"}, np.zeros(0), "only a header", np.full(20_000, 7, np.uint8)]
    reader = read(bytes(written(*values)))
    assert reader.torn is None
    assert_bitwise_equal([codec.decode(*reader.take()) for _ in values], values)


@pytest.mark.parametrize("num_elements", [0, 500, 9_000], ids=["header", "one chunk", "chunks"])
def test_each_flipped_bit_is_caught(small_chunks, num_elements):
    value = {"w": np.random.default_rng(0).random(num_elements), "step": 7}
    data = written(value)
    random = np.random.default_rng(1)
    for bit in random.choice(8 * len(data), size=min(NUM_FLIPS, 8 * len(data)), replace=False).tolist():
        data[bit // 8] ^= 1 << bit % 8
        reader = read(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
        assert reader.torn is not None, f"bit {bit} of {8 * len(data)}"
        assert not reader.ready, f"bit {bit} was delivered"
    assert len(read(bytes(data)).ready) == 1


def prefix(num_buffers: int, header_bytes: int, meta: bytes) -> bytes:
    fixed = PREFIX.pack(b"rlv2", 0, num_buffers, header_bytes, zlib.crc32(meta))
    return fixed + struct.pack("<I", zlib.crc32(fixed)) + meta


@pytest.mark.parametrize(
    "data",
    [
        prefix(0, (1 << 64) - 1, b"") + bytes(1000),
        prefix((1 << 32) - 1, 0, b"") + bytes(1000),
        prefix(1, 0, struct.pack("<Q", (1 << 64) - 1)) + bytes(1000),
        prefix(2, 0, struct.pack("<2Q", 1 << 62, 1 << 62)) + bytes(1000),
    ],
    ids=["header", "buffers", "one buffer", "sum"],
)
def test_absurd_lengths_take_no_memory(data):
    read(b"")
    tracemalloc.start()
    try:
        reader = read(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert not reader.ready


@pytest.mark.parametrize(
    "data", [prefix(0, 1 << 62, b""), prefix(1, 0, struct.pack("<Q", 1 << 62))], ids=["header", "buffer"]
)
def test_a_value_larger_than_the_machine_ends_the_stream_at_once(data):
    reader = read(data)
    assert isinstance(reader.torn, TornStream)
    assert f"a value of {1 << 62} bytes; this machine has" in str(reader.torn)


def test_a_cancelled_value_is_not_delivered_and_the_next_is(small_chunks):
    taking = Taking()
    outbox = Outbox(codec.encode(np.zeros(100_000, np.uint8)))
    outbox.write(taking)  # pyright: ignore[reportArgumentType]
    outbox.cancel()
    while outbox:
        outbox.write(taking)  # pyright: ignore[reportArgumentType]
    reader = read(bytes(taking.written + written("next")))
    assert reader.torn is None
    assert [codec.decode(*reader.take()) for _ in range(len(reader.ready))] == ["next"]
