"""A version that is sent by reference, until its tensors are about to change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ReferencedTensors:
    """Tensors that senders read bucket by bucket; between buckets the tensors may be replaced by copies.

    Args:
        num_readers: readers that must call `release` before the tensors are not needed any more.
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
        """One reader is done."""
        with self._changed:
            self._num_readers -= 1
            if not self._num_readers:
                self._tensors = {}

    def finish_reads(self) -> None:
        """Returns when the referenced tensors are not read any more; copies them if some reader still needs them. It
        only waits for buckets that are being packed. Can be called from any thread, and repeatedly."""
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
