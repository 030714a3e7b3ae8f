"""The publishing end of a device store."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import addresses_of
from rlinf_comm.errors import WeightTimeout
from rlinf_comm.ipc.arena import IpcArena
from rlinf_comm.weights.device.device import TransferDevice
from rlinf_comm.weights.device.exports import Exports, export_of
from rlinf_comm.weights.device.memory import ECHO_BYTES, Export, ExportWords, Mailbox, echo_of
from rlinf_comm.weights.device.side import DeviceSide
from rlinf_comm.weights.manifest import DIGEST_MODULUS
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.report import SyncReport
from rlinf_comm.weights.store.memory import NO_VERSION, WeightStore
from rlinf_comm.weights.store.sender import StoreSender
from rlinf_comm.weights.store.shared_tensors import LastingStorages

if TYPE_CHECKING:
    import torch

SCRATCH_BYTES = 128 << 20
"""The copy of so many takes longer than the host needs to launch it, and they are few beside a model."""


class DeviceWeightSender(DeviceSide, StoreSender):
    """Publishes what one source rank stores, in memory of its device.

    Raises:
        IpcError: the device cannot share memory, or has none left for 4 KB; says why.
    """

    def __init__(self, store: WeightStore, plan: ReshardPlan, src_rank: int, device: TransferDevice) -> None:
        super().__init__(store, plan, src_rank)
        self._device, self._mailbox = device, Mailbox.of(plan)
        self._arenas: dict[int, IpcArena] = {}
        """By place."""
        self._packed: dict[int, int] = {}
        """Place -> the version that its arena holds."""
        self._num_allocations = 0
        self._lasting = LastingStorages()
        self._lent: tuple[list[int], Export] | None = None
        """What is exported of the tensors themselves, and their addresses."""
        self._num_lent = 0
        """Versions in a row that were lent and not packed."""
        self._is_cast = any(self._buffers[one.place.buffer].dtype != one.piece.dtype for one in self._own)
        self._scratch_bytes = min(SCRATCH_BYTES, max(self._mailbox.num_bytes[src_rank], 1))
        self._scratch: IpcArena | None = None
        """Where what is lent with a cast is copied for its digests, a part of it at a time."""
        self._export_words = ExportWords(plan, self._num_slots)
        self._own_place = self._export_words.own_place
        self._exports = Exports(store, plan, src_rank)
        weakref.finalize(self, self._exports.withdraw_all).atexit = False  # receivers notice that the process ended
        self._export_echo()

    def publish(self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0) -> SyncReport:
        """As StoreSender.publish, into device memory, which is allocated for the first version and reused for later
        ones: as much as `mailbox_bytes`, and once more for each older version that receivers still need. Tensors that
        are all on the host are packed there first.

        Raises:
            IpcError: the device has no room for this rank's share; says how much it is.
            LayoutError: a tensor is elsewhere than the others, or as in StoreSender.publish.
        """
        return super().publish(tensors, policy_version, timeout_s)

    def publish_by_reference(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, timeout_s: float = 60.0
    ) -> SyncReport:
        """As StoreSender.publish_by_reference: receivers copy from the tensors themselves, whose memory they map once.

        That takes contiguous tensors on the device, whose memory was that of the last version and that the driver lets
        others map; any others are published as `publish` does. So are tensors that are served in another dtype, unless
        all receivers are on this device: they cast while they copy, and between devices the wider elements would have
        to cross. Call `withdraw` before the memory is given back.
        """
        return super().publish_by_reference(tensors, policy_version, timeout_s)

    def withdraw(self, timeout_s: float = 60.0) -> None:
        """Call it before tensors that were lent give back their memory: does what `finish_reads` does, and returns when
        no receiver has them mapped. Costs nothing where none were.

        Raises: WeightTimeout: a receiver still has them mapped.
        """
        self.finish_reads()
        self._lent = None
        self._exports.withdraw(self._own_place)
        if self._wait_until(lambda: not self._exports.mapped_at(self._own_place), timeout_s) is None:
            raise WeightTimeout(
                f"weight store {self._store.name!r}: a receiver still has tensors of sender {self._rank} mapped "
                f"after {timeout_s} s; their memory must not be freed"
            )

    def num_held_bytes(self) -> int:
        """Device memory for published versions."""
        arenas = [*self._arenas.values(), *([self._scratch] if self._scratch else [])]
        return sum(arena.handle.num_bytes for arena in arenas)

    def _write(self, tensors: dict[str, torch.Tensor], slot: int, policy_version: int) -> list[int]:
        num_bytes = self._mailbox.num_bytes[self._rank]
        place = self._free_place()
        arena = self._arenas.get(place) or self._new_arena(place, max(num_bytes, 1))
        own, target = addresses_of(tensors.values()), np.array([arena.handle.pointer], np.int64)
        if self._are_on_host(tensors):
            digests = self._write_from_host(tensors, own, arena.handle.pointer, num_bytes)
        else:
            digests = self._on_device(tensors).of(self._transfer(tensors).publish).run_with_digests(own, target)
        self._packed[place], self._num_lent = policy_version, 0
        self._exports.put(slot, place)
        return digests

    def _shared(self, tensors: dict[str, torch.Tensor]) -> Callable[[int], None] | None:
        export = None
        if not self._are_on_host(tensors) and self._lasting.are_known(list(tensors.values())) and self._are_readable():
            export = self._export_of(list(tensors.values()))
        if export is None:
            self.finish_reads()  # of those that were lent, which may be gone soon
            self._lent = None
            self._exports.withdraw(self._own_place)
            return None
        self._device.wait()

        def put(_slot: int) -> None:
            if self._lent is None or self._lent[1] is not export:
                self._exports.withdraw(self._own_place)
                self._exports.export(self._own_place, export, _free_nothing)
                self._lent = [tensor.data_ptr() for tensor in tensors.values()], export
            self._give_back_unneeded()
            if self._is_cast:
                self._scratch_of()  # here, where a device without room is named

        return put

    def _are_readable(self) -> bool:
        """Whether receivers may read the tensors: if they are cast on the way, only where all are on one device."""
        devices = {self._words.load(self._export_words.device(rank)) for rank in self._dst_ranks}
        return not self._is_cast or devices == {self._device.identity}

    def _export_of(self, tensors: Sequence[torch.Tensor]) -> Export | None:
        """None: the driver does not let others map all of them."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._lent is not None and self._lent[0] == addresses:
            return self._lent[1]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        try:
            return export_of(self._device, tensors)
        except OSError as error:
            warnings.warn(
                f"weights are copied before they are sent, and not read from the trainer's memory: {error.args[-1]}",
                stacklevel=2,
            )
            return None

    def _digests_of(self, tensors: dict[str, torch.Tensor]) -> list[int]:
        programs, own = self._on_device(tensors), addresses_of(tensors.values())
        if not self._is_cast:
            return programs.held.run(own)
        target, sums = np.array([self._scratch_of().handle.pointer], np.int64), [0] * len(self._own)
        for program in programs.published_through(self._scratch_bytes):
            digests = program.run_with_digests(own, target)
            sums = [(one + other) % DIGEST_MODULUS for one, other in zip(sums, digests, strict=True)]
        return sums

    def _scratch_of(self) -> IpcArena:
        """Memory that nobody needs: an arena that is still there, or what takes the place of all."""
        unneeded = [arena for place, arena in self._arenas.items() if not self._is_needed(place)]
        if self._scratch is None and not unneeded:
            self._scratch = self._device.new_arena(self._scratch_bytes)
            self._num_allocations += 1
        return self._scratch or unneeded[0]

    def _give_back_unneeded(self) -> None:
        """Gives back the arenas when two versions in a row were taken from the tensors themselves."""
        self._num_lent += 1
        if self._num_lent <= 2:
            return
        for place in list(self._arenas):
            if not self._is_needed(place):
                del self._arenas[place]
                self._exports.withdraw(place)

    def _is_needed(self, place: int) -> bool:
        """Whether a receiver needs what is packed there."""
        return bool(self._receivers_before(self._packed.get(place, NO_VERSION)))

    def _free_place(self) -> int:
        """The first place whose arena holds nothing that a receiver needs; there is one for each slot."""
        return next(place for place in range(self._num_slots) if not self._is_needed(place))

    def _new_arena(self, place: int, num_bytes: int) -> IpcArena:
        """Also when it cannot be filled afterwards: the next version takes it."""
        self._exports.withdraw(place)  # the echo
        arena = self._arenas[place] = self._device.new_arena(num_bytes)
        self._num_allocations += 1
        self._exports.export(place, Export(handles=(arena.handle,)), arena.close)
        return arena

    def _export_echo(self) -> None:
        """Some memory with which receivers find out whether they can map this device's, until there is a version."""
        echo = self._device.new_arena(ECHO_BYTES)
        self._device.driver.write(self._device.ordinal, echo.handle.pointer, echo_of(echo.handle))
        self._exports.export(0, Export(handles=(echo.handle,)), echo.close)

    def _write_from_host(
        self, tensors: dict[str, torch.Tensor], own: np.ndarray, target: int, num_bytes: int
    ) -> list[int]:
        import torch

        packed = torch.empty(max(num_bytes, 1), dtype=torch.uint8)
        digests = self._transfer(tensors).publish.run_with_digests(own, addresses_of([packed]))
        self._device.bytes_at(target, len(packed)).copy_(packed)
        return digests

    def _counters(self) -> dict[str, int]:
        num_allocations, self._num_allocations = self._num_allocations, 0
        return {"num_allocations": num_allocations}

    def _store_bytes(self) -> list[int]:
        return [max(self._mailbox.num_bytes[self._rank], 1)]


def _free_nothing() -> None:
    """The tensors' memory is not this package's."""
