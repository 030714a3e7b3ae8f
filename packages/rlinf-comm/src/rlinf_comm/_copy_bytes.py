"""A copy table as bytes: a header with version and hash, then one column after another, little-endian."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf_comm.errors import DecodeError

_MAGIC = b"RLCP"
_VERSION = 1
_HEADER = struct.Struct("<4sI16s")  # magic, version, hash of what follows
_COLUMN_HEADER = struct.Struct(
    "<qq"
)  # rows, and columns or -1 where there is one dimension; -1, -1 for a missing array
_COLUMN_DTYPES = {"src_buffer": "<i4", "dst_buffer": "<i4", "src_dtype": "u1", "dst_dtype": "u1"}  # others: "<i8"


def columns_to_bytes(columns: Mapping[str, Any]) -> bytes:
    """The columns in their order; None for a missing one."""
    parts = []
    for name, array in columns.items():
        if array is None:
            parts.append(_COLUMN_HEADER.pack(-1, -1))
            continue
        parts.append(_COLUMN_HEADER.pack(len(array), array.shape[1] if array.ndim == 2 else -1))
        parts.append(array.astype(_COLUMN_DTYPES.get(name, "<i8"), copy=False).tobytes())
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, _VERSION, _digest_of(body)) + body


def hash_of(data: bytes) -> str:
    """The hash that stands in the header, hexadecimal."""
    return _HEADER.unpack_from(data)[2].hex()


def columns_from(names: Sequence[str], data: bytes) -> dict[str, Any]:
    """The columns that `columns_to_bytes` wrote under these names; missing ones are left out.

    Raises:
        DecodeError: other bytes, another version, damaged or cut off.
    """
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise DecodeError(f"{len(data)} bytes that are no copy table: they do not begin with {_MAGIC!r}")
    _, version, digest = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise DecodeError(f"a copy table of version {version}; this rlinf-comm reads version {_VERSION}")
    body = data[_HEADER.size :]
    if _digest_of(body) != digest:
        raise DecodeError(f"a copy table of {len(data)} bytes that were damaged or cut off: their hash does not agree")
    columns: dict[str, Any] = {}
    at = 0
    for name in names:
        rows, width = _COLUMN_HEADER.unpack_from(body, at)
        at += _COLUMN_HEADER.size
        if rows >= 0:
            dtype = np.dtype(_COLUMN_DTYPES.get(name, "<i8"))
            count = rows if width < 0 else rows * width
            array = np.frombuffer(body[at : at + count * dtype.itemsize], dtype)
            columns[name] = array if width < 0 else array.reshape(rows, width)
            at += array.nbytes
    return columns


def _digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
