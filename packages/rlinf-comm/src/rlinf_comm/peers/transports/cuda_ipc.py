"""Transport between processes of one host that use CUDA: device tensors cross as records of the sender's arena.

    sender      copies the tensors into its arena -> puts the records in the value's place -> publishes a lease
    receiver    takes the records -> waits for the lease -> copies into memory of its own -> acknowledges the lease

Everything else goes as in shared memory (shared.py). The receiver copies, and does not keep a view: a value then
belongs to who has it, outlives its sender, and holds no room in the sender's arena; both copies run at the device's
bandwidth. Tensors that lie in an IpcArena of the sender's already cross without the sender's copy: who sends them
leaves them alone until they are received, and keeps the arena as long as the link.

The hosts wait for flags, and for a device only where the link ends or such a tensor is let go: rlinf_comm.ipc.leases.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf_comm import _arrays
from rlinf_comm.codec import pack, unpack
from rlinf_comm.cuda import row_major_strides
from rlinf_comm.errors import ChannelTimeout, DecodeError, IpcError, PeerLeft, PeerLost
from rlinf_comm.ipc.arena import ALIGNMENT, ArenaHandle, DeviceMemory, IpcArena, IpcRecord, arena_with, open_memory
from rlinf_comm.ipc.leases import BucketReader, BucketWriter, LeaseAddress
from rlinf_comm.ipc.probe import ECHO_BYTES, invert, inverted
from rlinf_comm.ipc.transport import Facts, IpcChoice, choose
from rlinf_comm.peers.transports.accelerator import Accelerator, CudaAccelerator, copy_bits
from rlinf_comm.peers.transports.alongside import answer_alongside, offer_alongside, question_in
from rlinf_comm.peers.transports.base import Incoming, Negotiation, Outgoing, Unusable
from rlinf_comm.peers.transports.lifted import lift_out
from rlinf_comm.peers.transports.parcels import CLOSE_TIMEOUT_S, IncomingParcels, Parcel
from rlinf_comm.records import record
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import SLICE_S, Deadline
from rlinf_comm.wire.lifeline import lost
from rlinf_comm.wire.stream import Traffic

if TYPE_CHECKING:
    import torch

_NUM_LEASES = 64
"""Values with tensors in device memory that may be on their way."""

_ECHO_ARENA_BYTES = 2 << 20
"""A page of the virtual memory functions."""

_ECHO_OFFSET = 64 << 10
"""Offset of the echo in its arena; it is not 0, so that a lost offset is noticed."""


@record
@dataclass(frozen=True, slots=True)
class _Question:
    """What the receiver needs to try the handle kinds, and to open the leases."""

    facts: Facts
    leases: LeaseAddress
    echoes: dict[str, IpcRecord]
    """Handle kind -> where the bytes lie that the receiver inverts, to show that this kind works."""
    refusals: dict[str, str]
    """Handle kind -> why the sender could not make such a handle."""


@record
@dataclass(frozen=True, slots=True)
class _Parcel(Parcel):
    """The tensors lie in the sender's arena."""

    records: list[IpcRecord]
    lease: int


class CudaIpcTransport:
    """Shared device memory beside shared host memory, within one host."""

    name = "ipc"
    needs_connection = True

    def __init__(self, open_accelerator: Callable[[], Accelerator] = CudaAccelerator.open) -> None:
        """`open_accelerator` raises Unusable where there is no device."""
        self._open_accelerator = open_accelerator

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        difference = mine.host.difference_to(theirs.host)
        if difference is not None:
            return difference
        try:
            self._open_accelerator()
        except Unusable as error:
            return str(error)
        return None

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        accelerator = self._open_accelerator()
        driver, device = accelerator.driver, accelerator.device
        arenas: dict[str, IpcArena] = {}
        contents: dict[str, bytes] = {}
        writer: BucketWriter | None = None
        try:
            facts = accelerator.facts()
            refusals = {}
            for kind in facts.kinds:
                try:
                    arenas[kind] = IpcArena.create(device, _ECHO_ARENA_BYTES, kind=kind, driver=driver)
                except IpcError as error:
                    refusals[kind] = str(error)
                    continue
                contents[kind] = os.urandom(ECHO_BYTES)
                driver.write(device, arenas[kind].handle.pointer + _ECHO_OFFSET, contents[kind])
            echoes = {
                kind: IpcRecord(arena.handle, _ECHO_OFFSET, (ECHO_BYTES,), (1,), "uint8")
                for kind, arena in arenas.items()
            }
            writer = BucketWriter(_NUM_LEASES, device=device, driver=driver)
            question = pack(_Question(facts, writer.address, echoes, refusals))
            host, host_reason, reply = offer_alongside(self.name, question, negotiation)
            choice: IpcChoice = unpack(reply)
            assert choice.kind is not None, "else the receiver refuses"
            pointer = arenas[choice.kind].handle.pointer + _ECHO_OFFSET
            if driver.read(device, pointer, ECHO_BYTES) != inverted(contents[choice.kind]):
                raise Unusable(f"{ECHO_BYTES} bytes of device memory came back wrong through a {choice.kind} handle")
            traffic = Traffic("CUDA IPC", negotiation.theirs)
            link = _IpcOutgoing(host, traffic, accelerator, writer, choice.kind, negotiation.capacity_bytes)
            writer = None  # the link's
            return link, f"{host_reason}; {choice.reason}"
        except OSError as error:
            raise Unusable(f"the CUDA driver refuses: {error.args[-1]}") from error
        finally:
            for arena in arenas.values():
                arena.close()
            if writer is not None:
                writer.close()

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        accelerator = self._open_accelerator()
        driver, device = accelerator.driver, accelerator.device
        host_details, packed = question_in(details)
        question: _Question = unpack(packed)

        def echo(kind: str) -> str | None:
            record = question.echoes.get(kind)
            if record is None:
                return question.refusals[kind]
            try:
                invert(driver, device, record)
            except (IpcError, OSError) as error:
                return str(error)
            return None

        try:
            choice = choose(question.facts, accelerator.facts(), echo)
            if choice.kind is None:
                raise Unusable(choice.reason)
            reader = BucketReader(question.leases, device=device, driver=driver)
        except (IpcError, OSError, PeerLost) as error:
            raise Unusable(f"device memory cannot be shared: {error}") from error
        host, arrived = answer_alongside(host_details, pack(choice), negotiation)
        return _IpcIncoming(host, Traffic("CUDA IPC", negotiation.theirs), accelerator, reader), arrived


