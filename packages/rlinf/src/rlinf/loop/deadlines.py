"""Time limits for a run of a flow: many times its expected duration.

`run.step_timeout_s` is the limit if it is set. Otherwise the limit is TIMES_EXPECTED times the maximum of the plan's
prediction and of earlier runs of the same flow (training steps, evaluations), and at least LEAST_S. A flow without
either has UNKNOWN_S. The time limits of judging are added: a policy whose programs all hang makes a step slow, which
must not end the run.

watch.py explains a slow step long before this limit.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMES_EXPECTED = 10.0
LEAST_S = 600.0
"""Minimum limit, since some hangs resolve themselves: a simulator is replaced after up to 300 s, and its episode
restarts."""
UNKNOWN_S = 3600.0
"""Limit without a prediction or an earlier run; a first step may compile kernels, capture graphs and read weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimit:
    """A time limit and its reason."""

    limit_s: float
    reason: str


class Deadlines:
    """The limits of a run under any plans.

    Args:
        chosen_s: `run.step_timeout_s`; None: limits are derived from predicted and measured times.
        judging_s: seconds that judging the completions takes if each reaches the reward's own limits.
    """

    def __init__(self, chosen_s: float | None, judging_s: float = 0.0) -> None:
        self._chosen_s, self._judging_s = chosen_s, judging_s
        self._slowest_s: dict[str, float] = {}

    def took(self, flow: str, duration_s: float) -> None:
        """Records the duration of a successful run of the flow."""
        self._slowest_s[flow] = max(duration_s, self._slowest_s.get(flow, 0.0))

    def of(self, flow: str, predicted_s: float | None = None) -> StepLimit:
        """The limit for the next run of a flow.

        Args:
            predicted_s: the plan's prediction; None if there is none.
        """
        if self._chosen_s is not None:
            return StepLimit(limit_s=self._chosen_s, reason="run.step_timeout_s says so")
        sources = {"what its plan predicts": predicted_s, "its slowest run so far": self._slowest_s.get(flow)}
        estimates = [(seconds, what) for what, seconds in sources.items() if seconds is not None]
        if not estimates:
            return StepLimit(limit_s=UNKNOWN_S + self._judging_s, reason="nothing was known of how long it takes")
        seconds, what = max(estimates)
        return StepLimit(
            limit_s=max(LEAST_S, TIMES_EXPECTED * seconds) + self._judging_s,
            reason=f"{TIMES_EXPECTED:.0f} times {what}, {seconds:.1f} s, and at least {LEAST_S:.0f} s"
            + (f"; {self._judging_s:.0f} s more for rewards at their limits" if self._judging_s else ""),
        )
