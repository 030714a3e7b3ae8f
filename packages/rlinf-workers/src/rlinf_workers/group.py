"""WorkerGroup: the ranks of one role, called together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlinf_workers.errors import FlowDefinitionError
from rlinf_workers.launcher.base import Launcher, WorkerHandle
from rlinf_workers.launcher.futures import gather


class WorkerGroup:
    """All processes of one role.

    Example: `group.call("save", folder)` runs `save(folder)` on every rank and returns their results by rank;
    `group.scatter("load", parts)` gives each rank its own argument; `group.call("save", folder, ranks=[0])` asks only
    the first.
    """

    def __init__(self, name: str, handles: Sequence[WorkerHandle], launcher: Launcher) -> None:
        self.name = name
        self.handles = tuple(handles)
        self._launcher = launcher

    @property
    def num_ranks(self) -> int:
        return len(self.handles)

    def start_call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, lane: int = 0
    ) -> list[Future[Any]]:
        """Calls without waiting; one future for each rank."""
        chosen = range(self.num_ranks) if ranks is None else ranks
        return [self.handles[rank].call(method, *args, lane=lane) for rank in chosen]

    def call(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Calls all ranks (or some) with the same arguments and waits.

        Raises: RemoteError, WorkerLost, TimeoutError.
        """
        return gather(self.start_call(method, *args, ranks=ranks), self._launcher.lost, timeout_s)

    def scatter(self, method: str, parts: Sequence[Any], *, timeout_s: float | None = None) -> list[Any]:
        """Calls rank i with parts[i] and waits."""
        if len(parts) != self.num_ranks:
            raise FlowDefinitionError(
                f"scatter to {self.name}: {len(parts)} parts for {self.num_ranks} ranks; give one for each"
            )
        futures = [handle.call(method, part) for handle, part in zip(self.handles, parts, strict=True)]
        return gather(futures, self._launcher.lost, timeout_s)
