"""NCCL communicators that never hang: non-blocking, with a deadline for every wait, aborted when broken.

    library = find_library()       # the libnccl.so.2 of this process: path, version, origin, capabilities()
    comm = Communicator.create(unique_id, num_ranks=3, rank=0, timeout_s=60, name="weights")
    comm.exchange([send(bucket, to=1), send(other, to=2)], stream=stream, timeout_s=30)   # one group
    comm.wait_until(event, timeout_s=30)        # watches the device *and* the communicator

torch.distributed keeps the trainer's own collectives; this is for pairs of peers, which come and go. No NCCL is
needed to build or to import: the library is opened at run time (csrc/comm/nccl). Arrays are torch's, CuPy's, or
anything that `rlinf_comm.cuda.as_region` takes.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_comm import _C
from rlinf_comm.cuda import DeviceRegion, as_region, row_major_strides, stream_handle
from rlinf_comm.errors import NcclError, NcclTimeout

SUCCESS, IN_PROGRESS, NO_COMM = 0, 7, -1
_LONGEST_NAP_S = 0.002
_ABORT_TIMEOUT_S = 30.0

Library = _C.NcclLibrary


def wheel_libraries() -> list[str]:
    """libnccl.so.2 of installed nvidia-nccl wheels, without importing anything heavy."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = [pathlib.Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders]
    return [str(path) for path in paths if path.is_file()]


def load_library(candidates: Sequence[str]) -> Library:
    """The mapped library, else the first usable candidate, else the system's.

    Raises:
        NcclError: none; the text says what was tried.
    """
    try:
        return _C.NcclLibrary.load(list(candidates))
    except ValueError as error:
        raise NcclError(str(error)) from None


@functools.lru_cache(maxsize=1)
def find_library() -> Library:
    """The process's NCCL: already mapped (by torch, say), from an nvidia-nccl wheel, or the system's, in this order."""
    return load_library(wheel_libraries())


def unique_id(library: Library | None = None) -> bytes:
    """128 bytes that rank 0 makes and hands to all ranks of a new communicator."""
    return (library or find_library()).unique_id()


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclTransfer:
    """One send or receive of an exchange: raw bytes in device memory."""

    is_send: bool
    peer: int
    pointer: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{'send to' if self.is_send else 'receive from'} rank {self.peer} ({self.num_bytes} bytes)"


def _dense(array: Any) -> tuple[int, int]:
    """(pointer, bytes)"""
    region: DeviceRegion = as_region(array)
    itemsize = int("".join(filter(str.isdigit, region.dtype))) // 8
    expected = row_major_strides(region.shape, itemsize)
    num_bytes = itemsize
    for length in region.shape:
        num_bytes *= length
    dense_strides = [s for s, n in zip(expected, region.shape, strict=True) if n != 1]
    if num_bytes and dense_strides != [s for s, n in zip(region.strides, region.shape, strict=True) if n != 1]:
        raise ValueError(
            f"an array of shape {region.shape} with byte strides {region.strides} is not contiguous; "
            "pack it into a bucket"
        )
    return region.pointer, num_bytes


def send(array: Any, *, to: int) -> NcclTransfer:
    """Sends a contiguous device array."""
    pointer, num_bytes = _dense(array)
    return NcclTransfer(is_send=True, peer=to, pointer=pointer, num_bytes=num_bytes)


def receive(array: Any, *, from_: int) -> NcclTransfer:
    """Receives into a contiguous device array."""
    pointer, num_bytes = _dense(array)
    return NcclTransfer(is_send=False, peer=from_, pointer=pointer, num_bytes=num_bytes)


