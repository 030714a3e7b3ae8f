"""Lasting drift of a stage's measured times from their predictions: a two-sided CUSUM of log(measured / predicted)."""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

_WINDOW = 20
"""Steps that noise and the size of a drift are taken from."""
_CLIP = 3.0
"""Standard deviations beyond which a step counts no more: one slow step is no drift."""


def cusum_threshold(slack: float, false_alarms_per_step: float) -> float:
    """Height at which a two-sided CUSUM of standard normal values alarms that rarely.

    Siegmund's approximation of the mean steps between false alarms of one side, (exp(2kb) - 2kb - 1) / 2k^2 with
    b = h + 1.166 (D. Siegmund, Sequential Analysis, 1985), solved for h by halving; both sides together alarm twice as
    often.

    Args:
        slack: k, what is taken off each value, in standard deviations; above 0.
        false_alarms_per_step: above 0.
    """
    wanted = 2.0 / false_alarms_per_step
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        exponent = min(2 * slack * (middle + 1.166), 700.0)
        length = (math.exp(exponent) - exponent - 1) / (2 * slack**2)
        low, high = (middle, high) if length < wanted else (low, middle)
    return high


@dataclass(kw_only=True, slots=True)
class DriftDetector:
    """Watches the times of one stage for lasting drift.

    The noise is estimated as the median absolute difference of successive steps: a lasting drift does not change it,
    and no single step decides it.
    """

    least_drift: float = 0.1
    """Least relative change that matters; smaller ones are ignored."""
    false_alarms_per_step: float = 1e-3
    """Most false alarms per step, where nothing has drifted."""
    least_noise: float = 0.02
    """Least standard deviation of log(measured / predicted); a smaller estimate is replaced by it."""
    first_noise: float = 0.05
    """Standard deviation that is assumed until there are enough steps to estimate it."""
    _values: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _up: float = 0.0
    _down: float = 0.0
    _num_up: int = 0
    _num_down: int = 0

    def observe(self, measured_s: float, predicted_s: float) -> float | None:
        """Takes in one step.

        Returns:
            the factor by which the stage has become slower (above 1) or faster, where the drift is lasting; the
            detector then begins anew. None otherwise.
        """
        value = math.log(measured_s / predicted_s)
        self._values.append(value)
        noise = self._noise()
        slack = max(math.log1p(self.least_drift) / (2 * noise), 0.25)
        scaled = min(max(value / noise, -slack - _CLIP), slack + _CLIP)
        self._up, self._num_up = _added(self._up, self._num_up, scaled - slack)
        self._down, self._num_down = _added(self._down, self._num_down, -scaled - slack)
        threshold = max(cusum_threshold(slack, self.false_alarms_per_step), 2 * _CLIP)
        if max(self._up, self._down) <= threshold:
            return None
        num_steps = min(self._num_up if self._up > self._down else self._num_down, len(self._values))
        factor = math.exp(float(np.median(list(self._values)[-num_steps:])))
        self.reset()
        return factor

    def reset(self) -> None:
        """Forgets what it saw, for a new prediction."""
        self._values.clear()
        self._up = self._down = 0.0
        self._num_up = self._num_down = 0

    def _noise(self) -> float:
        if len(self._values) < _WINDOW:
            return max(self.first_noise, self.least_noise)
        differences = np.abs(np.diff(np.array(self._values)))
        return max(float(np.median(differences)) * 1.4826 / math.sqrt(2), self.least_noise)


def _added(total: float, count: int, amount: float) -> tuple[float, int]:
    total = max(0.0, total + amount)
    return total, count + 1 if total else 0
