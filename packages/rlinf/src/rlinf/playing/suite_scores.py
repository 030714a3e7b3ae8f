"""Scores of a suite: success of each variant with its interval, and its drop relative to `seen`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlinf.config.suites import AXES, SEEN
from rlinf.playing.paired import Z_95
from rlinf_envs import EpisodeEnd

COLUMNS = ("axis", "variant", "episodes", "success at end", "95 % interval", "drop", "at any time", "return")


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantScore:
    """Success of one variant."""

    name: str
    axis: str
    """One of `AXES`; "" for seen."""
    about: str
    num_episodes: int
    success_at_end: float
    interval: tuple[float, float]
    """95 % Wilson interval."""
    success_once: float
    return_: float
    drop: float
    """Success of `seen` minus that of this variant."""
    by_task: Mapping[str, float]
    """Task -> success at end, if the environment has several."""


def wilson(num_right: int, num_all: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share of which `num_right` of `num_all` samples are right; E. B. Wilson, 1927.

    Example: wilson(0, 10) is (0.0, 0.278), and wilson(5, 10) is (0.237, 0.763).
    """
    share, spread = num_right / num_all, Z_95**2 / num_all
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def score(name: str, axis: str, about: str, ends: Sequence[EpisodeEnd], seen: float | None) -> VariantScore:
    """Args:
    ends: episodes of an environment that defines success.
    seen: success of `seen`; None for `seen` itself.
    """
    right = [bool(end.success_at_end) for end in ends]
    tasks: dict[str, list[bool]] = defaultdict(list)
    for end, was_right in zip(ends, right, strict=True):
        if end.task is not None:
            tasks[end.task].append(was_right)
    share = fmean(right)
    return VariantScore(
        name=name,
        axis=axis,
        about=about,
        num_episodes=len(ends),
        success_at_end=share,
        interval=wilson(sum(right), len(right)),
        success_once=fmean([bool(end.success_once) for end in ends]),
        return_=fmean([end.return_ for end in ends]),
        drop=0.0 if seen is None else seen - share,
        by_task={task: fmean(outcomes) for task, outcomes in sorted(tasks.items())},
    )


def axis_means(scores: Sequence[VariantScore]) -> dict[str, float]:
    """Returns axis -> mean success of its variants, for the evaluated axes."""
    by_axis = {axis: [one.success_at_end for one in scores if one.axis == axis] for axis in AXES}
    return {axis: fmean(shares) for axis, shares in by_axis.items() if shares}


def rows(scores: Sequence[VariantScore]) -> list[tuple[str, ...]]:
    """Returns rows of `COLUMNS`: seen, then the variants of each axis followed by their mean."""
    means, seen = axis_means(scores), scores[0].success_at_end
    table = [_row(scores[0])]
    for axis, mean in means.items():
        table += [_row(one) for one in scores if one.axis == axis]
        table.append((axis, "mean", "", f"{mean:.1%}", "", _drop(seen - mean), "", ""))
    return table


def to_json(scores: Sequence[VariantScore]) -> dict[str, Any]:
    """Returns the scores for result.json."""
    seen = scores[0].success_at_end
    return {
        "variants": {
            one.name: {
                "axis": one.axis or None,
                "about": one.about,
                "num_episodes": one.num_episodes,
                "success_at_end": one.success_at_end,
                "interval_95": list(one.interval),
                "drop": one.drop,
                "success_once": one.success_once,
                "return": one.return_,
                **({"by_task": dict(one.by_task)} if one.by_task else {}),
            }
            for one in scores
        },
        "axes": {axis: {"success_at_end": mean, "drop": seen - mean} for axis, mean in axis_means(scores).items()},
    }


def _row(one: VariantScore) -> tuple[str, ...]:
    low, high = one.interval
    return (
        one.axis or "-",
        one.name,
        str(one.num_episodes),
        f"{one.success_at_end:.1%}",
        f"{low:.1%} to {high:.1%}",
        "" if one.name == SEEN else _drop(one.drop),
        f"{one.success_once:.1%}",
        f"{one.return_:.3f}",
    )


def _drop(share: float) -> str:
    return f"{share:+.1%}"
