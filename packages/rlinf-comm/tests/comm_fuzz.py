"""Mutated bytes for everything that reads what a stranger may have sent: values, deltas and the stream of values.

    python comm_fuzz.py --inputs 1000000        # tools/fuzz.sh runs it with sanitizers under it

An input passes when it is taken, or refused by the error that is meant for it; when nothing was imported, opened or
started meanwhile; and when no more memory was taken at any time than 4 times its bytes and 1 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import enum
import json
import pathlib
import random
import struct
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from comm_mutations import mutated

from rlinf_comm import DecodeError, codec, record
from rlinf_comm.errors import TornStream
from rlinf_comm.weights.stream.delta import DeltaEncoder, apply_delta
from rlinf_comm.wire import values as frames

MAX_TIMES, MAX_MORE_BYTES = 4, 1 << 20
_WATCHED = ("import", "exec", "compile", "open", "os.system", "subprocess.Popen", "os.exec", "socket.connect")


@record
class Role(enum.Enum):
    ACTOR = "actor"
    ROLLOUT = 2


@record
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@record
@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    tokens: Any
    text: str = ""


@record
class Checked(msgspec.Struct):
    """Its own code raises what would end a process."""

    x: Any

    def __post_init__(self) -> None:
        if self.x == 1:
            raise SystemExit(1)
        if self.x == 2:
            raise MemoryError
        if self.x == 3:
            raise SyntaxError("no")


VALUES: list[Any] = [
    None, [1, -5, 2**40, 2**70, -(2**200), 1.5, True, "text", "ünï ☃ 🙂", b"\x00\xff", ()],
    {"a": [{"b": ({"c": [[[[]]]]},)}], 5: {2**63: None}},
    [Sample(torch.arange(6.0).view(2, 3), "x"), Sample([Sample(None)], "y"), Checked(0), Checked("x")],
    [Role.ACTOR, Role.ROLLOUT, Access.READ, Access.READ | Access.WRITE, pathlib.Path("/a/b")],
    [torch.zeros(4, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)],
    [np.arange(6, dtype="<u2").reshape(2, 3), np.array(["ab", "c"]), np.zeros((0, 5)), np.float32(2.5)],
    [np.array(["2026-11-22"], "M8[ns]"), np.datetime64("2026"), torch.empty(0, 3), torch.tensor(7)],
    {f"key {index}": [index] * 20 for index in range(40)},
    "long " * 1000,
    list(range(-300, 300)),
]  # fmt: skip
FORGED: list[Any] = [
    [[["os:system"]], [5, 0]],
    [[["subprocess:Popen", "args"]], [5, 0, ["true"]]],
    [[["this:X"]], [7, 0, "x"]],
    [[], [13, 1, 2, 3, 4, 5, "pool", 0, "float32", 1, 4, 1]],
    [[], [11, 0, "V(3,,", 1]],
    [[], [12, "(" * 200, b"1234"]],
    [[], [12, "V1000000000", b"1234"]],
    [[], [10, 0, "float32", 0, 1 << 62]],
    [[], [11, 0, "U99999999", 0]],
    [[[f"{Role.__module__}:Role"]], [7, 0, "NONE"]],
    [[[f"{Access.__module__}:Access"]], [8, 0, -77]],
]
PATTERNS = [
    b"\x92\x01",
    b"\x91",
    b"\x81\xa1k",
    b"\xdd\x00\x00\xff\xff\x01",
    b"\xdf\x00\x00\xff\xff",
    b"\xdc\xff\xff\x03",
]


def nested(numbers: random.Random) -> bytes:
    """A header that claims much, or nests deeply: up to 1 MB, most of them small."""
    num_bytes = 1 << numbers.choice((6, 8, 10, 12, 12, 14, numbers.choice((16, 18, 20))))
    pattern = numbers.choice(PATTERNS)
    if numbers.random() < 0.3:
        pattern = b"\xdd" + struct.pack(">I", max(num_bytes - numbers.randrange(num_bytes), 1)) + b"\x01"
    return b"\x92\x90" + (pattern * (num_bytes // len(pattern) + 1))[:num_bytes]


class Values:
    """Headers with buffers, and packed blobs."""

    name = "value"

    def __init__(self) -> None:
        encoded = [codec.encode(value) for value in VALUES]
        self._seeds = [(each.header, [bytes(buffer) for buffer in each.buffers]) for each in encoded]
        self._seeds += [(msgspec.msgpack.encode(tree), [b"12345678"]) for tree in FORGED]
        self._blobs = [codec.pack(value) for value in VALUES]

    def make(self, numbers: random.Random) -> tuple[int, Callable[[], object]]:
        """(bytes of an input, what reads it)"""
        if numbers.random() < 0.25:
            blob = mutated(numbers.choice(self._blobs), numbers)
            return len(blob), lambda: codec.unpack(blob)
        header, buffers = numbers.choice(self._seeds)
        header = nested(numbers) if numbers.random() < 0.1 else mutated(header, numbers)
        copies = [bytearray(mutated(each, numbers) if numbers.random() < 0.1 else each) for each in buffers]
        return len(header) + sum(map(len, copies)), lambda: codec.decode(header, copies)


class Deltas:
    """Deltas of every chunk kind; one that is refused must leave the buffer as it was."""

    name = "delta"

    def __init__(self) -> None:
        self._seeds: list[tuple[np.ndarray, bytes]] = []
        numbers = np.random.default_rng(0)
        for element_bytes in (1, 2, 4, 8):
            before = numbers.integers(0, 256, 9000 * element_bytes, dtype=np.uint8)
            after = before.copy().reshape(-1, element_bytes)
            after[5] += 1
            after[4096:8192:3] += 1
            after[8192:] += 1
            encoder = DeltaEncoder(before.nbytes, element_bytes)
            encoder.keep(torch.from_numpy(before))
            delta = encoder.encode(torch.from_numpy(after.reshape(-1)))
            assert delta is not None
            self._seeds.append((before, delta.tobytes()))

    def make(self, numbers: random.Random) -> tuple[int, Callable[[], object]]:
        before, delta = numbers.choice(self._seeds)
        head = bytearray(mutated(delta[:34], numbers)) if numbers.random() < 0.5 else bytearray(delta[:34])
        changed = bytes(head) + (delta[34:] if numbers.random() < 0.5 else mutated(delta[34:], numbers))
        held = torch.from_numpy(before.copy())

        def read() -> None:
            try:
                apply_delta(held, changed)
            except DecodeError:
                assert held.equal(torch.from_numpy(before)), "a refused delta has changed the buffer"
                raise

        return len(changed), read


class MemorySocket:
    """Gives a stream's bytes, and then its end."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def recv_into(self, target: memoryview) -> int:
        num_bytes = min(len(target), len(self._left))
        target[:num_bytes] = self._left[:num_bytes]
        self._left = self._left[num_bytes:]
        return num_bytes

    def sendmsg(self, pieces: list[memoryview]) -> int:
        data = b"".join(pieces)
        self._left = memoryview(bytes(self._left) + data)
        return len(data)

    def written(self) -> bytes:
        return bytes(self._left)


