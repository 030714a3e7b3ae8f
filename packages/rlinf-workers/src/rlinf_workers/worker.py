"""Worker: the base class of everything that runs in a process of its own.

A worker's methods are ordinary loops over ports; which devices it has, whether it shares them, how many items come in
a chunk and how many ranks work beside it is decided by the plan and never shows in the class.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from rlinf_comm.records import record
from rlinf_workers.launcher.base import Identity, Wait
from rlinf_workers.metrics import MetricTable
from rlinf_workers.spans import WaitTable

if TYPE_CHECKING:
    from rlinf_workers.collectives import RankGroup
    from rlinf_workers.execution.stage_call import StageCall

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


class RequestSender(Protocol):
    """Asks a service of the driver, `lease` for example; the future holds its reply.

    Without `wants_reply` it is a message that nobody answers, and the future stays as it is.
    """

    def __call__(self, service: str, value: Any, *, wants_reply: bool = True) -> Future[Any]: ...


class Worker:
    """Base of all workers.

    The process makes the object, attaches its identity and only then calls `__init__`, so that `rank`, `num_ranks`
    and `device` are there from the first line. A subclass takes its settings as constructor arguments (anything that
    can cross a channel).
    """

    _identity: Identity
    _request: RequestSender

    def attach(self, identity: Identity, request: RequestSender) -> None:
        """Called once by the process, before `__init__`."""
        self._identity = identity
        self._request = request
        self._waits = WaitTable()
        self._metrics = MetricTable()
        self._shown: list[dict[str, str | float]] = []
        self._local = threading.local()
        self._body_lock = threading.RLock()
        self._ranks: RankGroup | None = None
        self._weight_ports: dict[str, Any] = {}
        self._loaded = True
        self._num_inside = 0

    # -- who and where ---------------------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        return self._identity.role

    @property
    def rank(self) -> int:
        return self._identity.rank

    @property
    def num_ranks(self) -> int:
        return self._identity.num_ranks

    @property
    def name(self) -> str:
        """`role/rank`"""
        return f"{self.role}/{self.rank}"

    @property
    def devices(self) -> tuple[str, ...]:
        return self._identity.devices

    @property
    def device(self) -> torch.device:
        """Where tensors of this worker live. The launcher shows a worker only its own GPUs, so the first is
        `cuda:0`."""
        return torch.device("cuda", 0) if any(name.startswith("cuda") for name in self.devices) else torch.device("cpu")

    @property
    def step(self) -> StepContext:
        """The run of the flow that the calling stage takes part in."""
        context = getattr(self._local, "step", None)
        if context is None:
            raise RuntimeError(f"{self.name}: no flow is running in this thread, so there is no step")
        return context

    @property
    def ranks(self) -> RankGroup:
        """Collectives among the ranks of this worker group; connects at first use, by all ranks together."""
        if self._ranks is None:
            from rlinf_workers.collectives import RankGroup

            self._ranks = RankGroup.connect(self._identity)
        return self._ranks

    def record(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds to a metric of this run; the driver shows the mean over all stages and ranks, weighted by `weight`."""
        self._metrics.add(name, value, weight)

    def record_spread(self, name: str, value: float) -> None:
        """Adds to a metric of this run; the driver shows the standard deviation over all stages and ranks."""
        self._metrics.add(name, value, is_spread=True)

    def show(self, row: Mapping[str, str | float]) -> None:
        """Hands a few words to people: the row goes to the run's samples file. For a handful of rows a run, not for
        data."""
        self._shown.append(dict(row))

    # -- what a subclass may override ------------------------------------------------------------------------------

    def onload(self) -> None:
        """Brings the state that computing needs back onto the devices. Called with the lease held, before the first
        chunk."""

    def offload(self) -> None:
        """Takes the state off the devices for whoever shares them. Called just before the lease is given back."""

    def weights(self) -> Mapping[str, Tensor]:
        """The canonical tensors (Hugging Face names) that this worker trains or serves; a receiver's are filled in
        place."""
        raise NotImplementedError(f"{type(self).__name__} takes part in a weight sync and has to define weights()")

    def weights_received(self, policy_version: int) -> None:
        """Called when `weights()` hold that version, verified; a serving worker stamps what it makes with it."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken, for a worker that trains; the version served, for one that generates."""
        return 0

    def close(self) -> None:
        """Called when the process ends in good order."""

    # -- what the framework calls ----------------------------------------------------------------------------------

    def run_stage(self, call: StageCall) -> Any:
        """Runs one stage for one run of the flow; see execution/stage_runner.py."""
        from rlinf_workers.execution.stage_runner import StageRunner

        return StageRunner(self, call).run()

    def unload(self) -> None:
        """Takes the state off the devices until the worker's first turn."""
        self.offload()
        self._loaded = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or the caching allocator keeps what others on this device need

    def open_weights(self, port: Any) -> None:
        """Opens one end of a weight edge; see execution/weight_sync.py."""
        from rlinf_workers.links.shared import open_port

        self._weight_ports[port.edge] = open_port(port)

    def weight_specs(self) -> dict[str, Any]:
        """Shapes and dtypes of `weights()`."""
        from rlinf_comm.weights import specs_of

        return dict(specs_of(self.weights()))

    def publish_weights(self, edge: str) -> int:
        """Publishes `weights()` on one edge; returns the version."""
        self._weight_ports[edge].publish(self.weights(), self.policy_version)
        return self.policy_version

    def memory_bytes(self) -> tuple[int, int]:
        """What this process holds of its device at the moment, and at most since it began; of the host's memory on a
        CPU slot."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        return resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def current_waits(self) -> list[Wait]:
        return [Wait(waiter=waiter, target=target, since_s=since) for waiter, target, since in self._waits.current()]
