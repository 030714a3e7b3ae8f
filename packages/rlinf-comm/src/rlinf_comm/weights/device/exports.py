"""The sender's side of mapped memory: what receivers may map, and when it may be freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rlinf_comm import _C
from rlinf_comm.ipc.arena import ArenaHandle, export_allocation
from rlinf_comm.weights.device.device import TransferDevice
from rlinf_comm.weights.device.memory import Export, ExportWords, write_export
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.store.memory import ControlWords, WeightStore

if TYPE_CHECKING:
    import torch

_LOOK_S = 1.0
"""A wait for receivers looks this often for those that died."""


class Exports:
    """The exports of one sender. It holds no memory itself: `withdraw` calls what frees it."""

    def __init__(self, store: WeightStore, plan: ReshardPlan, src_rank: int) -> None:
        self._store, self._plan, self._rank = store, plan, src_rank
        self._words, self._indices = store.words, ExportWords(plan, store.address.num_slots)
        self._control = ControlWords(plan, len(plan.pieces), store.address.num_slots)
        self._lock = threading.Lock()
        self._to_free: dict[int, Callable[[], object]] = {}
        """By place: frees what is exported there."""
        for place in range(self._indices.num_places):
            self._mark_withdrawn(place)  # what a predecessor that died has exported

    def export(self, place: int, export: Export, free: Callable[[], object]) -> None:
        """Offers memory to receivers. `free` is called once, from any thread, after it has been withdrawn.

        Raises: AssertionError if there is something at the place.
        """
        with self._lock:
            assert place not in self._to_free, f"place {place} is taken"
            self._to_free[place] = free
        write_export(self._store, self._plan, self._rank, place, export)
        word = self._indices.exported(self._rank, place)
        self._words.store(word, abs(self._words.load(word)) + 1)

    def put(self, slot: int, place: int) -> None:
        """Records that the version of a slot is packed at a place."""
        self._words.store(self._indices.slot_place(self._rank, slot), place)

    def withdraw(self, place: int) -> threading.Thread | None:
        """Takes back what is exported at a place, if anything is, and frees it when no receiver has it mapped.

        Returns: the thread that waits for receivers to unmap it and then frees it; None: it has been freed.
        """
        with self._lock:
            free = self._to_free.pop(place, None)
        if free is None:
            return None
        number = self._mark_withdrawn(place)
        self._words.notify_all()
        if number not in self.mapped_at(place).values():
            free()
            return None
        waiter = threading.Thread(
            target=self._free_when_unmapped, args=(place, number, free), name="weight memory", daemon=True
        )
        waiter.start()
        return waiter

    def withdraw_all(self) -> None:
        for place in list(self._to_free):
            self.withdraw(place)

    def mapped_at(self, place: int) -> dict[int, int]:
        """Living receivers that have mapped what is or was at a place -> the number of that export."""
        words = {rank: self._indices.mapped(rank, self._rank, place) for rank in range(self._plan.num_dst_ranks)}
        mapped = {rank: number for rank, word in words.items() if (number := self._words.load(word))}
        return {rank: number for rank, number in mapped.items() if self._is_alive(rank)}

    def _is_alive(self, dst_rank: int) -> bool:
        first = self._control.receiver(dst_rank)
        return _C.is_alive(self._words.load(first), self._words.load(first + 1))

    def _mark_withdrawn(self, place: int) -> int:
        """Returns the number of what was there."""
        word = self._indices.exported(self._rank, place)
        number = abs(self._words.load(word))
        self._words.store(word, -number)
        return number

    def _free_when_unmapped(self, place: int, number: int, free: Callable[[], object]) -> None:
        while True:
            seen = self._words.sequence()
            if number not in self.mapped_at(place).values():
                break
            self._words.wait(seen, _LOOK_S)
        free()


def export_of(device: TransferDevice, tensors: Iterable[torch.Tensor]) -> Export:
    """Tensors of this process, each allocation of which is exported once.

    Raises: OSError if the driver does not let others map one.
    """
    numbers: dict[int, int] = {}
    handles: list[ArenaHandle] = []
    buffers: list[tuple[int, int]] = []
    for tensor in tensors:
        if not tensor.numel():
            buffers.append((-1, 0))
            continue
        pointer = tensor.data_ptr()
        base, _ = device.driver.allocation_of(device.ordinal, pointer)
        if base not in numbers:
            numbers[base] = len(handles)
            handles.append(export_allocation(device.driver, device.ordinal, pointer))
        buffers.append((numbers[base], pointer - base))
    return Export(handles=tuple(handles), buffers=tuple(buffers))
