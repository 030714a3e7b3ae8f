"""Aligns the forward and backward passes of ranks with different numbers of micro-batches.

Every pass through a sharded model gathers its layers from all ranks. So before each pass the ranks exchange the pass
that each has pending, and all run the smallest of these next; a rank without it runs a dummy pass on a copy of another
rank's micro-batch, which adds no gradient.
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
"""Index of the model, whether it includes a backward pass, calls of the model per micro-batch."""
NO_PASS: Pass = (1 << 30, 0, 0)


class SupportsDummyPass(Protocol):
    """A model that supports dummy passes."""

    def dummy_pass(self, batch: Any, backward: bool) -> None:
        """Runs the collectives of such a pass without changing anything."""


class AlignedPasses:
    """The passes of all sharded models of a worker; `of(worker)` returns the worker's instance."""

    _of: ClassVar[WeakKeyDictionary[Worker, AlignedPasses]] = WeakKeyDictionary()

    def __init__(self, worker: Worker) -> None:
        self._ranks = worker.ranks
        self._num_models = 0
        self._models: WeakValueDictionary[int, SupportsDummyPass] = WeakValueDictionary()

    @classmethod
    def of(cls, worker: Worker) -> AlignedPasses:
        if worker not in cls._of:
            cls._of[worker] = cls(worker)
        return cls._of[worker]

    def register(self, model: SupportsDummyPass) -> int:
        """Returns the model's index, the same on all ranks because they create models in the same order."""
        self._models[self._num_models] = model
        self._num_models += 1
        return self._num_models - 1

    def run(self, own_pass: Pass, batch: Any, do: Callable[[], T]) -> T:
        """Runs a pass in its turn, after dummy passes for those of other ranks that come before it."""
        while (next_pass := self._next(own_pass, batch)) != own_pass:
            assert next_pass is not None, "this rank has a pending pass"
        return do()

    def finish(self) -> None:
        """Runs dummy passes until no rank has a pending pass; every rank calls this before any other collective."""
        while self._next(NO_PASS, None) is not None:
            pass

    def _next(self, own_pass: Pass, batch: Any) -> Pass | None:
        """Returns the pass of this round, None if no rank has one; if it is not `own_pass`, runs a dummy pass for
        it."""
        if self._ranks.num_ranks == 1:
            return None if own_pass == NO_PASS else own_pass
        passes = torch.zeros(self._ranks.num_ranks, len(NO_PASS), dtype=torch.int64)
        passes[self._ranks.rank] = torch.tensor(own_pass)
        pending = [tuple(row) for row in self._ranks.sum_(passes).tolist()]
        next_pass = min(pending)
        if next_pass == NO_PASS:
            return None
        if any(other != next_pass for other in pending):
            sent = [batch if own_pass == next_pass else None]
            dist.broadcast_object_list(sent, pending.index(next_pass), device=torch.device("cpu"))
            if own_pass != next_pass:
                self._models[next_pass[0]].dummy_pass(sent[0], bool(next_pass[1]))
        return next_pass
