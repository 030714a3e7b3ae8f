"""A version that is sent from where it lies, until its tensors are about to change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ReferencedTensors:
    """What a sender reads bucket by bucket, between which the tensors may be replaced by copies.

    Args:
        num_readers: that have to say `release` until nobody needs the tensors any more.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], num_readers: int = 1) -> None:
        self._tensors = dict(tensors)
        self._num_readers = num_readers
        self._num_reading = 0
        self._is_settling = self._is_settled = False
        self._changed = threading.Condition()

    @contextmanager
    def reading(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors, which do not change meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_settling)
            self._num_reading += 1
            tensors = self._tensors
        try:
            yield tensors
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def release(self) -> None:
        """One reader has all that it needs."""
        with self._changed:
            self._num_readers -= 1
            if not self._num_readers:
                self._tensors = {}

    def finish_reads(self) -> None:
        """Returns when nobody reads the tensors that were lent, which are copied where somebody still needs them. It
        waits for buckets that are being packed, and for nothing else. From any thread, and again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_settling)
            if self._is_settled:
                return
            self._is_settling = True
            try:
                self._changed.wait_for(lambda: not self._num_reading)
                self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
                self._is_settled = True
            finally:
                self._is_settling = False
                self._changed.notify_all()