@dataclass(slots=True)
class _Flying:
    """What a value on its way keeps."""

    lease: int
    blocks: list[DeviceMemory]
    sent: list[torch.Tensor]
    """Tensors that lay in an arena of the sender's already."""


class _IpcOutgoing:
    def __init__(
        self,
        host: Outgoing,
        traffic: Traffic,
        accelerator: Accelerator,
        writer: BucketWriter,
        kind: str,
        capacity_bytes: int,
    ) -> None:
        self._host = host
        self._traffic = traffic
        self._accelerator = accelerator
        self._writer = writer
        self._uuid = accelerator.driver.uuid(accelerator.device)
        self._kind = kind
        self._capacity_bytes = -(-capacity_bytes // ALIGNMENT) * ALIGNMENT
        self._stream: Any = None
        self._arenas: list[IpcArena] = []
        """The first is made for the first tensor, further ones for values that do not fit."""
        self._flying: deque[_Flying] = deque()
        """Oldest first, which is the order of the leases."""
        self._next_lease = 0
        self._lock = threading.Lock()
        self._is_open = True

    def send(self, value: Any, deadline: Deadline) -> None:
        value, arrays = lift_out(value, self._accelerator.holds)
        if not arrays:
            self._host.send(value, deadline)
            return
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("send to", deadline, "another thread is sending to it")
            self._host.check()
            if self._stream is None:
                self._stream = self._accelerator.new_stream()
            while self._flying and self._take_back(Deadline(0.0)):
                pass
            while len(self._flying) == _NUM_LEASES:
                self._await_oldest(deadline)
            flying = _Flying(self._next_lease, [], [])
            with self._accelerator.working_on(self._stream):
                records = [self._place(array, flying, deadline) for array in arrays]
                self._host.send(_Parcel(value, records, flying.lease), deadline)
                self._writer.publish(flying.lease, stream=self._stream)
            self._flying.append(flying)
            self._next_lease = (self._next_lease + 1) % _NUM_LEASES
            self._traffic.count()

    def _place(self, array: Any, flying: _Flying, deadline: Deadline) -> IpcRecord:
        """The record of the array's memory, or of a copy in the link's arena."""
        tensor = self._accelerator.as_tensor(array)
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        pointer = tensor.data_ptr()
        arena = arena_with(pointer, span * tensor.itemsize) if tensor.numel() else None
        if arena is not None and (arena.handle.uuid, arena.handle.kind) == (self._uuid, self._kind):
            flying.sent.append(tensor)
            return IpcRecord(arena.handle, pointer - arena.handle.pointer, shape, strides, dtype)
        arena, block = self._reserve(tensor.nbytes, deadline)
        flying.blocks.append(block)
        strides = row_major_strides(shape, 1)
        if tensor.numel():
            copy_bits(self._accelerator.tensor_over(block, shape, strides, tensor.dtype), tensor)
        offset = block.__cuda_array_interface__["data"][0] - arena.handle.pointer
        return IpcRecord(arena.handle, offset, shape, strides, dtype)

    def _reserve(self, num_bytes: int, deadline: Deadline) -> tuple[IpcArena, DeviceMemory]:
        """Room in an arena: waits for the receiver where that helps, else makes a further arena."""
        while True:
            for arena in self._arenas:
                try:
                    return arena, arena.reserve(num_bytes)
                except IpcError:
                    continue  # no room in this one
            if self._flying and num_bytes <= max((arena.handle.num_bytes for arena in self._arenas), default=0):
                self._await_oldest(deadline)
                continue
            arena_bytes = max(self._capacity_bytes, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
            accelerator = self._accelerator
            arena = IpcArena.create(accelerator.device, arena_bytes, kind=self._kind, driver=accelerator.driver)
            self._arenas.append(arena)

    def _await_oldest(self, deadline: Deadline) -> None:
        while not self._take_back(deadline):
            self._host.check()
            if deadline.has_passed:
                detail = f"{len(self._flying)} values in device memory wait for the receiver"
                raise self._traffic.timeout("send to", deadline, detail)

    def _take_back(self, deadline: Deadline) -> bool:
        """Whether the oldest value has been received: its room may be written by what is put on the stream next."""
        oldest = self._flying[0]
        try:
            self._writer.acquire(oldest.lease, stream=self._stream, timeout_s=deadline.slice_s)
        except ChannelTimeout:
            return False
        if oldest.sent:  # may be reused on any stream, once they are let go
            self._accelerator.synchronize(self._stream)
        self._flying.popleft()
        return True

    def check(self) -> None:
        self._host.check()

    def close(self, *, farewell: bool) -> None:
        """Ends the link. With farewell, values on their way keep their memory until they are received."""
        if not self._is_open:
            return
        self._is_open = False
        self._host.close(farewell=farewell)  # whoever waits for room lets go of the lock
        with Deadline(CLOSE_TIMEOUT_S).holding(self._lock):
            if farewell and self._flying:
                threading.Thread(target=self._linger, name="rlinf-comm ipc", daemon=True).start()
            else:
                self._free()

    def _linger(self) -> None:
        """Frees the memory once the receiver has acknowledged all: by receiving, by closing, or by its end."""
        while self._flying:
            self._take_back(Deadline(SLICE_S))
        self._free()

    def _free(self) -> None:
        if self._stream is not None:
            self._accelerator.synchronize(self._stream)
        self._flying.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._writer.close()


class _IpcIncoming(IncomingParcels[_Parcel]):
    def __init__(self, host: Incoming, traffic: Traffic, accelerator: Accelerator, reader: BucketReader) -> None:
        super().__init__(host, traffic, _Parcel)
        self._accelerator = accelerator
        self._reader = reader
        self._opened: dict[ArenaHandle, DeviceMemory] = {}
        """The sender's arenas, open as long as the link."""

    def _await_tensors(self, parcel: _Parcel, deadline: Deadline) -> list[torch.Tensor]:
        stream = self._accelerator.current_stream()
        self._await_lease(parcel.lease, stream, deadline)
        self._parcel = None  # what cannot be opened now never can; the next value can be received
        try:
            if self._traffic.theirs.is_known_dead():  # do not touch what may be gone: a fault ends the context
                raise IpcError("its process has ended")
            return [self._copy_of(record) for record in parcel.records]
        except (IpcError, OSError) as error:
            self._refuse(error)
        finally:
            self._reader.acknowledge(parcel.lease, stream=stream)

    def _await_lease(self, lease: int, stream: Any, deadline: Deadline) -> None:
        while True:
            try:
                self._reader.receive(lease, stream=stream, timeout_s=deadline.slice_s)
                return
            except ChannelTimeout:
                if not self._is_open:
                    raise PeerLeft(f"the link from {self._traffic.theirs.name!r} was closed by this process") from None
                if deadline.has_passed:
                    detail = "a value has come, and its tensors in device memory are not published"
                    raise self._traffic.timeout("receive from", deadline, detail) from None

    def _copy_of(self, record: IpcRecord) -> torch.Tensor:
        dtype = _arrays.dtype_named(record.dtype)
        if dtype is None:
            raise IpcError(f"a tensor of dtype {record.dtype!r}, which this version of torch does not have")
        copy = self._accelerator.empty(record.shape, dtype)
        if not copy.numel():
            return copy
        driver, device = self._accelerator.driver, self._accelerator.device
        arena = record.arena
        if arena not in self._opened:
            whole = IpcRecord(arena, 0, (arena.num_bytes,), (1,), "uint8")
            self._opened[arena] = open_memory(whole, device=device, arenas=self._accelerator.arenas, driver=driver)
        base = self._opened[arena].__cuda_array_interface__["data"][0]
        memory = DeviceMemory(base + record.offset, arena.num_bytes - record.offset, self._opened[arena])
        return copy_bits(copy, self._accelerator.tensor_over(memory, record.shape, record.strides, dtype))

    def _refuse(self, error: Exception) -> NoReturn:
        theirs = self._traffic.theirs
        if theirs.is_known_dead():
            kind, text = lost(theirs, "its process has ended, and the device memory of its last values with it")
            raise kind(text) from error
        raise DecodeError(f"from {theirs.name!r}: tensors in device memory that cannot be opened: {error}") from error

    def _release(self) -> None:
        stream = self._accelerator.current_stream()
        self._accelerator.synchronize(stream)
        self._reader.acknowledge_all(stream=stream)
        self._opened.clear()
        # The events stay: the sender may still have to wait for them. They end with the process.
