"""What changed between two versions of a buffer, bit for bit: one optimizer step leaves most bfloat16 weights alone.

    encoder = DeltaEncoder(bucket.nbytes, element_bytes=2)
    content = encoder.encode(bucket)              # None: send the bucket itself
    ...
    apply_delta(held, content)                    # where the version before is held

Elements are compared as bits, so that NaN payloads and -0.0 arrive too. Each run of 4096 elements is what takes the
fewest bytes: nothing, positions with values, a bitmap with values, or all elements. csrc/include/rlinf/comm/delta.h has
the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm import _C
from rlinf_comm.errors import DecodeError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Bytes = npt.NDArray[np.uint8]
    BytesLike = bytes | bytearray | memoryview | npt.NDArray[np.uint8] | torch.Tensor

ELEMENT_BYTES = (1, 2, 4, 8)


class DeltaEncoder:
    """Encodes what a receiver lacks. Keeps a copy of what it holds, which is all the memory that this takes.

    One thread at a time. Other Python threads run meanwhile.

    Args:
        num_bytes: The size of the buffer; a multiple of `element_bytes`.
        element_bytes: 1, 2, 4 or 8: in which units it is compared. Those of the dtype are best, any are right.

    Raises:
        ValueError: other sizes.
    """

    def __init__(self, num_bytes: int, element_bytes: int) -> None:
        if element_bytes not in ELEMENT_BYTES:
            raise ValueError(f"element_bytes={element_bytes}; allowed: {', '.join(map(str, ELEMENT_BYTES))}")
        if num_bytes < 0 or num_bytes % element_bytes:
            raise ValueError(f"num_bytes={num_bytes} is not a number of whole elements of {element_bytes} bytes")
        self.num_bytes = num_bytes
        self.element_bytes = element_bytes
        self.num_changed: int | None = None
        """Elements that the last `encode` found different; None when there was nothing to compare with."""
        self._snapshot: Bytes | None = None

    def encode(self, tensor: torch.Tensor) -> Bytes | None:
        """What takes the version before to this one; from then on this one is what the receiver is taken to hold.

        Args:
            tensor: `num_bytes` in any shape and dtype, contiguous, on the CPU. It must not change meanwhile.

        Returns:
            uint8[fewer than num_bytes], or None: send the buffer itself, because the delta would not be smaller or
            there is no version before.

        Raises:
            ValueError: a tensor of another size, on a device, or not contiguous.
        """
        pointer = self._checked(tensor)
        if self._snapshot is None:
            self.num_changed = None
            self.keep(tensor)
            return None
        out = np.empty(self.num_bytes, np.uint8)  # pages that are not written take no memory
        delta_bytes, self.num_changed = _C.encode_delta(
            pointer, self._snapshot.ctypes.data, self.num_bytes, self.element_bytes, out.ctypes.data
        )
        return out[:delta_bytes] if delta_bytes else None

    def keep(self, tensor: torch.Tensor) -> None:
        """The receiver gets this version whole. Raises ValueError as `encode`."""
        self._checked(tensor)
        if self._snapshot is None:
            self._snapshot = np.empty(self.num_bytes, np.uint8)
        np.copyto(self._snapshot, bytes_of_tensor(tensor))

    def reset(self) -> None:
        """Nobody knows what the receiver holds: the next `encode` returns None."""
        self._snapshot = None

    def _checked(self, tensor: torch.Tensor) -> int:
        pointer, num_bytes = _memory_of(tensor)
        if num_bytes != self.num_bytes:
            raise ValueError(f"a tensor of {num_bytes} bytes for the encoder of {self.num_bytes} bytes")
        return pointer


def apply_delta(tensor: torch.Tensor, delta: BytesLike) -> None:
    """Takes `tensor` in place to the version that a DeltaEncoder compared with the one it holds.

    All of the delta is checked before the first write: a refused one leaves the tensor as it was. Whether the tensor
    holds the right version is the caller's to know; a digest of the result tells.

    Args:
        tensor: Contiguous, on the CPU, of the encoder's size.
        delta: What `encode` returned. It must not change meanwhile.

    Raises:
        DecodeError: not a delta of a buffer of this size, or a torn one.
        ValueError: the tensor is on a device or not contiguous, or the delta is not contiguous.
    """
    pointer, num_bytes = _memory_of(tensor)
    content = _content_of(delta)
    fault = _C.apply_delta(pointer, num_bytes, content.ctypes.data, content.nbytes)
    if fault is not None:
        raise DecodeError(f"a delta of {content.nbytes} bytes for a buffer of {num_bytes} bytes is refused: {fault}")


def bytes_of_tensor(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor, as uint8[num_bytes]; not a copy."""
    import torch

    _memory_of(tensor)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _content_of(delta: BytesLike) -> Bytes:
    import torch

    if isinstance(delta, torch.Tensor):
        return bytes_of_tensor(delta)
    view = memoryview(delta)  # pyright: ignore[reportArgumentType] - an array has a buffer, says Python 3.12 only
    if not view.c_contiguous:
        raise ValueError("the delta is not contiguous")
    return np.frombuffer(view, np.uint8)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes)"""
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"a tensor on {tensor.device} with strides {tensor.stride()}; contiguous CPU memory is needed")
    return tensor.data_ptr(), tensor.nbytes