class Communicator:
    """One rank of a group. Thread-safe as NCCL is: one operation at a time, and `abort` from any thread at any time."""

    def __init__(self, native: _C.NcclCommunicator, library: Library, num_ranks: int, rank: int, name: str) -> None:
        self._native = native
        self.library = library
        self.num_ranks = num_ranks
        self.rank = rank
        self.name = name
        self._broken: str | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_ranks} of NCCL communicator {self.name!r}"

    @classmethod
    def create(
        cls,
        unique_id: bytes,
        *,
        num_ranks: int,
        rank: int,
        timeout_s: float,
        name: str = "rlinf",
        max_ctas: int = 0,
        library: Library | None = None,
        check: Callable[[], object] | None = None,
    ) -> Communicator:
        """All ranks call it, each with its CUDA device current (`torch.cuda.set_device`).

        Args:
            unique_id: what `unique_id()` returned on one rank, the same on all.
            max_ctas: thread blocks that NCCL may take from the device; 0: NCCL's choice.
            check: called while it waits; what that raises ends the creation.

        Raises:
            NcclTimeout: not all ranks came within `timeout_s`; what was made is aborted.
            NcclError: NCCL's own error.
        """
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank} is not one of the {num_ranks} ranks 0..{num_ranks - 1}")
        library = library or find_library()
        native = _C.NcclCommunicator.create(library, unique_id, num_ranks, rank, name, max_ctas)
        return cls(native, library, num_ranks, rank, name)._ready("creation", timeout_s, check)

    def exchange(
        self,
        transfers: Iterable[NcclTransfer],
        *,
        stream: Any,
        timeout_s: float,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Enqueues all transfers as one group on `stream`, in the order given. `wait_until` tells when data has moved.

        `check` is called while it waits; what that raises leaves the operation in flight.

        Raises:
            ValueError: a peer that is no other rank.
            NcclTimeout, NcclError: with the peers.
        """
        transfers = list(transfers)
        for transfer in transfers:
            if not 0 <= transfer.peer < self.num_ranks:
                raise ValueError(f"{self}: {transfer}: the ranks are 0..{self.num_ranks - 1}")
        tuples = [(each.is_send, each.peer, each.pointer, each.num_bytes) for each in transfers]
        self._run(_describe(transfers), timeout_s, lambda: self._native.exchange(tuples, stream_handle(stream)), check)

    def wait_until(
        self,
        done: Any,
        *,
        timeout_s: float,
        what: str = "the work on the stream",
        check: Callable[[], object] | None = None,
    ) -> None:
        """Waits until a torch event or stream (`query()`), a cupy one (`done`) or a function says that it is done.

        Unlike a stream synchronization it notices a broken communicator, and it ends. `check` is as in exchange().
        """
        self._poll(what, timeout_s, _probe_of(done), check)

    def close(self, *, timeout_s: float = 30.0) -> None:
        """Finalizes and destroys a healthy communicator; all ranks call it. A broken one is aborted instead."""
        if self._native.state() == NO_COMM:
            return
        if self._broken is None:
            try:
                self._run("finalization", timeout_s, self._native.finalize)
            except NcclError:
                self.abort()
                raise
            self._native.destroy()
        else:
            self.abort()

    def abort(self, *, timeout_s: float = _ABORT_TIMEOUT_S) -> bool:
        """Ends everything on this rank, at once and alone. False when NCCL itself has not come back by then."""
        self._broken = self._broken or "it was aborted"
        thread = threading.Thread(target=self._native.abort, name="rlinf-comm NCCL abort", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _ready(self, what: str, timeout_s: float, check: Callable[[], object] | None = None) -> Communicator:
        try:
            self._poll(what, timeout_s, lambda: True, check)
        except BaseException:
            self.abort()
            raise
        return self

    def _begin(self, call: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise NcclError(f"{self} is broken: {self._broken}")
        try:
            return call()
        except ValueError as error:
            raise NcclError(f"{self}: {error}") from None

    def _run(
        self, what: str, timeout_s: float, call: Callable[[], int], check: Callable[[], object] | None = None
    ) -> None:
        result = self._begin(call)
        if result not in (SUCCESS, IN_PROGRESS):
            self._fail(what, result)
        self._poll(what, timeout_s, lambda: True, check)

    def _poll(
        self, what: str, timeout_s: float, is_done: Callable[[], bool], check: Callable[[], object] | None = None
    ) -> None:
        """Waits until NCCL is done with its own part and `is_done` says so."""
        deadline = time.monotonic() + timeout_s
        nap_s = 0.0
        while True:
            state = self._native.state()
            if state not in (SUCCESS, IN_PROGRESS):
                self._fail(what, state)
            if state == SUCCESS and is_done():
                return
            if check is not None:
                check()
            if time.monotonic() >= deadline:
                self._broken = f"{what} timed out"
                raise NcclTimeout(
                    f"{self}: {what} was not done within {timeout_s} s; a peer is dead, late or elsewhere"
                )
            time.sleep(nap_s)
            nap_s = min(nap_s + 2e-5, _LONGEST_NAP_S)

    def _fail(self, what: str, result: int) -> None:
        if result == NO_COMM:
            raise NcclError(f"{self}: {what}: {self._broken or 'this rank is in no new communicator'}")
        detail = self._native.last_error().strip()
        reason = self.library.error_string(result) + (f" ({detail})" if detail else "")
        self._broken = f"{what} failed: {reason}"
        raise NcclError(f"{self}: {what} failed: {reason}")


def _describe(transfers: Sequence[NcclTransfer]) -> str:
    listing = ", ".join(map(str, transfers[:4]))
    rest = len(transfers) - 4
    return f"exchange [{listing}{f', and {rest} more' if rest > 0 else ''}]"


def _probe_of(done: Any) -> Callable[[], bool]:
    if callable(getattr(done, "query", None)):
        return lambda: bool(done.query())
    if hasattr(done, "done"):
        return lambda: bool(done.done)
    if callable(done):
        return lambda: bool(done())
    raise TypeError(f"{type(done).__name__} is no event, stream or function that tells when it is done")
