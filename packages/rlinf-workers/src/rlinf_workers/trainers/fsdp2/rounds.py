"""Ranks that make the same collectives although they have different numbers of micro-batches.

Every pass through a sharded model gathers its layers from all ranks. So before each pass the ranks say what they have
in hand, the smallest of it is what all of them do next, and who has nothing of it passes a copy of another's
micro-batch, from which no gradient comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from rlinf_workers.worker import Worker

T = TypeVar("T")
Pass = tuple[int, int, int]
"""Number of the model, whether it goes backward too, how often a micro-batch calls the model."""
NOTHING: Pass = (1 << 30, 0, 0)


class Idler(Protocol):
    """A model that others may have a pass through."""

    def idle(self, batch: Any, backward: bool) -> None:
        """Makes the collectives of such a pass, and changes nothing."""


class Rounds:
    """The passes of all sharded models of a worker; `of(worker)` is the one of this worker."""

    _of: ClassVar[WeakKeyDictionary[Worker, Rounds]] = WeakKeyDictionary()

    def __init__(self, worker: Worker) -> None:
        self._ranks = worker.ranks
        self._num_models = 0
        self._models: WeakValueDictionary[int, Idler] = WeakValueDictionary()

    @classmethod
    def of(cls, worker: Worker) -> Rounds:
        if worker not in cls._of:
            cls._of[worker] = cls(worker)
        return cls._of[worker]

    def enter(self, model: Idler) -> int:
        """The model's number, the same on all ranks, which make their models in one order."""
        self._models[self._num_models] = model
        self._num_models += 1
        return self._num_models - 1

    def take(self, own_pass: Pass, batch: Any, do: Callable[[], T]) -> T:
        """Does a pass when it is its turn, and idles through those of other ranks that come before."""
        while (served := self._next(own_pass, batch)) != own_pass:
            assert served is not None, "this rank has a pass in hand"
        return do()

    def finish(self) -> None:
        """Idles until no rank has a pass in hand; every rank calls before a collective of another kind."""
        while self._next(NOTHING, None) is not None:
            pass

    def _next(self, own_pass: Pass, batch: Any) -> Pass | None:
        """The pass of this round, None where nobody has any; through another's it has idled."""
        if self._ranks.num_ranks == 1:
            return None if own_pass == NOTHING else own_pass
        passes = torch.zeros(self._ranks.num_ranks, len(NOTHING), dtype=torch.int64)
        passes[self._ranks.rank] = torch.tensor(own_pass)
        all_wanted = [tuple(row) for row in self._ranks.sum_(passes).tolist()]
        served = min(all_wanted)
        if served == NOTHING:
            return None
        if any(other != served for other in all_wanted):
            sent = [batch if own_pass == served else None]
            dist.broadcast_object_list(sent, all_wanted.index(served), device=torch.device("cpu"))
            if own_pass != served:
                self._models[served[0]].idle(sent[0], bool(served[1]))
        return served
