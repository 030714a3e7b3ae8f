"""The receiver's side of mapped memory: a sender's memory is mapped once and stays so until it is withdrawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlinf_comm import _C
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.opened import is_own
from rlinf_comm.weights.device.device import TransferDevice
from rlinf_comm.weights.device.memory import Export, ExportWords, read_export
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.store.memory import ControlWords, WeightStore

_LOOK_S = 1.0
"""Senders that died are noticed after this time, and so is the end of a receiver, by the thread that closes."""


@dataclass(frozen=True, slots=True)
class _Mapped:
    number: int
    export: Export
    addresses: tuple[int, ...]
    """Here, by allocation."""


class KeptMappings:
    """What one receiver has mapped, by sender and place. A thread closes mappings of memory that its sender withdraws,
    and all of a sender that dies. `end` closes all."""

    def __init__(self, store: WeightStore, plan: ReshardPlan, dst_rank: int, device: TransferDevice) -> None:
        self._store, self._plan, self._rank, self._device = store, plan, dst_rank, device
        self._words, self._indices = store.words, ExportWords(plan, store.address.num_slots)
        self._control = ControlWords(plan, len(plan.pieces), store.address.num_slots)
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._lock = threading.Lock()
        """Held while mappings are read, opened or closed."""
        self._has_ended = False
        self._closer: threading.Thread | None = None
        self.num_maps = self.num_unmaps = 0
        """Allocations of senders that were mapped and unmapped so far."""
        for src_rank in range(plan.num_src_ranks):
            for place in range(self._indices.num_places):
                self._words.store(self._indices.mapped(dst_rank, src_rank, place), 0)  # of a predecessor that died

    @contextmanager
    def open(self) -> Iterator[Opened]:
        """Nothing is closed in this context."""
        with self._lock:
            yield Opened(self)

    def end(self) -> None:
        """The thread closes all mappings and ends. This takes no lock, since a garbage collector may call it in any
        thread, also in that one."""
        self._has_ended = True
        self._words.notify_all()

    def _open(self, src_rank: int, place: int) -> _Mapped:
        """Maps what a sender has at a place, unless it is mapped.

        Raises: IpcError if it is withdrawn or cannot be mapped.
        """
        number = self._words.load(self._indices.exported(src_rank, place))
        mapped = self._mapped.get((src_rank, place))
        if mapped is not None and mapped.number == number:
            return mapped
        self._close(src_rank, place)
        mapped_word = self._indices.mapped(self._rank, src_rank, place)
        self._words.store(mapped_word, number)  # before it is asked whether it is there
        try:
            export = read_export(self._store, self._plan, src_rank, place) if number > 0 else None
            # Asked after the record was read, which may be that of a later export.
            if export is None or self._words.load(self._indices.exported(src_rank, place)) != number:
                raise IpcError("its sender has withdrawn it")
            addresses = self._map(export)
        except BaseException:
            self._words.store(mapped_word, 0)
            self._words.notify_all()
            raise
        self.num_maps += _num_foreign(export)
        mapped = self._mapped[src_rank, place] = _Mapped(number, export, addresses)
        if self._closer is None:
            self._closer = threading.Thread(target=self._close_when_withdrawn, name="weight mappings", daemon=True)
            self._closer.start()
        return mapped

    def _map(self, export: Export) -> tuple[int, ...]:
        arenas, ordinal = self._device.arenas, self._device.ordinal
        addresses: list[int] = []
        try:
            for handle in export.handles:
                addresses.append(arenas.open(handle, ordinal))
        except IpcError:
            for handle in export.handles[: len(addresses)]:
                arenas.close(handle, ordinal)
            raise
        return tuple(addresses)

    def _close(self, src_rank: int, place: int) -> None:
        mapped = self._mapped.pop((src_rank, place), None)
        if mapped is None:
            return
        for handle in mapped.export.handles:
            self._device.arenas.close(handle, self._device.ordinal)
        self.num_unmaps += _num_foreign(mapped.export)
        self._words.store(self._indices.mapped(self._rank, src_rank, place), 0)
        self._words.notify_all()

    def _close_when_withdrawn(self) -> None:
        while True:
            seen = self._words.sequence()
            with self._lock:
                ends = self._has_ended
                for (src_rank, place), mapped in list(self._mapped.items()):
                    exported = self._words.load(self._indices.exported(src_rank, place))
                    if ends or exported != mapped.number or not self._is_alive(src_rank):
                        self._close(src_rank, place)
                if ends:
                    return
            self._words.wait(seen, _LOOK_S)

    def _is_alive(self, src_rank: int) -> bool:
        first = self._control.sender(src_rank)
        return _C.is_alive(self._words.load(first), self._words.load(first + 1))


def _num_foreign(export: Export) -> int:
    """Allocations that have to be mapped: those of other processes."""
    return sum(not is_own(handle) for handle in export.handles)


@dataclass(frozen=True, slots=True)
class Opened:
    """Mappings that stay while they are read."""

    _kept: KeptMappings

    def addresses_of(self, src_rank: int, place: int) -> tuple[int, ...]:
        """Where this process sees each allocation of an export. Raises: IpcError."""
        return self._kept._open(src_rank, place).addresses

    def buffers_of(self, src_rank: int, place: int) -> list[int]:
        """Where this process sees each buffer of a sender's layout; 0 for one without elements. Raises: IpcError."""
        mapped = self._kept._open(src_rank, place)
        return [0 if at < 0 else mapped.addresses[at] + offset for at, offset in mapped.export.buffers]
