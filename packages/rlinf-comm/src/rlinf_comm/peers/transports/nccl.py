"""Transport between two devices that share no memory: their tensors go over an NCCL communicator of the pair.

    sender      copies the tensors -> the value with their forms goes over TCP -> a thread sends the copies, in order
    receiver    takes the forms -> takes tensors of its own -> receives into them, in the same order -> waits for them

Everything else goes as between hosts (tcp.py), or in shared memory where the two are on one. NCCL matches sends and
receives by their order alone, so each side keeps the order of the values on the host link. The communicator is made in
the background when the first tensor is sent; it is not tried before. Its rank 0 is the sender. Whoever finds the other
gone, or NCCL broken, aborts, and the link is lost.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlinf_comm import _arrays
from rlinf_comm import nccl as nccl_binding
from rlinf_comm.codec import pack, unpack
from rlinf_comm.errors import CommError, NcclError, PeerLeft, PeerTimeout, TornStream
from rlinf_comm.ipc.driver import uuid_text
from rlinf_comm.nccl import Communicator, Library, NcclTransfer
from rlinf_comm.peers.transports.accelerator import STAGED, Accelerator, CudaAccelerator, copy_bits
from rlinf_comm.peers.transports.alongside import answer_alongside, offer_alongside, question_in
from rlinf_comm.peers.transports.base import Incoming, Negotiation, Outgoing, Unusable
from rlinf_comm.peers.transports.lifted import lift_out
from rlinf_comm.peers.transports.parcels import IncomingParcels, Parcel
from rlinf_comm.records import record
from rlinf_comm.wire.address import PeerAddress
from rlinf_comm.wire.deadline import SLICE_S, Deadline
from rlinf_comm.wire.lifeline import lost
from rlinf_comm.wire.stream import Traffic

if TYPE_CHECKING:
    import torch

_SENDER, _RECEIVER = 0, 1
_FAILURES = (CommError, RuntimeError, OSError, ValueError)
"""The exceptions that NCCL, its binding and CUDA raise."""

_FAREWELL_TIMEOUT_S = 60.0
"""Seconds that a sender which has closed keeps the memory of values on their way: it hears nothing more of its
receiver, and must not keep the memory for ever."""


class Nccl(Protocol):
    """What the transport needs of rlinf_comm.nccl."""

    Communicator: type[Communicator]

    def find_library(self) -> Library: ...
    def unique_id(self) -> bytes: ...


@record
@dataclass(frozen=True, slots=True)
class _Side:
    """What the two sides have to agree on. Packable."""

    version: int
    """Version number of NCCL."""
    uuid: bytes
    """UUID of the device."""

    def objection(self, other: _Side) -> str | None:
        """Why this side, the sender, and the receiver's side `other` cannot use NCCL; None: they can."""
        if self.version != other.version:
            return f"NCCL {self.version} at the sender, {other.version} at the receiver; install the same; {STAGED}"
        if self.uuid == other.uuid:
            return f"both on {uuid_text(self.uuid)}, and NCCL wants two devices; {STAGED}"
        return None


@record
@dataclass(frozen=True, slots=True)
class _Parcel(Parcel):
    """The tensors come over NCCL."""

    forms: list[tuple[tuple[int, ...], str]]
    """(shape, name of the dtype) of each tensor."""
    unique_id: bytes
    """Id of the communicator, the same for all values of the link."""


class NcclTransport:
    """NCCL beside a host transport."""

    name = "nccl"
    needs_connection = True

    def __init__(
        self,
        open_accelerator: Callable[[], Accelerator] = CudaAccelerator.open,
        nccl: Nccl = nccl_binding,  # pyright: ignore[reportArgumentType]
    ) -> None:
        """`open_accelerator` raises Unusable where there is no device, nccl.find_library NcclError where it is not."""
        self._open_accelerator = open_accelerator
        self._nccl = nccl

    def _open(self) -> tuple[Accelerator, _Side]:
        accelerator = self._open_accelerator()
        try:
            version = self._nccl.find_library().version
        except NcclError as error:
            raise Unusable(f"{error}; {STAGED}") from error
        return accelerator, _Side(version, accelerator.driver.uuid(accelerator.device))

    def objection(self, mine: PeerAddress, theirs: PeerAddress) -> str | None:
        try:
            self._open()
        except Unusable as error:
            return str(error)
        return None

    def offer(self, negotiation: Negotiation) -> tuple[Outgoing, str]:
        accelerator, side = self._open()
        host, host_reason, _ = offer_alongside(self.name, pack(side), negotiation)
        link = _NcclOutgoing(host, negotiation, accelerator, self._nccl)
        return link, f"{host_reason}; tensors in device memory by NCCL {side.version}, from {uuid_text(side.uuid)}"

    def answer(self, details: bytes, negotiation: Negotiation) -> tuple[Incoming, bytes]:
        accelerator, side = self._open()
        host_details, packed = question_in(details)
        objection = unpack(packed).objection(side)
        if objection is not None:
            raise Unusable(objection)
        host, arrived = answer_alongside(host_details, b"", negotiation)
        return _NcclIncoming(host, negotiation, accelerator, self._nccl), arrived


