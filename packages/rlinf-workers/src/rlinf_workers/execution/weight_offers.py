"""Weights that a stage may take before it ends."""

from __future__ import annotations

import threading

from rlinf_workers.errors import WorkersError


class WeightOffers:
    """The versions that stages of a worker may take before they end, by edge. Any thread adds them."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._changed = threading.Condition()
        self._end = ""

    def add(self, edge: str, policy_version: int) -> None:
        """A version has been published."""
        with self._changed:
            self._newest[edge] = policy_version
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """No further version will be published."""
        with self._changed:
            self._end = reason
            self._changed.notify_all()

    def newest(self, edge: str) -> int:
        """The version that was published last; -1: none."""
        return self._newest.get(edge, -1)

    def wait_for(self, edge: str, policy_version: int) -> None:
        """Returns when the version has been published. Raises: WorkersError if it will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self.newest(edge) >= policy_version or self._end)
        if self.newest(edge) < policy_version:
            raise WorkersError(f"weights {edge}: version {policy_version} will not be published: {self._end}")

    def taken(self, edge: str, policy_version: int) -> None:
        """A stage serves this version, which was offered."""
        self._taken[edge] = policy_version

    def at_least(self, edge: str, policy_version: int) -> int:
        """The version that a stage begins with: this one, unless an earlier stage took a newer one."""
        return max(policy_version, self._taken.get(edge, policy_version))
