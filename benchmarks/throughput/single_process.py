"""The workers of a flow in this process, without channels, leases, executor or digests: what a plain loop would cost.

The classes, their settings and so the arithmetic are those of the flow. Items pass by reference, weights are copied
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlinf_workers import Flow, StepContext
from rlinf_workers.embodied.environment import Environment
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.metrics import merge
from rlinf_workers.records.embodied import GroupObservation


class ListWriter:
    """A writer that keeps what was put."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any, *, key: int = 0) -> None:
        self.items.append(item)

    def put_many(self, items: Sequence[tuple[int, Any]]) -> None:
        self.items.extend(item for _, item in items)

    def drain(self) -> list[Any]:
        items, self.items = self.items, []
        return items


class SingleProcess:
    """One worker for each group of a flow, all in this process."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.workers: dict[str, Any] = {}
        self._hosts: dict[str, WorkerHost] = {}
        for name, definition in flow.workers.items():
            identity = Identity(role=name, rank=0, num_ranks=1, devices=("cpu:0",), rendezvous="")
            self._hosts[name] = WorkerHost(identity, _refuse)
            self.workers[name] = self._hosts[name].make(definition.worker_class, *definition.arguments)

    def begin(self, context: StepContext) -> None:
        """Tells every worker which run its next stage takes part in."""
        for host in self._hosts.values():
            host.step = context

    def run_stages(self, flow: Flow, feeds: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The stages of a flow without cycles, one after the other on whole batches; the items of every channel."""
        channels = dict(feeds)
        for (name,) in flow.graph().turns():
            definition = flow.stages[name]
            readers = [[channels[channel]] for channel in definition.stage.reads]
            writers = [ListWriter() for _ in definition.stage.writes]
            getattr(self.workers[definition.stage.worker], definition.method)(*readers, *writers)
            for channel, writer in zip(definition.stage.writes, writers, strict=True):
                channels[channel] = writer.items
        return channels

    @torch.no_grad()
    def copy_weights(self) -> None:
        """What a weight sync does on every edge of the flow."""
        for edge in self._flow.graph().weight_edges:
            source, target = self.workers[edge.source], self.workers[edge.target]
            trained = source.weights()
            for name, tensor in target.weights().items():
                tensor.copy_(trained[name])
            target.weights_received(source.policy_version)

    def metrics(self) -> dict[str, float]:
        """The metrics of everything that ran since the last call."""
        return merge(host.metrics.drain() for host in self._hosts.values())

    def forget_rows(self) -> None:
        """Drops the rows that were shown to people."""
        for host in self._hosts.values():
            host.shown.clear()


class EnvironmentLoop:
    """The reader that a policy iterates: every action that it has put is simulated before it gets the next
    observation, one environment group after the other.

    It drives the steps of `Environment` itself, since `Environment.interact` waits for its actions in a loop of its
    own.
    """

    def __init__(self, environment: Environment, actions: ListWriter) -> None:
        self._environment = environment
        self._actions = actions

    def __iter__(self) -> Iterator[list[GroupObservation]]:
        groups = {group.index: group for group in self._environment._prepare()}
        ready = [self._environment._begin_segment(group) for group in groups.values()]
        while ready:
            yield [ready.pop(0)]
            for action in self._actions.drain():
                ready.append(self._environment._step(groups[action.group], action))


def _refuse(service: str, value: Any, *, wants_reply: bool = True) -> Any:
    raise AssertionError(f"a worker without a driver asked for the service {service!r}")
