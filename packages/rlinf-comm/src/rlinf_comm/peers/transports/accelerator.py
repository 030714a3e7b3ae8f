"""What the transports of device memory need of torch and CUDA. Tests put host memory in its place.

A pair's tensors arrive on the device that is current in the receiver when the two meet; a sender may send from any.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlinf_comm import _arrays
from rlinf_comm.errors import IpcError, UnsupportedValueError
from rlinf_comm.ipc.arena import DeviceMemory, opened_arenas, tensor_over
from rlinf_comm.ipc.driver import Driver, load_driver
from rlinf_comm.ipc.opened import OpenedArenas
from rlinf_comm.ipc.transport import Facts, facts_of
from rlinf_comm.peers.transports.base import Unusable

if TYPE_CHECKING:
    import torch

STAGED = "tensors in device memory go through host memory"
"""Ends the messages that say why tensors in device memory do not go directly."""


class Accelerator(Protocol):
    """One device of this process. Streams and marks are its own kind; a stream has `query()`."""

    driver: Driver
    device: int
    arenas: OpenedArenas
    """The arenas of other processes that are open in this one."""

    def facts(self) -> Facts: ...

    def holds(self, value: Any) -> bool:
        """Whether `value` is an array in device memory, torch's or another's, that the codec would not refuse."""
        ...

    def as_tensor(self, array: Any) -> torch.Tensor:
        """The same elements as a torch tensor without gradient, of the same memory where that is possible."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def tensor_over(
        self, memory: DeviceMemory, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor: ...

    def make_current(self) -> None:
        """Makes the device current for the calling thread."""
        ...

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def mark(self) -> Any:
        """Returns a mark of what is on the current stream by now."""
        ...

    def wait_for_mark(self, stream: Any, mark: Any) -> None:
        """Work that is put on `stream` from now on runs after the mark."""
        ...

    def working_on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which `stream` is current; it waits for the previous stream, which waits for it at the end."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Waits on the host. Does not raise."""
        ...


def plain_tensor(array: Any) -> torch.Tensor:
    """Does what Accelerator.as_tensor promises. Raises UnsupportedValueError when torch cannot take the array."""
    try:
        return _arrays.tensor_of(array).detach().resolve_conj().resolve_neg()
    except _arrays.NotEncodable as error:
        raise UnsupportedValueError(str(error)) from None


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copies into `target`, of the same dtype, and returns it: all bits, also of a bool that is neither 0 nor 1."""
    import torch

    if source.dtype is torch.bool:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.copy_(source)
    return target


class CudaAccelerator:
    """The current CUDA device of torch."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.arenas = opened_arenas(driver)

    @classmethod
    def open(cls) -> CudaAccelerator:
        """Looks, and starts nothing: a process that does not use a device gets no context on one.

        Raises:
            Unusable: this process has not used a device; says so.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            raise Unusable(f"this process has not used a CUDA device (torch.cuda.init() before it meets); {STAGED}")
        try:
            return cls(load_driver(), torch.cuda.current_device())
        except IpcError as error:
            raise Unusable(f"{error}; {STAGED}") from error

    def facts(self) -> Facts:
        return facts_of(self.driver, self.device)

    def holds(self, value: Any) -> bool:
        return _arrays.is_on_cuda(value) and (
            not isinstance(value, _arrays.tensor_types()) or _arrays.has_plain_bytes(value)
        )

    def as_tensor(self, array: Any) -> torch.Tensor:
        return plain_tensor(array)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{self.device}")

    def tensor_over(
        self, memory: DeviceMemory, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return tensor_over(memory, (last + 1) * dtype.itemsize, shape, strides, dtype, self.device)

    def make_current(self) -> None:
        import torch

        torch.cuda.set_device(self.device)

    def new_stream(self) -> Any:
        import torch

        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Any:
        import torch

        return torch.cuda.current_stream(self.device)

    def mark(self) -> Any:
        return self.current_stream().record_event()

    def wait_for_mark(self, stream: Any, mark: Any) -> None:
        stream.wait_event(mark)

    @contextlib.contextmanager
    def working_on(self, stream: Any) -> Iterator[None]:
        import torch

        before = self.current_stream()
        stream.wait_stream(before)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                before.wait_stream(stream)

    def synchronize(self, stream: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a broken context has nothing that runs
            stream.synchronize()
