"""The staleness of what an actor trains on: how many training steps older than its weights are those that sampled."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from rlinf_workers.worker import Worker


class Staleness:
    """The staleness of the samples of each step: tokens of completions, or steps of environments.

    Example: max_staleness 1, two optimizer steps in each training step. The third training step begins with version 4,
    the one before began with 2: samples of version 4 have staleness 0, of version 2 staleness 1; there are no others.
    """

    def __init__(self, max_staleness: int) -> None:
        self._first_versions: deque[int] = deque(maxlen=max_staleness + 1)
        """Policy versions with which the latest training steps began, the current one last."""
        self.num_samples: Counter[int] = Counter()
        """Staleness -> number of samples of this step so far."""

    @property
    def max_staleness(self) -> int:
        """The bound."""
        return (self._first_versions.maxlen or 1) - 1

    def begin_step(self, policy_version: int) -> None:
        """Begins a training step.

        Args:
            policy_version: version of the actor's weights. Older than that of an earlier step if a checkpoint was
                loaded.
        """
        while self._first_versions and self._first_versions[-1] > policy_version:
            self._first_versions.pop()
        self._first_versions.append(policy_version)
        self.num_samples.clear()

    def state(self) -> dict[str, list[int]]:
        """For a checkpoint; empty if the bound is 0."""
        return {"first_versions": list(self._first_versions)} if self.max_staleness else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._first_versions.clear()
        self._first_versions.extend(state.get("first_versions", []))

    def add(self, by_version: Mapping[int, int], source: str) -> None:
        """Counts samples that the step trains on. Without effect if the bound is 0.

        Args:
            by_version: policy version -> number of samples that its weights have drawn.
            source: begins the sentence of an error, for example "completions of prompt 3 have tokens".

        Raises: AssertionError if any are older than the bound.
        """
        if not self.max_staleness:
            return
        allowed = list(self._first_versions)[::-1]
        for version, count in by_version.items():
            assert version in allowed, (
                f"{source} of policy version {version}; with max_staleness={self.max_staleness} this step may train on "
                f"versions {allowed}"
            )
            self.num_samples[allowed.index(version)] += count

    def record(self, worker: Worker) -> None:
        """Records the staleness of the step's samples; every rank of the actor calls. Without effect if the bound is
        0."""
        if not self.max_staleness:
            return
        for staleness, count in self.num_samples.items():
            worker.record("rollout/staleness_mean", staleness, weight=count)
        if total := self.num_samples.total():
            for staleness in range(self.max_staleness + 1):
                share = self.num_samples[staleness] / total
                worker.record(f"rollout/staleness_{staleness}_fraction", share, weight=total)
        worker.record("rollout/staleness_max", max(worker.ranks.objects(max(self.num_samples, default=0))))
