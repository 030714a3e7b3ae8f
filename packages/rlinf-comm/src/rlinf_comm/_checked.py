"""Values of a checked channel: with a digest, made of what the producer has put and compared by the consumer."""

from __future__ import annotations

from typing import Any

from rlinf_comm import _C, codec
from rlinf_comm.errors import DecodeError


def sealed(value: Any) -> tuple[bytes, Any]:
    """The value with its digest. Raises UnsupportedValueError as codec.encode."""
    encoded = codec.encode(value)
    # Encoded again, since some values arrive as others of the same bytes: an array of CuPy's as a tensor.
    return _digest(codec.encode(codec.decode(encoded.header, encoded.buffers))), value


def unsealed(value: tuple[bytes, Any], place: str) -> Any:
    """The value of sealed(). Raises DecodeError when it is not what was put."""
    expected, content = value
    if _digest(codec.encode(content)) != expected:
        raise DecodeError(
            f"{place}: its bytes are not those that were put: they have changed on their way, or since then"
        )
    return content


def _digest(encoded: codec.Encoded) -> bytes:
    return _C.bytes_digest((encoded.header, *encoded.buffers))
