"""A launcher of one's own: the local one, with a file that says how often each method of each worker was called."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlinf_workers.launchers import LocalLauncher, ServiceHandler, Wait, WorkerHandle, WorkerSpec


class CountingHandle:
    def __init__(self, name: str, handle: WorkerHandle, calls: Counter[str]) -> None:
        self._name = name
        self.handle = handle
        self._calls = calls

    def call(self, method: str, /, *args: Any, lane: int = 0) -> Future[Any]:
        self._calls[f"{self._name} {method}"] += 1
        return self.handle.call(method, *args, lane=lane)

    @property
    def is_lost(self) -> bool:
        return self.handle.is_lost


class CountingLauncher:
    def __init__(self, *, counts_file: str = "", **settings: Any) -> None:
        self._counts_file = counts_file
        self._calls: Counter[str] = Counter()
        self._local = LocalLauncher(**settings)

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        return CountingHandle(spec.identity.name, self._local.start(spec), self._calls)

    def serve(self, service: str, handler: ServiceHandler) -> None:
        self._local.serve(service, handler)

    @property
    def lost(self) -> Future[None]:
        return self._local.lost

    def forget_lost(self) -> None:
        self._local.forget_lost()

    def end(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, CountingHandle)
        self._local.end(handle.handle)

    def waits(self) -> list[Wait]:
        return self._local.waits()

    def shutdown(self) -> None:
        self._local.shutdown()
        if self._counts_file:
            Path(self._counts_file).write_text("\n".join(f"{n} {name}" for name, n in sorted(self._calls.items())))
