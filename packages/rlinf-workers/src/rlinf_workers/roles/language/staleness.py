"""The staleness of what the actor trains on: how many training steps older than the actor's weights are those that
sampled."""

from __future__ import annotations

from collections import deque

from rlinf_workers.roles.records.language import SampleGroup


class Staleness:
    """The staleness of the tokens of each step.

    Example: max_staleness 1, two optimizer steps in each training step. The third training step begins with version 4,
    the one before began with 2: tokens of version 4 have staleness 0, of version 2 staleness 1; there are no others.
    """

    def __init__(self, max_staleness: int) -> None:
        self._first_versions: deque[int] = deque(maxlen=max_staleness + 1)
        """Policy versions with which the latest training steps began, the current one last."""
        self.largest = 0
        """The largest staleness of the tokens of this step so far."""

    @property
    def max_staleness(self) -> int:
        """The bound."""
        return (self._first_versions.maxlen or 1) - 1

    def begin_step(self, policy_version: int) -> None:
        """Begins a training step.

        Args:
            policy_version: version of the actor's weights.
        """
        self._first_versions.append(policy_version)
        self.largest = 0

    def of(self, group: SampleGroup) -> dict[int, int]:
        """Training steps by which the weights that sampled tokens of the group are older than the actor's -> number of
        these tokens."""
        versions, counts = group.token_versions()[group.loss_mask.bool()].unique(return_counts=True)
        allowed = list(self._first_versions)[::-1]
        num_tokens: dict[int, int] = {}
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            assert version in allowed, (
                f"completions of prompt {group.index} have tokens of policy version {version}; with max_staleness="
                f"{self.max_staleness} this step may train on versions {allowed}"
            )
            num_tokens[allowed.index(version)] = count
        self.largest = max(self.largest, *num_tokens, 0)
        return num_tokens
