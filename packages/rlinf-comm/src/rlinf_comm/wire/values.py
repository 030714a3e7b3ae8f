"""The stream of values on a TCP connection: what is written, and a reader that can stop at any byte.

    prefix   magic, kind, number of buffers, bytes of the header, check sum of the meta part, check sum of the prefix
    meta     the length of each buffer, then the header of rlinf_comm.codec
    body     the buffers, in chunks of 4 MiB; after each chunk its digest, and one mark: more comes, that was all, or
             cancelled

The marks let a sender that has run out of time take a value back, so that a send happens whole or not at all. The
check sums find a torn or foreign stream. The digest (128 bits, csrc/include/rlinf/comm/digest.h) is made of the
sender's memory and checked in the receiver's: TCP's own check sum of 16 bits is made anew by devices on the way, and
misses what happens inside of them. Sender and receiver digest each chunk while the caches have it.

Memory is taken as bytes come, but for the buffers, which are announced: more than this machine has ends the stream.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections import deque
from collections.abc import Generator, Sequence

from rlinf_comm import _C
from rlinf_comm.codec import Encoded
from rlinf_comm.errors import TornStream
from rlinf_comm.wire.buffers import allocate, chunks

_PREFIX = struct.Struct("<4sIIQII")  # magic, kind, number of buffers, bytes of the header, meta's crc, crc of the rest
_MAGIC = b"rlv2"
_VALUE, _FAREWELL = 0, 1

_MORE, _ALL, _CANCELLED = b"\x2d", b"\xd2", b"\x33"
"""Marks of which any two differ in at least four bits."""
_DIGEST_BYTES = 16
_CHUNK_BYTES = 4 << 20
"""The most that is copied to take a value back; the marks cost nothing beside it."""

_META_STEP_BYTES = 256 << 10
"""The meta part is taken in steps of this size, whatever length it claims to have."""

_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

_VALUE_BYTES = 512
"""What the objects of one waiting value take beside its bytes, so that very many small ones are bounded too."""

_STAGING_BYTES = 64 << 10
"""Smaller pieces are read together, larger ones straight to where they belong."""

_JOIN_BYTES = 16 << 10
"""For values up to this size one copy is cheaper than a list of pieces for the system."""


class Outbox:
    """What is still to be written of one value, as views in order."""

    def __init__(self, encoded: Encoded | None) -> None:
        """`encoded` is None for the farewell."""
        buffers = () if encoded is None else encoded.buffers
        meta = b"" if encoded is None else _lengths(len(buffers)).pack(*map(len, buffers)) + encoded.header
        header_bytes = 0 if encoded is None else len(encoded.header)
        kind = _FAREWELL if encoded is None else _VALUE
        prefix = _PREFIX.pack(_MAGIC, kind, len(buffers), header_bytes, zlib.crc32(meta), 0)[:-4]
        self._pieces: deque[memoryview] = deque((memoryview(prefix + struct.pack("<I", zlib.crc32(prefix)) + meta),))
        """What is still to be written of the present chunk; with the first one, also the value's prefix and header."""
        self._chunks = chunks(buffers, _CHUNK_BYTES)
        self._next = None if encoded is None else next(self._chunks)
        self._mark: memoryview | None = None
        """The last of the pieces, recognized by identity: the byte that says whether more chunks follow."""
        self.has_begun = False
        self._load()
        if sum(map(len, self._pieces)) <= _JOIN_BYTES:
            joined = memoryview(b"".join(self._pieces))
            self._pieces = deque((joined,) if self._mark is None else (joined[:-1], joined[-1:]))
            self._mark = None if self._mark is None else self._pieces[-1]

    def _load(self) -> None:
        """The next chunk, which is digested now, so that it is in the caches when it is written."""
        if self._next is None:
            return
        chunk, self._next = self._next, next(self._chunks, None)
        self._mark = memoryview(_ALL if self._next is None else _MORE)
        self._pieces.extend(chunk)
        self._pieces += (memoryview(_C.bytes_digest(chunk)), self._mark)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def write(self, connected: socket.socket) -> None:
        """Writes once. Raises BlockingIOError when the connection takes nothing now."""
        num_written = connected.sendmsg([self._pieces[i] for i in range(min(len(self._pieces), 256))])
        self.has_begun = self.has_begun or num_written > 0
        while num_written:
            piece = self._pieces.popleft()
            if num_written < len(piece):
                self._pieces.appendleft(piece[num_written:])
                return
            num_written -= len(piece)
        if not self._pieces:
            self._load()

    def cancel(self) -> None:
        """Leaves the rest of this chunk, as a copy, and a mark that takes the value back."""
        rest = bytearray()
        while self._pieces and self._pieces[0] is not self._mark:
            rest += self._pieces.popleft()
        self._pieces = deque((memoryview(bytes(rest + _CANCELLED)),))
        self._next = self._mark = None


def _lengths(num_buffers: int) -> struct.Struct:
    return struct.Struct(f"<{num_buffers}Q")