class _Departure:
    """Tensors that wait for the sending thread."""

    def __init__(self, tensors: list[torch.Tensor], mark: Any) -> None:
        self.tensors = tensors
        self.mark = mark
        """The mark on the stream where the tensors were made."""
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)


class _NcclOutgoing:
    def __init__(self, host: Outgoing, negotiation: Negotiation, accelerator: Accelerator, nccl: Nccl) -> None:
        self._host = host
        self._mine = negotiation.mine.name
        self._traffic = Traffic("NCCL", negotiation.theirs)
        self._capacity_bytes = negotiation.capacity_bytes
        self._accelerator = accelerator
        self._nccl = nccl
        self._unique_id = b""
        self._departures: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        """Guards _waiting_bytes and _failure."""
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._is_open = True
        self._farewell: Deadline | None = None
        """The time until which what is on its way is still sent."""
        self._is_cut = False
        """Whether it was closed without farewell: then nothing more is to be sent."""

    def send(self, value: Any, deadline: Deadline) -> None:
        value, arrays = lift_out(value, self._accelerator.holds)
        if not arrays:
            self.check()
            self._host.send(value, deadline)
            return
        with deadline.holding(self._lock) as held:
            if not held:
                raise self._traffic.timeout("send to", deadline, "another thread is sending to it")
            self.check()
            copies = [self._private_copy(array) for array in arrays]
            departure = _Departure(copies, self._accelerator.mark())
            self._await_room(departure.num_bytes, deadline)
            if not self._unique_id:
                self._unique_id = self._nccl.unique_id()
                threading.Thread(target=self._run, name="rlinf-comm NCCL send", daemon=True).start()
            forms = [(tuple(copy.shape), str(copy.dtype).removeprefix("torch.")) for copy in copies]
            self._host.send(_Parcel(value, forms, self._unique_id), deadline)
            with self._changed:
                self._waiting_bytes += departure.num_bytes
            self._departures.put(departure)
            self._traffic.count()

    def _private_copy(self, array: Any) -> torch.Tensor:
        tensor = self._accelerator.as_tensor(array)
        return copy_bits(self._accelerator.empty(tensor.shape, tensor.dtype), tensor)

    def _await_room(self, num_bytes: int, deadline: Deadline) -> None:
        with self._changed:
            while self._waiting_bytes and self._waiting_bytes + num_bytes > self._capacity_bytes:
                if deadline.has_passed:
                    detail = f"{self._waiting_bytes} bytes in device memory wait for the receiver or its communicator"
                    raise self._traffic.timeout("send to", deadline, detail)
                self._changed.wait(deadline.slice_s)
                self.check()

    # --- in the sending thread ---

    def _run(self) -> None:
        communicator: Communicator | None = None
        try:
            self._accelerator.make_current()
            communicator = self._nccl.Communicator.create(
                self._unique_id,
                num_ranks=2,
                rank=_SENDER,
                timeout_s=math.inf,
                name=f"{self._mine} to {self._traffic.theirs.name}",
                check=self._check_end,
            )
            stream = self._accelerator.new_stream()
            while (departure := self._departures.get()) is not None:
                self._transmit(communicator, departure, stream)
        except _FAILURES as error:  # send and check raise it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            if communicator is not None:
                communicator.abort()  # a finalization would need the receiver

    def _transmit(self, communicator: Communicator, departure: _Departure, stream: Any) -> None:
        self._accelerator.wait_for_mark(stream, departure.mark)
        options: dict[str, Any] = {"timeout_s": math.inf, "check": self._check_end}
        communicator.exchange(_transfers(departure.tensors, is_send=True), stream=stream, **options)
        communicator.wait_until(stream, **options)
        with self._changed:
            self._waiting_bytes -= departure.num_bytes
            self._changed.notify_all()

    def _check_end(self) -> None:
        if self._is_cut:
            raise PeerLeft(f"the link to {self._traffic.theirs.name!r} was closed by this process")
        if self._is_open:
            self._host.check()
        elif self._traffic.theirs.is_known_dead() or (self._farewell is not None and self._farewell.has_passed):
            kind, text = lost(self._traffic.theirs, "it did not receive what was on its way")
            raise kind(text)

    # ---

    def check(self) -> None:
        self._host.check()
        if self._failure is not None:
            kind, text = lost(self._traffic.theirs, f"the NCCL communicator of the pair broke ({self._failure})")
            raise kind(text) from self._failure

    def close(self, *, farewell: bool) -> None:
        """Ends the link. With farewell, values on their way can still be received for a minute."""
        if not self._is_open:
            return
        self._farewell = Deadline(_FAREWELL_TIMEOUT_S)
        self._is_cut = not farewell
        self._is_open = False
        self._host.close(farewell=farewell)
        self._departures.put(None)


