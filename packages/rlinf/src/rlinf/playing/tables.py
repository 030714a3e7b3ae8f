"""Tables and summaries of episodes, for the terminal, the page and result.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rlinf.playing.suite_scores import wilson
from rlinf_envs import EpisodeEnd, outcome_of

EPISODE_COLUMNS = ("task", "seed", "outcome", "return", "length")
SUMMARY_COLUMNS = ("task", "episodes", "success at end", "95 % interval", "at any time", "return", "length")


def by_task(episodes: Sequence[EpisodeEnd]) -> list[EpisodeEnd]:
    """Sorts episodes by task, then by seed."""
    return sorted(episodes, key=lambda end: (end.task or "", end.seed))


def episode_row(end: EpisodeEnd) -> tuple[str, ...]:
    """Returns a row of `EPISODE_COLUMNS`."""
    return (end.task or "-", str(end.seed), outcome_of(end), f"{end.return_:.3f}", str(end.length))


def summary_rows(
    episodes: Sequence[EpisodeEnd], groups: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[str, ...]]:
    """Returns rows of `SUMMARY_COLUMNS`: each task, or each group of tasks, if there are several, and all.

    Args:
        groups: task -> group.
    """
    members = in_groups(episodes, groups)
    rows = [_summary_row(name, ends) for name, ends in members.items()]
    names = list(members)
    return [*rows, _summary_row("all", episodes)] if len(names) != 1 else rows


def in_groups(episodes: Sequence[EpisodeEnd], groups: Mapping[str, str]) -> dict[str, list[EpisodeEnd]]:
    """Returns task, or its group -> episodes, sorted by name; empty if the environment has one task."""
    members: dict[str, list[EpisodeEnd]] = {}
    for end in episodes:
        if end.task is not None:
            members.setdefault(groups.get(end.task, end.task), []).append(end)
    return dict(sorted(members.items()))


def summary(episodes: Sequence[EpisodeEnd]) -> dict[str, Any]:
    """Returns means over the episodes, and the 95 % Wilson interval of success at end; success is None if the
    environment does not define it."""
    outcomes = [end.success_at_end for end in episodes if end.success_at_end is not None]
    return {
        "num_episodes": len(episodes),
        "success_at_end": _mean(outcomes),
        "interval_95": list(wilson(sum(map(bool, outcomes)), len(outcomes))) if outcomes else None,
        "success_once": _mean([end.success_once for end in episodes]),
        "return": _mean([end.return_ for end in episodes]),
        "episode_length": _mean([end.length for end in episodes]),
    }


def _summary_row(name: str, episodes: Sequence[EpisodeEnd]) -> tuple[str, ...]:
    means = summary(episodes)
    at_end, once = ("-" if means[key] is None else f"{means[key]:.1%}" for key in ("success_at_end", "success_once"))
    interval = " to ".join(f"{bound:.1%}" for bound in means["interval_95"] or ()) or "-"
    numbers = (f"{means['return']:.3f}", f"{means['episode_length']:.1f}")
    return (name, str(len(episodes)), at_end, interval, once, *numbers)


def _mean(values: Sequence[float | bool | None]) -> float | None:
    numbers = [float(value) for value in values if value is not None]
    return fmean(numbers) if numbers else None  # rounds once, like the metrics of a run
