"""The workers of a flow in this process, without channels, leases, executor or digests: what a plain loop would cost.

The classes, their settings and so the arithmetic are those of the flow. Items pass by reference, weights are copied
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlinf_workers import Flow, InProcessWorkers
from rlinf_workers.roles import Environment
from rlinf_workers.roles.records.embodied import GroupObservation


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


class SingleProcess(InProcessWorkers):
    """Runs the stages of a flow one after the other."""

    def run_stages(self, flow: Flow, feeds: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The stages of a flow without cycles, one after the other on whole batches; the items of every channel."""
        channels = dict(feeds)
        for (name,) in flow.graph().turns():
            definition = flow.stages[name]
            readers = [[channels[channel]] for channel in definition.stage.reads]
            writers = [ListWriter() for _ in definition.stage.writes]
            getattr(self[definition.stage.worker], definition.method)(*readers, *writers)
            for channel, writer in zip(definition.stage.writes, writers, strict=True):
                channels[channel] = writer.items
        return channels


class EnvironmentLoop:
    """The reader that a policy iterates: every action that it has put is simulated before it gets the next
    observation, one environment group after the other.
    """

    def __init__(self, environment: Environment, actions: ListWriter) -> None:
        self._environment = environment
        self._actions = actions

    def __iter__(self) -> Iterator[list[GroupObservation]]:
        ready = self._environment.begin_segments()
        while ready:
            yield [ready.pop(0)]
            for action in self._actions.drain():
                ready.extend(self._environment.advance(action))
