"""Turns values into bytes and back without pickle: structure as MessagePack, tensors and arrays beside it.

    encode(value) -> Encoded(header, buffers)        decode(header, buffers) -> value
    pack(value) -> bytes                             unpack(blob) -> value

`encode` copies no contiguous tensor and `decode` copies none at all: the tensors it returns are views of the buffers.

What crosses, and comes back as the same type: None, bool, int (of any size), float (all bits), str, bytes, list,
tuple, dict with str or int keys, Enum and Flag members, pathlib.Path, dataclasses, msgspec.Struct, numpy arrays and
scalars, torch tensors of every dtype and shape. What a view or a subclass adds does not cross: strides (the copy is
row-major), `requires_grad`, Parameter (arrives as a Tensor). Arrays of other libraries that have DLPack or
__cuda_array_interface__ (CuPy's, JAX's) arrive as torch tensors, which cupy.from_dlpack(tensor) takes without a copy. A
tensor on a device goes through host memory and arrives there, since the receiver may not see that device;
rlinf_comm.weights.device carries weights in device memory. Dataclasses are rebuilt from their fields, and
their `__post_init__` does not run again.

A class crosses by the name under which both sides have registered it (rlinf_comm.records). Nothing is imported, and no
other class is built. A header is checked as a whole before anything is made of it: all lengths, and the depth of
nesting, which is MAX_DEPTH containers at most in either direction. What is refused there has taken no memory. What
passes takes that of its Python objects, less than 100 bytes for each byte of the header: a dict of one entry is 3 bytes
of a header and 233 of memory, a list of large integers 13 times its header. Tensors and arrays lie in the buffers.

Wire form. header = msgpack([classes, root]); a scalar stands for itself, a map for a dict, and every other node is an
array whose first element is a tag (csrc/python/codec.h). Classes are listed once per item with the names of their
fields. The walk over a value is native; _lowering.py and _lifting.py tell it about classes and rare values.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf_comm import _C, _arrays, _lifting, _lowering, records
from rlinf_comm._arrays import NotEncodable
from rlinf_comm._refusal import located
from rlinf_comm.errors import DecodeError, PeerLost, UnsupportedValueError


def _decode_error(error: BaseException, place: str) -> Exception:
    """What to raise after `error`, met in the item `place`."""
    prefix = f"{place}: " if place else ""
    if isinstance(error, DecodeError):
        wrapped = DecodeError(f"{prefix}{error}")
    elif isinstance(error, PeerLost):
        wrapped = PeerLost(f"{prefix}{error}")
    else:  # also SystemExit and MemoryError: the bytes of a stranger end no process
        wrapped = DecodeError(f"{prefix}not an encoded value: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


NATIVE = _C.Codec(
    refused=NotEncodable,
    describe_class=_lowering.describe_class,
    describe_tensor=_arrays.describe_tensor,
    describe_array=_arrays.describe_array,
    find_class=_lifting.find_class,
    lift=_lifting.lift,
    build_tensor=_arrays.build_tensor,
    ndarray=np.ndarray,
    find_dtype=_arrays.find_numpy_dtype,
    torch_bridge=_arrays.torch_bridge,
    decode_error=_decode_error,
    describe_view=_arrays.describe_view,
    build_view=_arrays.build_view,
    peer_lost=PeerLost,
)
records.when_replaced(NATIVE.forget_classes)

MAX_DEPTH: int = _C.MAX_DEPTH
"""Containers (lists, tuples, dicts, records) inside each other in one value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A value in two parts."""

    header: bytes
    """The structure, with a place for each tensor."""
    buffers: tuple[memoryview, ...]
    """Row-major bytes of each tensor and array; they keep the memory alive."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the header and all buffers together."""
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def encode(value: Any) -> Encoded:
    """Splits a value into its structure and the bytes of its tensors.

    Raises:
        UnsupportedValueError: some part of it cannot cross; names the place, `samples[3].scorer: a function ...`.
    """
    try:
        return Encoded(*NATIVE.encode(value))
    except (NotEncodable, UnicodeEncodeError, RecursionError) as error:
        raise refusal(value, error) from None


def refusal(value: Any, error: Exception) -> UnsupportedValueError:
    """What to raise after NATIVE.encode(value) has raised `error`."""
    if isinstance(error, RecursionError):
        return UnsupportedValueError(
            f"value: nested more than {MAX_DEPTH} containers deep, or contains itself; send it in flatter parts"
        )
    return located(value, NATIVE.encode)


def decode(header: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """The value of encode(). Its tensors and arrays are views of `buffers` and keep them alive.

    Args:
        header: Encoded.header.
        buffers: Bytes-like objects with the bytes of Encoded.buffers, aligned as their dtypes need; writable, or the
            tensors are views of memory that must not be written.

    Raises:
        DecodeError: no encoded value, or of a class that is not registered here. Whatever goes wrong while a value is
            rebuilt, in the class's own code too, ends as this error; only Ctrl-C passes.
    """
    return NATIVE.decode(header, buffers)


# --- one blob -------------------------------------------------------------------------------------------------------

_MAGIC = b"rlp1"
_PRELUDE = struct.Struct("<4sIQ")  # magic, number of buffers, bytes of the header
_ALIGNMENT = 64


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT


def pack(value: Any) -> bytes:
    """One self-contained blob, for messages and files. Tensors are copied."""
    encoded = encode(value)
    lengths = struct.pack(f"<{len(encoded.buffers)}Q", *(buffer.nbytes for buffer in encoded.buffers))
    parts: list[bytes | memoryview] = [_PRELUDE.pack(_MAGIC, len(encoded.buffers), len(encoded.header)), lengths]
    parts.append(encoded.header)
    if encoded.buffers:
        parts.append(bytes(_padding(_PRELUDE.size + len(lengths) + len(encoded.header))))
    for buffer in encoded.buffers:
        parts += (buffer, bytes(_padding(buffer.nbytes)))
    return b"".join(parts)


def unpack(blob: bytes | bytearray | memoryview) -> Any:
    """The value of pack(). Tensors are private copies.

    Raises:
        DecodeError: not such a blob, or cut short.
    """
    view = memoryview(blob).cast("B")
    try:
        magic, num_buffers, header_bytes = _PRELUDE.unpack_from(view)
        lengths = struct.unpack_from(f"<{num_buffers}Q", view, _PRELUDE.size)
    except struct.error as error:
        raise DecodeError(f"not a packed value: {error}") from error
    if magic != _MAGIC:
        raise DecodeError(f"not a packed value: starts with {magic!r} instead of {_MAGIC!r}")
    start = _PRELUDE.size + 8 * num_buffers
    header = view[start : start + header_bytes]
    start += header_bytes
    body_start = start + (_padding(start) if num_buffers else 0)
    body_bytes = sum(length + _padding(length) for length in lengths)
    if len(view) != body_start + body_bytes:
        raise DecodeError(f"a packed value of {body_start + body_bytes} bytes, but {len(view)} bytes are here")
    if not num_buffers:
        return decode(header, ())
    body = _aligned_bytes(body_bytes).data
    body[:] = view[body_start:]
    buffers, start = [], 0
    for length in lengths:
        buffers.append(body[start : start + length])
        start += length + _padding(length)
    return decode(header, buffers)


def _aligned_bytes(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]
