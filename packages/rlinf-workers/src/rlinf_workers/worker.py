"""Worker: the base class of everything that runs in a process of its own.

A worker's methods are ordinary loops over ports; which devices it has, whether it shares them, how many items come in
a chunk and how many ranks work beside it is decided by the plan and never shows in the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import WeightPort, WeightReceiver

if TYPE_CHECKING:
    from rlinf_workers.collectives import RankGroup
    from rlinf_workers.execution.worker_host import WorkerHost
    from rlinf_workers.launchers.base import Identity

Phase = Literal["train", "evaluate"]


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a stage may know about the run of the flow that it takes part in."""

    step: int
    """Counts training steps from 0; an evaluation carries the number of training steps before it."""
    phase: Phase
    seed: int
    num_items: int
    """Items fed into the flow by the driver in this run; 0 for a flow that makes its own."""


class Worker:
    """Base of all workers.

    `identity`, `rank` and `device` are there from the first line of the constructor. A subclass takes its settings as
    constructor arguments (anything that can cross a channel).
    """

    _host: WorkerHost
    identity: Identity
    """Role, rank, replica and devices. All ranks of a replica get the same items; what they put, record and show counts
    once, from the first of them."""

    # -- who and where ---------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def num_ranks(self) -> int:
        return self.identity.num_ranks

    @property
    def name(self) -> str:
        """`role/rank`"""
        return self.identity.name

    @property
    def device(self) -> torch.device:
        """Where tensors of this worker live. The launcher shows a worker only its own GPUs, so the first is
        `cuda:0`."""
        return torch.device("cuda", 0) if self.identity.is_on_gpu else torch.device("cpu")

    @property
    def step(self) -> StepContext:
        """The run of the flow that the calling stage takes part in."""
        if self._host.step is None:
            raise RuntimeError(f"{self.name}: no flow is running in this thread, so there is no step")
        return self._host.step

    @property
    def ranks(self) -> RankGroup:
        """Collectives among all ranks of this worker group; connects at first use, by all ranks together."""
        return self._host.rank_groups.all

    @property
    def replica_ranks(self) -> RankGroup:
        """Collectives among the ranks of this replica; connects as `ranks` does, but for a replica of one rank."""
        return self._host.replica_ranks

    @property
    def replicas(self) -> RankGroup:
        """Collectives among the ranks at this place in all replicas, each with items of its own; connects as `ranks`
        does."""
        return self._host.rank_groups.replicas

    def record(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds to a metric of this run; the driver shows the mean over all stages and ranks, weighted by `weight`."""
        self._host.metrics.add(name, value, weight)

    def record_spread(self, name: str, value: float) -> None:
        """Adds to a metric of this run; the driver shows the standard deviation over all stages and ranks."""
        self._host.metrics.add(name, value, is_spread=True)

    def show(self, row: Mapping[str, str | float]) -> None:
        """Hands a few words to people: the row goes to the run's samples file. For a handful of rows a run, not for
        data."""
        self._host.shown_rows.append(dict(row))

    def note(self, text: str) -> None:
        """A line for the run's manifest: something did not work as it should have, and what was done instead."""
        self._host.notes.append(text)

    # -- what a subclass may override ------------------------------------------------------------------------------

    def onload(self) -> None:
        """Brings the state that computing needs back onto the devices. Called with the lease held, before the first
        chunk."""

    def offload(self) -> None:
        """Takes the state off the devices for whoever shares them and comes next. Called while no stage of this worker
        computes, from a thread of its own."""

    def discard(self) -> None:
        """`offload` where a sync fills `weights()` after the next `onload`, before anything reads them; they need not
        be kept."""
        self.offload()

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's shard of the tensors that the worker trains or serves, as `layout` says; a receiver's are filled
        in place. Servers read a trainer's where they lie until its next stage computes or the driver calls a method of
        it: no thread of its own may change them between."""
        raise NotImplementedError(f"{type(self).__name__} takes part in a weight sync and has to define weights()")

    def layout(self) -> Layout:
        """Where the boxes of the canonical tensors lie in `weights()`, on each rank of this group; the same answer on
        each of them. By default every rank has all of every tensor. A group that serves from other processes speaks of
        all of these, as many for each rank."""
        return Layout.replicated(specs_of(self.weights()), self.num_ranks)

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        """Opens the receiving end of an edge that fills `weights()`; several where the worker serves from as many
        other processes."""
        if len(ports) != 1:
            raise FlowDefinitionError(
                f"{type(self).__name__}: layout() speaks of {len(ports)} ends for each rank, and a worker has one"
            )
        return WEIGHT_SYNCS.get(ports[0].weight_sync).open_receiver(ports[0])

    @property
    def checks_first(self) -> bool:
        """Whether weights that came are checked before a stage begins to compute with them, and not meanwhile."""
        return False

    def serving_processes(self) -> Sequence[int]:
        """Numbers of the processes that serve in this one's place, where there are any; from any thread."""
        return ()

    def weights_received(self, policy_version: int) -> None:
        """Called when `weights()` hold that version, verified; a serving worker stamps what it makes with it."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, for a worker that trains; the version served, for one that generates."""
        return 0

    def abandon(self) -> None:
        """Called when a stage ends with an exception, since its run is given up: what it has begun must not show in a
        later run of any flow. Raises: anything where it cannot forget that; another process takes its place then."""

    def close(self) -> None:
        """Called when the process ends in good order."""
