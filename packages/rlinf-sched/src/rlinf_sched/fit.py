"""Fits a profile's table to measured hand-overs, and reports its error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlinf_sched.errors import ProfileError
from rlinf_sched.profile import InstanceProfile, TimePoint


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSample:
    """The busiest instance of a stage in one step."""

    num_items: int
    """Items in each hand-over."""
    seconds: float
    """Seconds of one hand-over, the mean over the instance's hand-overs."""
    fixed_s: float = 0.0
    """The part of `seconds` that does not depend on the number of items (the way from one process to the next)."""
    step_s: float = 0.0
    """Seconds once per step, after the last hand-over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedTimes:
    """A table of times, and its errors."""

    points: tuple[TimePoint, ...]
    step_s: float
    num_samples: int
    spread: float
    """Median of |sample / table - 1|: noise that no table can fit."""
    left_out: float | None
    """Largest |table / measured - 1| when a size is left out of the table and predicted from the others; None with
    fewer than three sizes."""

    def describe(self) -> str:
        """One line: `3 sizes, 8 to 32 items; 9 steps, spread 2.1%; a size left out is predicted within 4.0%`."""
        sizes = [point.num_items for point in self.points]
        span = f"{sizes[0]} items" if len(sizes) == 1 else f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]} items"
        text = f"{span}; {self.num_samples} steps, spread {self.spread:.1%}"
        return text if self.left_out is None else f"{text}; a size left out is predicted within {self.left_out:.1%}"


def fit_stage(samples: Sequence[StageSample]) -> FittedTimes:
    """The median of each size, to ignore a few disturbed steps; if noise makes more items take less time, both get
    their mean. If only one size was measured, one item takes the whole fixed part and its share of the rest.

    Raises:
        ProfileError: no samples, or one without items or time.
    """
    if not samples:
        raise ProfileError("a stage has no measured hand-overs, so nothing can be fitted; run it at least once")
    by_size: dict[int, list[float]] = {}
    for sample in samples:
        if sample.num_items < 1 or not sample.seconds > 0 or sample.step_s < 0:
            raise ProfileError(f"{sample}: num_items must be at least 1, seconds positive, step_s not negative")
        by_size.setdefault(sample.num_items, []).append(sample.seconds)
    table = _ascending({size: median(times) for size, times in sorted(by_size.items())})
    errors = [abs(sample.seconds / table[sample.num_items] - 1) for sample in samples]
    return FittedTimes(
        points=_points(_with_one_item(table, median(sample.fixed_s for sample in samples))),
        step_s=median(sample.step_s for sample in samples),
        num_samples=len(samples),
        spread=median(errors),
        left_out=max(_left_out_errors(table), default=None),
    )


def _ascending(table: Mapping[int, float]) -> dict[int, float]:
    """The nearest non-decreasing table: runs of sizes that decrease get their mean (pool adjacent violators)."""
    runs: list[tuple[float, int]] = []
    for seconds in table.values():
        runs.append((seconds, 1))
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            (left, many), (right, more) = runs[-2:]
            runs[-2:] = [((left * many + right * more) / (many + more), many + more)]
    level = [seconds for seconds, count in runs for _ in range(count)]
    return dict(zip(table, level, strict=True))


def _with_one_item(table: Mapping[int, float], fixed_s: float) -> Mapping[int, float]:
    (size, seconds), *others = table.items()
    if others or size == 1 or not 0 < fixed_s < seconds:
        return table
    return {1: fixed_s + (seconds - fixed_s) / size, **table}


def _points(table: Mapping[int, float]) -> tuple[TimePoint, ...]:
    return tuple(TimePoint(num_items=size, seconds=seconds) for size, seconds in table.items())


def _left_out_errors(table: Mapping[int, float]) -> list[float]:
    if len(table) < 3:
        return []
    errors = []
    for size, measured in table.items():
        others = {other: seconds for other, seconds in table.items() if other != size}
        errors.append(abs(InstanceProfile(points=_points(others)).seconds(size) / measured - 1))
    return errors
