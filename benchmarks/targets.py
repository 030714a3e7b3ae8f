"""How docs/performance.md shows whether a target was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def marked(text: str, *, meets: bool) -> str:
    """The text of a cell, with a mark if its value misses the target."""
    return text if meets else f"{text} **missed**"


@dataclass(frozen=True, kw_only=True)
class RatioTarget:
    """The target of a comparison, for the ratio of medians."""

    value: float
    is_limit: bool = False
    """True: at most `value`; False: at least."""
    numerators: Sequence[str] = ()
    """Sides of the comparison that have the target; empty: all."""

    def cell(self, comparison: dict[str, Any]) -> str:
        """Returns the target and whether this comparison meets it; "" if it has none."""
        if self.numerators and comparison["numerator"] not in self.numerators:
            return ""
        ratio = comparison["ratio_of_medians"]
        meets = ratio <= self.value if self.is_limit else ratio >= self.value
        text = f"at {'most' if self.is_limit else 'least'} {self.value:g}:"
        return f"{text} met" if meets else marked(text, meets=False)


@dataclass(frozen=True, kw_only=True)
class LearningTarget:
    """From at most `before` to at least `after` within `seconds` of training."""

    after: float
    before: float = float("inf")
    seconds: float = float("inf")

    def is_met(self, run: dict[str, Any]) -> bool:
        return run["before"] <= self.before and run["after"] >= self.after and run["training_s"] <= self.seconds
