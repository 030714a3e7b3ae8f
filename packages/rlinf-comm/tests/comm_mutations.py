"""Bytes with a few small changes, of the kinds that find the limits of what reads them."""

from __future__ import annotations

import random
import struct

TOKENS = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x00\x10\x00\x00",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xc1", b"\xc0", b"\x90", b"\x80", b"\xa0",
    b"\xcb" + b"\xff" * 8,
]  # fmt: skip
"""Of MessagePack: lengths beyond what follows, the largest and smallest numbers, nothing."""


def mutated(seed: bytes, numbers: random.Random) -> bytes:
    """A few small changes, of the kinds that find limits."""
    data = bytearray(seed)
    for _ in range(numbers.choice((1, 1, 2, 4))):
        at, kind = numbers.randrange(len(data) + 1), numbers.choice((0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6))
        if kind == 0 and at < len(data):
            data[at] = numbers.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << numbers.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at : at + numbers.randrange(6)] = numbers.choice(TOKENS)
        elif kind == 4:
            end = min(at + numbers.randrange(1, 40), len(data))
            data[at:at] = data[at:end] * numbers.choice((1, 1, 1, 30))
        elif kind == 5:
            del data[at : at + numbers.randrange(1, 9)]
        else:
            data[at : at + 4] = struct.pack(
                numbers.choice("<>") + "I", numbers.choice((0, 1, 255, 1 << 16, 0xFFFFFFFF))
            )
    return bytes(data)
