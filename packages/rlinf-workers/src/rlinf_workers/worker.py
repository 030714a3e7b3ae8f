"""Worker: the base class of everything that runs in its own process.

A worker's methods are ordinary loops over ports; the plan decides which devices it has, whether it shares them, how
many items are in a chunk and how many ranks there are, and none of this appears in the class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import UnmergedLayout, WeightPort, WeightReceiver, WeightTarget

if TYPE_CHECKING:
    from rlinf_workers.collectives import RankGroup
    from rlinf_workers.execution.worker_host import WorkerHost
    from rlinf_workers.launchers.base import Identity

Phase = Literal["train", "evaluate"]
"""What a flow runs for: a training step or an evaluation."""
ShownRow = dict[str, bool | int | float | str]
"""A row that a worker shows people: column -> value."""
Decision = dict[str, Any]
"""Something that decided numbers of a run and may depend on timing, or the digest of such numbers; JSON values."""
DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest in a decision."""
Decisions = list[tuple[int, Decision]]
"""The decisions of a stage in one run of the flow, each with the rank that made it."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a stage can know about its run of the flow."""

    step: int
    """Counts training steps from 0; an evaluation carries the number of training steps before it."""
    phase: Phase
    seed: int
    num_items: int
    """Items that the driver feeds into the flow in this run; 0 for a flow that creates its own."""

    def generator(self, first: int, second: int) -> np.random.Generator:
        """Random numbers that depend on the seed, the step and two numbers below 2**20 alone, whatever the plan."""
        return np.random.Generator(np.random.Philox(key=[self.seed, (self.step << 40) | (first << 20) | second]))


