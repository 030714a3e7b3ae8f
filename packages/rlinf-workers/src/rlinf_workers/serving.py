"""The common base of workers that act or generate with weights that other workers train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from rlinf_comm.weights import Layout
from rlinf_comm.weights.layouts import is_adapter_tensor
from rlinf_workers.engines.base import GenerationEngine, RemoteWeights, SupportsDiscard, SupportsMemoryReport
from rlinf_workers.models.placement import HOST, HostPlaces, MovedModel, tensors_of
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import WeightPort, WeightReceiver
from rlinf_workers.worker import Worker


class ServedModule:
    """A torch module that serves on one device and is offloaded to the host; its tensors are the canonical ones."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._moved = MovedModel(module, HostPlaces())
        self._discarded: frozenset[str] = frozenset()
        """Weights that the next sync will fill."""

    def weights(self) -> Mapping[str, Tensor]:
        return tensors_of(self._module)

    def onload(self) -> None:
        if not self._moved.is_on(self._device):
            self._moved.return_to(self._device, self._discarded)
        self._discarded = frozenset()

    def offload(self) -> None:
        if not self._moved.is_on(HOST):
            self._moved.leave(self._discarded)

    def discard(self) -> None:
        """`offload` for weights that a sync fills after `onload`, before they are read: they are not copied in either
        direction. Of a model with an adapter that is only the adapter."""
        if not self._moved.is_on(HOST):
            names = self.weights().keys()
            self._discarded = frozenset(filter(is_adapter_tensor, names)) or frozenset(names)
            self._moved.leave(self._discarded)


def layout_of_group(engine: GenerationEngine, num_ranks: int) -> Layout:
    """Describes the weights that the engines of `num_ranks` ranks serve: those of a replica, of one rank if all hold
    the same, or of the engines' own processes."""
    layout = engine.layout()
    num_engines = num_ranks if isinstance(engine, RemoteWeights) else num_ranks // layout.num_ranks
    return Layout(layout.specs, layout.ranks * num_engines)


class ServedPolicy:
    """One of several policies that a worker serves: the target of the weights of whoever trains it.

    Args:
        num_ranks: of the worker's group.
    """

    def __init__(self, engine: GenerationEngine, num_ranks: int) -> None:
        self._engine, self._num_ranks = engine, num_ranks
        self.version = -1
        """Of its weights; -1: none have been received yet."""

    def weights(self) -> Mapping[str, Tensor]:
        return self._engine.weights()

    def layout(self) -> Layout:
        return layout_of_group(self._engine, self._num_ranks)

    @property
    def checks_first(self) -> bool:
        return isinstance(self._engine, RemoteWeights)

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        if isinstance(self._engine, RemoteWeights):
            return self._engine.open_receiver(ports)
        return WEIGHT_SYNCS.get(ports[0].weight_sync).open_receiver(ports[0])

    def weights_received(self, policy_version: int) -> None:
        self.version = policy_version
        self._engine.weights_received(policy_version)


class ServingWorker(Worker):
    """Labels its outputs with the version of its weights. A subclass sets `_served` in its constructor."""

    _served: GenerationEngine | ServedModule
    _version = -1
    """No weights have been received yet."""

    @property
    def policy_version(self) -> int:
        return self._version

    def asking(self) -> AbstractContextManager[object]:
        """Context for waits for the engine's processes, if it has any."""
        return self._host.waits.waiting("engine", processes=self.serving_processes)

    def serving_processes(self) -> Sequence[int]:
        return self._served.process_ids() if isinstance(self._served, RemoteWeights) else ()

    def serving_reserved_bytes(self) -> int | None:
        return self._served.reserved_bytes() if isinstance(self._served, SupportsMemoryReport) else None

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version

    def weights(self) -> Mapping[str, Tensor]:
        return self._served.weights()

    @property
    def checks_first(self) -> bool:
        return isinstance(self._served, RemoteWeights)

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        if isinstance(self._served, RemoteWeights):
            return self._served.open_receiver(ports)
        return super().open_receiver(ports)

    def onload(self) -> None:
        with self.asking():
            self._served.onload()

    def offload(self) -> None:
        with self.asking():
            self._served.offload()

    def discard(self) -> None:
        if isinstance(self._served, SupportsDiscard):
            with self.asking():
                self._served.discard()
        else:
            self.offload()
