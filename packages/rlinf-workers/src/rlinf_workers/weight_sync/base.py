"""What every weight sync offers: the weights of a policy version, from the ranks that train to those that serve.

    driver      sync = MySync("actor -> rollout", reshard); WeightPort(..., address=sync.address) to each rank
    a trainer   sender = MySync.open_sender(port);     settle = sender.publish(weights, 7)
                settle()    before the weights change
    a server    receiver = MySync.open_receiver(port); check = receiver.receive(weights, 7)     in place
                check()     before anything that was made with them leaves

The reshard plan, which both ends know, says which box of which tensor goes from which rank to which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from rlinf_comm import record
from rlinf_comm.weights import ReshardPlan

Check = Callable[[], object]
"""Finds out whether the tensors of a receiver hold what was published; raises WeightMismatchError when they do not."""
FinishReads = Callable[[], object]
"""Ends the use of a trainer's tensors that were published where they lie."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPort:
    """What one rank opens its end of an edge with."""

    edge: str
    """`source -> target`"""
    side: Literal["send", "receive"]
    rank: int
    """Among the ranks of its side, as the plan counts them."""
    reshard: ReshardPlan
    weight_sync: str
    """A name of `plugins.WEIGHT_SYNCS`, or an import path."""
    address: Any
    """Its own."""
    attests: bool = True
    """Whether a receiver proves that it holds what was published; a weight sync that always does need not look."""


class WeightSender(Protocol):
    """A trainer rank's end."""

    def publish(self, tensors: Mapping[str, Tensor], policy_version: int) -> FinishReads | None:
        """Hands out this rank's share of a version, larger than any before. It may wait for receivers that have not
        taken an older version, but never for the one that it publishes: who trains may share its devices with who
        serves.

        Args:
            tensors: this rank's buffers, as its layout says; on any device.

        Returns:
            None when the tensors may change now. Or what is called before they change, from any thread and perhaps
            more than once: it makes sure that receivers which come later find the version as it was, and may wait for
            receivers that copy at this moment, but for no others. Tensors of the host may be let go of without it.
        """


class WeightReceiver(Protocol):
    """A serving rank's end."""

    def receive(self, tensors: Mapping[str, Tensor], policy_version: int, timeout_s: float = 60.0) -> Check | None:
        """Waits for exactly that version and fills `tensors` in place. It may be called again, also after it raised.

        Args:
            tensors: this rank's buffers, as its layout says; on any device.
            timeout_s: seconds to wait for the senders.

        Returns:
            None when the tensors are known to hold what was published. Or what finds it out, and raises as this does:
            it is called once, maybe in another thread while a model computes with the tensors, which neither change nor
            move until it has returned. Nothing that was made with them leaves the worker before.

        Raises:
            rlinf_comm.errors.WeightTimeout: the version has not come in time; the text names it.
            rlinf_comm.errors.WeightMismatchError: what came is not what was published. Nothing may be served then.
        """


class WeightSync(Protocol):
    """The driver's part of one edge, which lives as long as the executor.

    Constructed as `cls(edge, reshard, **options)`: `edge` is its name, for messages, and `options` are what the recipe
    says under `cluster.weight_sync_options`. In the workers only the two functions are called, each once for a rank,
    those of the senders first. Either raises rlinf_workers.errors.WeightSyncRefused where it cannot work.
    """

    @property
    def address(self) -> Any:
        """How a worker's process finds it: plain values, or records of rlinf_comm."""

    @staticmethod
    def open_sender(port: WeightPort) -> WeightSender: ...

    @staticmethod
    def open_receiver(port: WeightPort) -> WeightReceiver: ...
