"""Detects lasting drift of a stage's measured times from their predictions: a two-sided CUSUM of log(measured /
predicted)."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_sched.errors import SchedError, did_you_mean
from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem
from rlinf_sched.profile import Profiles
from rlinf_sched.simulator import simulate

_WINDOW = 20
"""Steps from which noise and the size of a drift are estimated."""
_CLIP = 3.0
"""Deviations are clipped to this many standard deviations: one slow step is no drift."""


def cusum_threshold(slack: float, false_alarms_per_step: float) -> float:
    """Threshold at which a two-sided CUSUM of standard normal values has this rate of false alarms.

    Siegmund's approximation of the mean steps between false alarms of one side, (exp(2kb) - 2kb - 1) / 2k^2 with
    b = h + 1.166 (D. Siegmund, Sequential Analysis, 1985), solved for h by halving; both sides together alarm twice as
    often.

    Args:
        slack: k, what is taken off each value, in standard deviations; above 0.
        false_alarms_per_step: above 0.
    """
    target_length = 2.0 / false_alarms_per_step
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        exponent = min(2 * slack * (middle + 1.166), 700.0)
        length = (math.exp(exponent) - exponent - 1) / (2 * slack**2)
        low, high = (middle, high) if length < target_length else (low, middle)
    return high


@dataclass(kw_only=True, slots=True)
class DriftDetector:
    """Watches the times of one stage for lasting drift.

    The noise is estimated as the median absolute difference of successive steps: a lasting drift does not change it,
    and no single step decides it.
    """

    least_drift: float = 0.1
    """Smallest relative change that matters."""
    false_alarms_per_step: float = 1e-3
    """Maximum false alarms per step without drift."""
    least_noise: float = 0.02
    """Lower bound of the estimated standard deviation of log(measured / predicted)."""
    first_noise: float = 0.05
    """Standard deviation assumed until there are enough steps to estimate it."""
    _values: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _up: float = 0.0
    _down: float = 0.0
    _num_up: int = 0
    _num_down: int = 0

    def observe(self, measured_s: float, predicted_s: float) -> float | None:
        """Adds one step.

        Returns:
            the factor by which the stage has become slower (above 1) or faster, if the drift is lasting; the detector
            then starts anew. None otherwise.
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
        """Forgets all steps, for a new prediction."""
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


@dataclass(kw_only=True, slots=True)
class DriftMonitor:
    """Watches the stages of a run under one plan, and rescales the profiles of those that have drifted.

    Example: after every step
        for stage, factor in monitor.observe(measured).items():
            monitor.rescale(stage, factor)
    """

    problem: Problem
    plan: Plan
    detector: DriftDetector = field(default_factory=DriftDetector)
    """The detector whose settings are used for every stage."""
    step_s: float = field(default=0.0, init=False)
    """Predicted seconds of a step."""
    predicted_s: Mapping[str, float] = field(default_factory=dict, init=False)
    """Stage -> seconds of computing in a step, on its busiest instance."""
    _detectors: dict[str, DriftDetector] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        settings = {
            name: getattr(self.detector, name)
            for name in ("least_drift", "false_alarms_per_step", "least_noise", "first_noise")
        }
        self._detectors = {stage.name: DriftDetector(**settings) for stage in self.problem.flow.stages}
        self._predict()

    def observe(self, measured_s: Mapping[str, float]) -> dict[str, float]:
        """Adds a step.

        Args:
            measured_s: stage -> seconds that its busiest instance computed; stages may be missing.

        Returns:
            stage -> factor, for stages with lasting drift.

        Raises:
            SchedError: no such stage, or a time that is not positive.
        """
        drifted = {}
        for name, seconds in measured_s.items():
            if name not in self._detectors:
                raise SchedError(f"measured_s has {name!r}{did_you_mean(name, self._detectors)}")
            if not seconds > 0:
                raise SchedError(f"measured_s[{name!r}]={seconds} must be positive; leave out a stage that did not run")
            factor = self._detectors[name].observe(seconds, self.predicted_s[name])
            if factor is not None:
                drifted[name] = factor
        return drifted

    def rescale(self, stage: str, factor: float) -> None:
        """Multiplies every time in the stage's profile by `factor`."""
        profile = self.problem.profile(stage)
        instances = tuple(
            replace(
                instance,
                points=tuple(replace(point, seconds=point.seconds * factor) for point in instance.points),
                step_s=instance.step_s * factor,
            )
            for instance in profile.instances
        )
        stages = {**self.problem.profiles.stages, stage: replace(profile, instances=instances)}
        self.problem = replace(self.problem, profiles=Profiles(stages=stages))
        self._predict()

    def _predict(self) -> None:
        timeline = simulate(self.problem, self.plan)
        self.step_s = timeline.step_s
        predicted = {name: timeline.busiest_s(name, "compute", "step") for name in timeline.stages}
        for name, seconds in predicted.items():
            if seconds != self.predicted_s.get(name):
                self._detectors[name].reset()
        self.predicted_s = predicted