class StreamReader:
    """Reads what is there, and keeps the values that are complete."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.ready: deque[tuple[bytes, list[memoryview]]] = deque()
        self._ready_bytes = self._coming_bytes = 0
        self.torn: TornStream | None = None
        self.has_ended = False
        """Whether nothing more will come."""
        self.said_farewell = False
        self.progress = "it has sent nothing"
        """How much has come of the value that is on its way, as text for error messages."""
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._staged = self._staging[:0]
        self._parser = self._parse()
        self._target = next(self._parser)

    def take(self) -> tuple[bytes, list[memoryview]]:
        header, buffers = self.ready.popleft()
        self._ready_bytes -= _num_bytes(header, buffers)
        return header, buffers

    def pump_value(self) -> None:
        """Reads until a value is ready, or nothing is there, or the stream ends."""
        while not self.ready and self._step():
            pass

    def pump_bytes(self, enough_bytes: int) -> None:
        """Reads until so much is ready or on its way, or nothing is there, or the stream ends."""
        while self.num_bytes < enough_bytes and self._step():
            pass

    @property
    def num_bytes(self) -> int:
        """Bytes read so far: those of the values that are ready, and of the one that is still coming."""
        return self._ready_bytes + self._coming_bytes

    @property
    def has_staged(self) -> bool:
        """Whether bytes have been read that belong to nothing yet."""
        return bool(self._staged)

    def _step(self) -> bool:
        """Reads once; whether there may be more to read."""
        if self.has_ended:
            return False
        try:
            self.has_ended = not self._read()
        except BlockingIOError:
            return False
        except OSError:
            self.has_ended = True
        except TornStream as error:
            self.torn, self.has_ended = error, True
        except StopIteration:
            self.said_farewell = self.has_ended = True
        return not self.has_ended

    def _read(self) -> int:
        """Moves on by some bytes; 0 at the end of the stream."""
        if self._staged:
            num_bytes = min(len(self._staged), len(self._target))
            self._target[:num_bytes] = self._staged[:num_bytes]
            self._staged = self._staged[num_bytes:]
        elif len(self._target) < _STAGING_BYTES:
            num_bytes = self._socket.recv_into(self._staging)
            self._staged = self._staging[:num_bytes]
            return num_bytes
        else:
            num_bytes = self._socket.recv_into(self._target)
        self._target = self._target[num_bytes:]
        while not self._target and num_bytes:
            self._target = next(self._parser)
        return num_bytes

    def _parse(self) -> Generator[memoryview, None, None]:
        """Yields the memory that the next bytes belong in, and goes on when it is full."""
        while True:
            prefix = bytearray(_PREFIX.size)
            yield memoryview(prefix)
            magic, kind, num_buffers, header_bytes, meta_crc, crc = _PREFIX.unpack(prefix)
            if magic != _MAGIC or crc != zlib.crc32(prefix[:-4]) or kind not in (_VALUE, _FAREWELL):
                raise TornStream(f"the stream of values is torn: a value cannot start with {bytes(prefix)!r}")
            if kind == _FAREWELL:
                return
            _check_fits(8 * num_buffers + header_bytes)
            meta = yield from self._meta(8 * num_buffers + header_bytes)
            if meta_crc != zlib.crc32(meta):
                raise TornStream(f"the stream of values is torn: the check sum of {len(meta)} bytes is wrong")
            buffers = _room_for(_lengths(num_buffers).unpack_from(meta))
            if (yield from self._fill(buffers)):
                header = bytes(memoryview(meta)[8 * num_buffers :])
                self.ready.append((header, buffers))
                self._ready_bytes += _num_bytes(header, buffers)

    def _meta(self, num_bytes: int) -> Generator[memoryview, None, bytearray]:
        meta = bytearray()
        while len(meta) < num_bytes:
            step = bytearray(min(num_bytes - len(meta), _META_STEP_BYTES))
            yield memoryview(step)
            meta += step
            self._coming_bytes = len(meta)
        return meta

    def _fill(self, buffers: list[memoryview]) -> Generator[memoryview, None, bool]:
        """Whether the value was not cancelled."""
        trailer = bytearray(_DIGEST_BYTES + 1)
        mark = b""
        num_bytes, num_read = sum(map(len, buffers)), 0
        for chunk in chunks(buffers, _CHUNK_BYTES):
            self.progress = f"{num_read} of {num_bytes} bytes of a value have come"
            for piece in chunk:
                yield piece
                num_read += len(piece)
                self._coming_bytes = num_read
            yield memoryview(trailer)
            if trailer[:-1] != _C.bytes_digest(chunk):
                raise TornStream(
                    f"bytes were changed on their way: the digest of {sum(map(len, chunk))} bytes of a value is wrong"
                )
            mark = bytes(trailer[-1:])
            if mark not in (_MORE, _ALL):
                break
        self.progress, self._coming_bytes = "it has sent nothing since", 0
        if mark not in (_ALL, _CANCELLED):
            raise TornStream(f"the stream of values is torn: {mark!r} where a value ends")
        return mark == _ALL


def _room_for(lengths: Sequence[int]) -> list[memoryview]:
    """The buffers of a value."""
    _check_fits(sum(lengths))
    try:
        return allocate(lengths)
    except (MemoryError, OSError) as error:
        raise TornStream(f"no memory for a value of {sum(lengths)} bytes") from error


def _check_fits(num_bytes: int) -> None:
    if num_bytes > _MACHINE_BYTES:
        raise TornStream(f"a value of {num_bytes} bytes; this machine has a memory of {_MACHINE_BYTES} bytes")


def _num_bytes(header: bytes, buffers: list[memoryview]) -> int:
    return _VALUE_BYTES + len(header) + sum(map(len, buffers))
