"""The weight sync protocol: transports a policy version from the ranks that train to those that serve.

    driver      sync = MySync("actor -> rollout", reshard); WeightPort(..., address=sync.address) to each rank
    a trainer   sender = MySync.open_sender(port);     finish_reads = sender.publish(weights, 7)
                finish_reads()    before the weights change
    a server    receiver = MySync.open_receiver(port); check = receiver.receive(weights, 7)     in place
                check()     before results computed with them are sent

Both ends know the reshard plan, which lists the box of each tensor to copy from each rank to each other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from rlinf_comm import record
from rlinf_comm.weights import Layout, ReshardPlan

Check = Callable[[], object]
"""Verifies that a receiver's tensors hold what was published; raises WeightMismatchError if they do not."""
SyncedTensors = Literal["all", "frozen", "trained"]
"""all: one sync of an edge moves all tensors of each version. Where servers have the tensors of an adapter, there are
two: one moves the frozen tensors, once, and the other those that training changes."""
FROZEN = " (frozen)"
"""Follows the name of an edge in that of its end for frozen weights."""
FinishReads = Callable[[], object]
"""Ends the use of a trainer's tensors that were published by reference."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class UnmergedLayout:
    """The layout of a trainer that trains an adapter, whose tensors are beside the weights that they change."""

    layout: Layout
    frozen: tuple[str, ...]
    """Canonical tensors that never change."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPort:
    """The arguments with which one rank opens its end of an edge."""

    edge: str
    """`source -> target`"""
    side: Literal["send", "receive"]
    rank: int
    """Rank on its side of the reshard plan."""
    reshard: ReshardPlan
    weight_sync: str
    """A name of `plugins.WEIGHT_SYNCS`, or an import path."""
    address: Any
    """The weight sync's own `address`."""
    quantized: tuple[str, ...] = ()
    """Canonical tensors that are served in FP8 with block-wise scales and trained in another dtype. Senders quantize
    them before they publish (rlinf_comm.weights.fp8), so a weight sync need not know."""
    tensors: SyncedTensors = "all"
    attests: bool = True
    """Whether a receiver must verify that it holds what was published; a weight sync that always verifies may ignore
    it."""

    @property
    def end(self) -> str:
        """The name of the end that it opens: the edge's, or that of the edge's end for frozen weights."""
        return self.edge + FROZEN if self.tensors == "frozen" else self.edge


class WeightTarget(Protocol):
    """What an edge fills: a worker, or one of several policies that it serves."""

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's shard of the tensors, as described by `layout`; they are filled in place."""
        ...

    def layout(self) -> Layout:
        """The placement of the tensors on each rank of the group; see Worker.layout."""
        ...

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        """Opens the receiving end of an edge; see Worker.open_receiver."""
        ...

    @property
    def checks_first(self) -> bool:
        """Whether received weights are checked before a stage computes with them; see Worker.checks_first."""
        ...

    def weights_received(self, policy_version: int) -> None:
        """Called when `weights()` hold that version."""
        ...


class WeightSender(Protocol):
    """A trainer rank's end."""

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> FinishReads | None:
        """Publishes this rank's share of a version, newer than any before. It may wait for receivers that have not
        received an older version, but never for receivers of this one: trainer and servers may share devices.

        Args:
            tensors: this rank's buffers, as in its layout; on any device.

        Returns:
            None if the tensors may change now. Otherwise a function to call before they change, from any thread and
            possibly more than once: it ensures that later receivers still find this version, and may wait for receivers
            that are copying, but for no others. Host tensors may be dropped without calling it.
        """


@runtime_checkable
class LendsDeviceMemory(Protocol):
    """Optional for a `WeightSender`: receivers may have memory of the trainer's device mapped."""

    def withdraw(self) -> None:
        """Called before the tensors leave their device: returns when no receiver reads them or has them mapped."""


class WeightReceiver(Protocol):
    """A serving rank's end."""

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check | None:
        """Waits for exactly that version and fills `tensors` in place. It may be called again, also after it raised.

        Args:
            tensors: this rank's buffers, as in its layout; on any device.
            timeout_s: seconds to wait for the senders.

        Returns:
            None if the tensors are known to hold what was published. Otherwise a function that verifies it, and raises
            as this method does: it is called once, possibly in another thread while a model computes with the tensors,
            which neither change nor move until it returns. Nothing computed with them leaves the worker before.

        Raises:
            rlinf_comm.errors.WeightTimeout: the version did not arrive in time; the message names it.
            rlinf_comm.errors.WeightMismatchError: the received bytes differ from what was published. They must not be
            served.
        """


class WeightSync(Protocol):
    """The driver's side of one edge; lives as long as the executor.

    Constructed as `cls(edge, reshard, **options)`: `edge` is its name, for messages, and `options` are the recipe's
    `cluster.weight_sync_options`. It keeps two versions until they are received, or `num_versions` if that is among the
    options: with steps that overlap by more than one, so that publishing does not wait. Workers only call the two
    functions, once per rank, senders first. Either raises rlinf_workers.errors.WeightSyncRefused if it cannot work.
    """

    @property
    def address(self) -> Any:
        """The address for the workers' processes: plain values, or records of rlinf_comm."""

    @staticmethod
    def open_sender(port: WeightPort) -> WeightSender: ...

    @staticmethod
    def open_receiver(port: WeightPort) -> WeightReceiver: ...
