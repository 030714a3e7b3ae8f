"""How long a run of a flow may take before it is given up: many times what it should take.

`run.step_timeout_s` decides where it is set. Else the limit is TIMES_EXPECTED times the longest of what the plan
predicts and what runs of the same flow (training steps, evaluations) took so far, and LEAST_S where that is less. A
flow of which neither is known gets UNKNOWN_S. What judging may take comes on top: a policy whose programs all hang
makes a step slow, and must not end the run by it.

Departs from watch.py, which explains a step long before it is given up.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMES_EXPECTED = 10.0
LEAST_S = 600.0
"""Some hangs end by themselves: a simulator is replaced after up to 300 s, and its episode begins again."""
UNKNOWN_S = 3600.0
"""A first step may compile kernels, capture graphs and read weights; nobody has seen one yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimit:
    """A limit, and why it is that."""

    limit_s: float
    reason: str


class Deadlines:
    """The limits of a run, whatever plans it has.

    Args:
        chosen_s: `run.step_timeout_s`; None: limits follow from what is known.
        judging_s: what judging the completions of a run takes where each comes to the reward's own limits.
    """

    def __init__(self, chosen_s: float | None, judging_s: float = 0.0) -> None:
        self._chosen_s, self._judging_s = chosen_s, judging_s
        self._slowest_s: dict[str, float] = {}

    def took(self, flow: str, duration_s: float) -> None:
        """A run of that flow has ended well."""
        self._slowest_s[flow] = max(duration_s, self._slowest_s.get(flow, 0.0))

    def of(self, flow: str, predicted_s: float | None = None) -> StepLimit:
        """For the next run of a flow.

        Args:
            predicted_s: what its plan says; None where nothing was predicted.
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
