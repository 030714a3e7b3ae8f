"""Notices a run that learns nothing because no completion is scored better than another of its prompt."""

from __future__ import annotations

from collections.abc import Mapping

METRIC = "actor/groups_without_advantage"
NUM_STEPS = 3
"""One step without a signal is common with hard problems and few prompts."""


class LearningSignal:
    """Watches the share of groups without an advantage in a run's steps."""

    def __init__(self) -> None:
        self._num_steps = 0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Returns what to tell the user, once, after the first `NUM_STEPS` steps in a row without a signal."""
        shares = [value for name, value in metrics.items() if name == METRIC or name.endswith(f"/{METRIC}")]
        if set(shares) != {1.0}:
            self._num_steps = 0
            return None
        self._num_steps += 1
        if self._num_steps != NUM_STEPS:
            return None
        reward = f" (mean {metrics['reward/mean']:.2f})" if "reward/mean" in metrics else ""
        return (
            f"nothing was learned in the last {NUM_STEPS} steps: all completions of a prompt got the same reward"
            f"{reward}. Look at completions in samples.jsonl or the report: either the reward does not recognize right "
            "answers, or the problems are far too hard or too easy"
        )