class Worker:
    """Base of all workers.

    `identity`, `rank` and `device` are available in the constructor. A subclass takes its settings as constructor
    arguments (any values that can be sent through a channel).
    """

    _host: WorkerHost
    identity: Identity
    """Role, rank, replica and devices. All ranks of a replica get the same items; what they put, record and show is
    taken from the first rank only."""

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
        """The device of this worker's tensors. The launcher makes only the worker's own GPUs visible, so the first is
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
        """Collectives among the ranks of this replica; connects like `ranks`, unless the replica has one rank."""
        return self._host.replica_ranks

    @property
    def replicas(self) -> RankGroup:
        """Collectives among the ranks at the same position in all replicas, which have different items; connects like
        `ranks`."""
        return self._host.rank_groups.replicas

    def record(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds a value to a metric of this run; the driver reports the mean over all stages and ranks, weighted by
        `weight`."""
        self._host.recording.add(name, value, weight)

    def record_spread(self, name: str, value: float) -> None:
        """Adds a value to a metric of this run; the driver reports the standard deviation over all stages and ranks."""
        self._host.recording.add(name, value, statistic="spread")

    def count_tokens(self, tokens: int, attended: int, *, passes: int = 1) -> None:
        """Adds tokens that the calling stage's model computes. The driver reports the totals over all ranks as
        `computed_tokens/<stage>` and `attended_tokens/<stage>`; of ranks that compute tokens together the first counts.

        Args:
            attended: tokens that these attend to, in sum.
            passes: forward passes; a backward pass has the arithmetic of two, of one where the weights are frozen.
        """
        call = self._host.running_call
        if call is None or self.identity.rank % self.identity.num_ranks_per_replica:
            return
        for name, value in (("computed_tokens", tokens), ("attended_tokens", attended)):
            self._host.recording.add(f"{name}/{call.stage}", passes * value, statistic="total")

    def report_progress(self, num_done: int, num_items: int = 0, *, unit: str = "") -> None:
        """Reports how far the calling stage is, for terminals; without it, the items that it has put are counted.

        Args:
            num_items: how many there are on this rank; 0: unknown.
            unit: what is counted, for example `micro-batches`.
        """
        self._host.report_progress(num_done, num_items, unit)

    def show(self, row: ShownRow) -> None:
        """Adds a row to the run's samples file, for people to read. Meant for a handful of rows per run, not for
        data."""
        self._host.shown_rows.append(dict(row))

    def note(self, text: str) -> None:
        """Adds a note to the run's manifest, about a fall-back or a failure."""
        self._host.notes.append(text)

    @property
    def records(self) -> bool:
        """Whether the calling stage's decisions are recorded (`decide`)."""
        return self._host.running_call is not None and self._host.running_call.records

    def decide(self, decision: Decision) -> None:
        """Records a decision of the calling stage, so that a replay makes the same one."""
        self._host.decide(decision)

    @property
    def recorded(self) -> Decisions | None:
        """The decisions of all ranks of the calling stage in the recorded run that is replayed; None: there is none, so
        the stage decides."""
        return None if self._host.running_call is None else self._host.running_call.recorded

    @property
    def is_ahead(self) -> bool:
        """Whether the stage of the next run may begin before the calling one has ended (`Flow.stage`). Then two threads
        are in this stage's method, which compute in turns unless the class has `computes_at_once`."""
        return self._host.running_call is not None and self._host.running_call.ahead

    @property
    def newer_version(self) -> int | None:
        """The newest version of the weights that the calling stage may take before its end, see `Flow.weights`; None:
        there is none that is newer than the served one."""
        return self._host.newer_version

    def take_weights(
        self,
        policy_version: int,
        *,
        pause: Callable[[], object] = lambda: None,
        resume: Callable[[], object] = lambda: None,
    ) -> None:
        """Serves another version of the weights from here on, in the middle of the calling stage.

        Args:
            policy_version: `newer_version`, or one that a record says; waits until it has been published.
            pause: called before the weights change, `resume` afterwards.
        """
        self._host.take_weights(policy_version, pause, resume)

    def weights_as_served(self) -> AbstractContextManager[bool]:
        """A context in which `weights()` hold what servers compute with, where they hold them quantized. Every rank
        enters it.

        Returns: a context whose value is False if the weights have not changed: no server quantizes them, or they are
        computed when they are read, as with an adapter.
        """
        return self._host.weights_as_served()

    def check_weights(self) -> None:
        """Returns once the weights that the calling stage serves are verified to be the published ones; for results
        that leave otherwise than through its channels. Raises: WeightMismatchError if they are not."""
        self._host.check_served_weights()

    def ask_driver(self, service: str) -> Any:
        """What a service of the driver replies."""
        with self._host.waits.waiting("service", service):
            return self._host.request(service, None).result()

    # -- what a subclass may override ------------------------------------------------------------------------------

    computes_at_once = False
    """Whether stages of two runs may compute at the same time, if they are `ahead`; its methods are then safe to use
    from several threads. If it receives weights, those of the next run may come before its method begins: it keeps its
    own in `before_new_weights`."""

    def before_new_weights(self) -> None:
        """Called before `weights()` are filled for the calling stage, which is `ahead`, while the same stage of the run
        before may go on with those that are there."""

    def onload(self) -> None:
        """Moves the state that computing needs onto the devices. Called with the lease held, before the first chunk."""

    def offload(self) -> None:
        """Moves the state off the devices for the next user. Called while no stage of this worker computes, from a
        separate thread."""

    def discard(self) -> None:
        """Like `offload`, if a sync fills `weights()` after the next `onload`, before anything reads them; they need
        not be kept."""
        self.offload()

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's shard of the tensors that the worker trains or serves, as described by `layout`; a receiver's are
        filled in place. Servers read a trainer's by reference until its next stage computes or the driver calls one of
        its methods: no other thread may change them in between."""
        raise NotImplementedError(f"{type(self).__name__} takes part in a weight sync and must define weights()")

    def layout(self) -> Layout:
        """The placement of the canonical tensors in `weights()`, on each rank of this group; the same on every rank. By
        default every rank has all of every tensor. A group that serves from other processes describes all of these,
        with equally many per rank."""
        return Layout.replicated(specs_of(self.weights()), self.num_ranks)

    def unmerged_weights(self) -> Mapping[str, Tensor]:
        """As `weights`, with the adapter's tensors beside the weights that they change; for `unmerged_layout`."""
        raise NotImplementedError(f"{type(self).__name__} has an unmerged_layout() and must define unmerged_weights()")

    def unmerged_layout(self) -> UnmergedLayout | None:
        """The placement of `unmerged_weights`; None: the worker trains no adapter. Servers that have the adapter's
        tensors receive the frozen weights once and the others with each version."""
        return None

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        """Opens the receiving end of an edge that fills `weights()`; several if the worker serves from other
        processes."""
        if len(ports) != 1:
            raise FlowDefinitionError(
                f"{type(self).__name__}: layout() describes {len(ports)} ends for each rank, but a worker has one"
            )
        return WEIGHT_SYNCS.get(ports[0].weight_sync).open_receiver(ports[0])

    def weight_target(self, source: str) -> WeightTarget:
        """What the weights that the group `source` trains fill: by default the worker itself, which takes them from one
        group only. A worker that serves several policies has a target for each, the same one on every call."""
        return self

    @property
    def checks_first(self) -> bool:
        """Whether received weights are checked before a stage computes with them, rather than in the background."""
        return False

    def serving_processes(self) -> Sequence[int]:
        """Ids of the processes that serve in place of this one, if any; can be called from any thread."""
        return ()

    def serving_reserved_bytes(self) -> int | None:
        """GPU memory that torch has reserved at most in one of them; None: they do not tell."""
        return None

    def weights_received(self, policy_version: int) -> None:
        """Called when `weights()` hold that version, verified; a serving worker labels its outputs with it."""

    def weights_offered(self) -> None:
        """Called when there is a `newer_version`, in another thread than the stage that may take it."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, for a worker that trains; the served version, for one that generates."""
        return 0

    def abandon(self) -> None:
        """Called when a stage ends with an exception, because its run is abandoned: work in progress must not affect a
        later run of any flow. Raises: any exception if it cannot be rolled back; the process is then replaced."""

    def close(self) -> None:
        """Called when the process ends normally."""