class _NcclIncoming(IncomingParcels[_Parcel]):
    def __init__(self, host: Incoming, negotiation: Negotiation, accelerator: Accelerator, nccl: Nccl) -> None:
        super().__init__(host, Traffic("NCCL", negotiation.theirs), _Parcel)
        self._mine = negotiation.mine.name
        self._accelerator = accelerator
        self._nccl = nccl
        self._communicator: Future[Communicator] | None = None
        self._stream: Any = None
        self._tensors: list[torch.Tensor] | None = None
        """The tensors of the present parcel, once NCCL has been told to receive into them."""

    def _await_tensors(self, parcel: _Parcel, deadline: Deadline) -> list[torch.Tensor]:
        def check() -> None:
            self._check_end()
            if deadline.has_passed:
                detail = "a value has come, and not yet its tensors in device memory"
                raise self._traffic.timeout("receive from", deadline, detail)

        try:
            return self._land(parcel, check)
        except NcclError as error:
            kind, text = lost(self._traffic.theirs, f"the NCCL communicator of the pair broke ({error})")
            raise kind(text) from error

    def _land(self, parcel: _Parcel, check: Callable[[], None]) -> list[torch.Tensor]:
        """The tensors, when they are complete."""
        communicator = self._await_communicator(parcel.unique_id, check)
        options: dict[str, Any] = {"timeout_s": math.inf, "check": check}
        if self._tensors is None:
            if self._stream is None:
                self._stream = self._accelerator.new_stream()
            tensors = [self._accelerator.empty(shape, _dtype(name)) for shape, name in parcel.forms]
            self._tensors = tensors
            self._accelerator.wait_for_mark(self._stream, self._accelerator.mark())
            communicator.exchange(_transfers(tensors, is_send=False), stream=self._stream, **options)
        communicator.wait_until(self._stream, **options)
        tensors, self._tensors = self._tensors, None
        return tensors

    def _await_communicator(self, unique_id: bytes, check: Callable[[], None]) -> Communicator:
        """Waits for the communicator, which a thread of its own makes: a receive that times out does not undo it."""
        if self._communicator is None:
            self._communicator = Future()
            threading.Thread(target=self._make, args=(unique_id,), name="rlinf-comm NCCL", daemon=True).start()
        while True:
            try:
                return self._communicator.result(SLICE_S / 10)
            except TimeoutError:
                check()

    def _make(self, unique_id: bytes) -> None:
        assert self._communicator is not None
        try:
            self._accelerator.make_current()
            communicator = self._nccl.Communicator.create(
                unique_id,
                num_ranks=2,
                rank=_RECEIVER,
                timeout_s=math.inf,
                name=f"{self._traffic.theirs.name} to {self._mine}",
                check=self._check_end,
            )
        except _FAILURES as error:  # receive raises it
            self._communicator.set_exception(error)
        else:
            self._communicator.set_result(communicator)

    def _check_end(self) -> None:
        theirs = self._traffic.theirs
        if not self._is_open:
            raise PeerLeft(f"the link from {theirs.name!r} was closed by this process")
        if theirs.is_known_dead():
            kind, text = lost(theirs, "its process has ended")
            raise kind(text)
        if self.host.is_spent():
            with contextlib.suppress(PeerLeft, PeerTimeout):  # after a farewell its thread goes on sending
                self.host.receive(Deadline(0.0))

    def _release(self) -> None:
        communicator = self._communicator
        if communicator is not None:
            communicator.add_done_callback(lambda future: None if future.exception() else future.result().abort())


def _transfers(tensors: list[torch.Tensor], *, is_send: bool) -> list[NcclTransfer]:
    peer = _RECEIVER if is_send else _SENDER
    return [
        NcclTransfer(is_send=is_send, peer=peer, pointer=tensor.data_ptr(), num_bytes=tensor.nbytes)
        for tensor in tensors
        if tensor.nbytes
    ]


def _dtype(name: str) -> torch.dtype:
    dtype = _arrays.dtype_named(name)
    if dtype is None:
        raise TornStream(f"a tensor of dtype {name!r}, which this version of torch does not have")
    return dtype