class Frames:
    """Streams of two values; half of them with the check sum of the prefix made right again."""

    name = "frame"

    def __init__(self) -> None:
        self._seeds: list[bytes] = []
        for value in ({"a": [1, "text"]}, [torch.arange(40.0), np.zeros(7)]):
            sent = MemorySocket(b"")
            outbox = frames.Outbox(codec.encode(value))
            while outbox:
                outbox.write(sent)  # pyright: ignore[reportArgumentType]
            self._seeds.append(sent.written())

    def make(self, numbers: random.Random) -> tuple[int, Callable[[], object]]:
        size = frames._PREFIX.size
        first = numbers.choice(self._seeds)
        if numbers.random() < 0.5:
            prefix = bytearray(mutated(first[:size], numbers)[:size].ljust(size, b"\0"))
            prefix[-4:] = struct.pack("<I", zlib.crc32(prefix[:-4]))
            first = bytes(prefix) + first[size:]
        data = (first if numbers.random() < 0.3 else mutated(first, numbers)) + numbers.choice(self._seeds)

        def read() -> None:
            reader = frames.StreamReader(MemorySocket(data))  # pyright: ignore[reportArgumentType]
            while not reader.has_ended:
                reader.pump_bytes(1 << 60)
            while reader.ready:
                codec.decode(*reader.ready.popleft())
            if reader.torn is not None:
                raise reader.torn

        return len(data), read


class _Traced:
    """Peaks of memory by tracemalloc: Python's objects and numpy's arrays."""

    def __enter__(self) -> _Traced:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()

    def begin(self) -> None:
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]

    def peak_bytes(self) -> int:
        return tracemalloc.get_traced_memory()[1] - self._before


class _Hooked:
    """Peaks of memory by hooks in the sanitizer's allocator: everything (tools/fuzz_allocations.cc)."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.peak_bytes.restype = ctypes.c_int64

    def __enter__(self) -> _Hooked:
        assert self._library.install() == 1, "the sanitizer takes no hooks"
        return self

    def __exit__(self, *_: object) -> None:
        return

    def begin(self) -> None:
        self._library.begin()

    def peak_bytes(self) -> int:
        return self._library.peak_bytes()


def fuzz(num_inputs: int, seed: int, allocations: str | None = None) -> dict[str, Any]:
    """Runs so many inputs. AssertionError, with the seed that repeats it, for the first that does not pass."""
    targets = [Values(), Values(), Values(), Deltas(), Frames()]
    noticed: list[str] = []
    is_watching = False

    def watch(event: str, _: Any) -> None:
        if is_watching and event in _WATCHED:
            noticed.append(event)

    sys.addaudithook(watch)
    counts: Counter[str] = Counter()
    fullest, start_s = 0.0, time.monotonic()
    memory = _Hooked(allocations) if allocations else _Traced()
    with memory:
        for index in range(num_inputs):
            numbers = random.Random(seed + index)
            target = targets[index % len(targets)]
            num_bytes, read = target.make(numbers)
            where = f"input {index} with --seed {seed}, a {target.name} of {num_bytes} bytes"
            memory.begin()
            is_watching = index >= 5000 or index >= num_inputs // 2  # by then what is imported late has been
            outcome = "taken"
            try:
                read()
            except (DecodeError, TornStream):
                outcome = "refused"
            except BaseException as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            finally:
                is_watching = False
            peak_bytes, limit = memory.peak_bytes(), MAX_TIMES * num_bytes + MAX_MORE_BYTES
            assert peak_bytes <= limit, f"{where}: took {peak_bytes} bytes of memory, and {limit} are allowed"
            assert not noticed, f"{where}: {noticed}"
            fullest = max(fullest, peak_bytes / limit)
            counts[f"{target.name}s {outcome}"] += 1
    return {
        "num_inputs": num_inputs,
        "seed": seed,
        "counts": dict(sorted(counts.items())),
        "largest_share_of_the_memory_limit": round(fullest, 3),
        "seconds": round(time.monotonic() - start_s, 1),
        "sanitized": allocations is not None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allocations", help="the shared library with hooks of the sanitizer's allocator")
    arguments = parser.parse_args()
    print(json.dumps(fuzz(arguments.inputs, arguments.seed, arguments.allocations), indent=1))
