# ruff: noqa: N999 - the module is private, and named so
"""Types of the native module (csrc/python/bindings.cc). Private to this package."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__version__: str

class Outcome(enum.IntEnum):
    DONE = 0
    PENDING = 1
    CLOSED = 2
    ABORTED = 3
    TIMED_OUT = 4
    STALLED = 5

_Address = tuple[int, int, int, int]  # pid, start time in ticks, fd, nonce

@final
class BorrowedBytes:
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Codec:
    def __init__(
        self,
        *,
        refused: type[Exception],
        describe_class: Callable[[type], tuple[int, list[str] | None, tuple[str, ...] | None, Any]],
        describe_tensor: Callable[[Any], tuple[Any, int, int, str]],
        describe_array: Callable[[Any], tuple[Any, int, int, str]],
        find_class: Callable[[str, list[str]], tuple[int, type, Any]],
        lift: Callable[[int, Any, list[Any]], Any],
        build_tensor: Callable[[Any, str, list[int]], Any],
        ndarray: type,
        find_dtype: Callable[[str], Any],
        torch_bridge: Callable[[], tuple[Any, list[tuple[str, Any]]]],
        decode_error: Callable[[Exception, str], Exception],
    ) -> None: ...
    def encode(self, value: Any) -> tuple[bytes, tuple[memoryview, ...]]: ...
    def decode(self, header: Buffer, buffers: Sequence[Any]) -> Any: ...

@final
class Channel:
    @staticmethod
    def create(name: str, capacity_items: int, capacity_bytes: int, num_producers: int) -> Channel: ...
    @staticmethod
    def open(address: _Address) -> Channel: ...
    def prefault(self) -> None: ...
    def address(self) -> _Address: ...
    def put(
        self, codec: Codec, value: Any, key: int, weight: float, policy_version: int, timeout_s: float | None
    ) -> int: ...
    def take(
        self,
        codec: Codec,
        item_class: type,
        max_items: int,
        min_items: int,
        max_weight: float | None,
        keys: Sequence[int] | None,
        timeout_s: float | None,
    ) -> list[Any] | int: ...
    def event_sequence(self, waiting: int, /) -> int: ...
    def wait_for_event(self, waiting: int, seen: int) -> None: ...
    def close_producer(self) -> None: ...
    def reopen(self, num_producers: int) -> None: ...
    def abort(self, reason: str) -> None: ...
    def abort_reason(self) -> bytes: ...
    def counts(self) -> dict[str, Any]: ...
    def _lock_and_leave(self) -> None: ...
    def _reserve_and_leave(self, num_bytes: int) -> Outcome: ...

@final
class PendingPut:
    def __init__(
        self,
        channel: Channel,
        codec: Codec,
        value: Any,
        key: int,
        weight: float,
        policy_version: int,
        timeout_s: float | None,
    ) -> None: ...
    def attempt(self) -> int: ...

@final
class PendingTake:
    def __init__(
        self,
        channel: Channel,
        codec: Codec,
        item_class: type,
        max_items: int,
        min_items: int,
        max_weight: float | None,
        keys: Sequence[int] | None,
        timeout_s: float | None,
    ) -> None: ...
    def attempt(self) -> list[Any] | int: ...

@final
class Segment:
    @staticmethod
    def create(name: str, num_bytes: int) -> Segment: ...
    @staticmethod
    def open(address: _Address) -> Segment: ...
    def address(self) -> _Address: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def pointer(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class SharedWords:
    def __init__(self, segment: Segment, num_words: int) -> None: ...
    @staticmethod
    def bytes_needed(num_words: int) -> int: ...
    def load(self, index: int) -> int: ...
    def store(self, index: int, value: int) -> None: ...
    def notify_all(self) -> None: ...
    def sequence(self) -> int: ...
    def wait(self, seen: int, timeout_s: float) -> None: ...

def copy_bytes(destination: int, source: int, num_bytes: int) -> None: ...
def current_process() -> tuple[int, int]: ...
def is_alive(pid: int, start_ticks: int) -> bool: ...
def copy_box(
    destination: int,
    source: int,
    element_bytes: int,
    shape: Sequence[int],
    destination_strides: Sequence[int],
    source_strides: Sequence[int],
) -> None: ...
def digest_box(
    elements: int,
    element_bytes: int,
    first_index: int,
    shape: Sequence[int],
    memory_strides: Sequence[int],
    index_strides: Sequence[int],
) -> tuple[int, int]: ...
def has_cuda_kernels() -> bool: ...
def num_cuda_devices() -> int: ...

# Copies and digests

@final
class CopyProgram:
    def __init__(self, lengths: npt.NDArray[np.int64], columns: dict[str, Any]) -> None: ...
    def run(
        self,
        src_pointers: npt.NDArray[np.int64],
        dst_pointers: npt.NDArray[np.int64],
        num_threads: int,
        wants_digests: bool,
        instructions: str | None,
    ) -> npt.NDArray[np.uint64] | None: ...
    @property
    def num_src_buffers(self) -> int: ...
    @property
    def num_dst_buffers(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_tasks(self) -> int: ...
    @property
    def num_dst_bytes(self) -> int: ...

def num_pool_threads() -> int: ...
def best_instruction_set() -> str: ...

# cuda_bindings.cc; the classes and functions on a device exist where has_cuda_kernels()
_DigestBox = tuple[int, int, int, Sequence[int], Sequence[int], Sequence[int], int]

def lower_copies(
    src_buffer: Any,
    dst_buffer: Any,
    src_offset: Any,
    dst_offset: Any,
    lengths: Any,
    src_strides: Any,
    dst_strides: Any,
    src_dtype: Any,
    dst_dtype: Any,
    src_pointers: Any,
    dst_pointers: Any,
) -> bytes: ...
def run_copy_tiles_on_cpu(tiles: bytes) -> None: ...
def lower_digests(boxes: Sequence[_DigestBox]) -> bytes: ...
def digest_tiles_on_cpu(tiles: bytes, num_sums: int) -> list[tuple[int, int]]: ...

@final
class DeviceBytes:
    def __init__(self, bytes: bytes, device: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...

def run_copy_tiles(tiles: DeviceBytes, max_ctas: int, stream: int) -> None: ...
def run_digest_tiles(tiles: DeviceBytes, num_sums: int, max_ctas: int, stream: int) -> list[tuple[int, int]]: ...
