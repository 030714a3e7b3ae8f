"""What two evaluations on the same starts say about two policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from rlinf.playing.paired import PairedOutcomes, difference_interval, episodes_needed, holm, mcnemar
from rlinf.playing.suite_scores import wilson

TWO_POINTS = 0.02
"""The difference for which the needed number of episodes is given."""
SIGNIFICANT = 0.05
TASK_COLUMNS = ("task", "episodes", "A", "B", "difference", "only A", "only B", "p, adjusted")
FLIP_COLUMNS = ("task", "seed", "A", "B")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOutcome:
    """One start, and whether each policy succeeded from it."""

    task: str
    """"" if the environment has one task."""
    seed: int
    a: bool
    b: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonScore:
    """Both policies on all starts."""

    starts: tuple[StartOutcome, ...]
    """By task and seed."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Task -> the group that tables show it in; empty: each task has a row of its own."""

    @property
    def outcomes(self) -> PairedOutcomes:
        return PairedOutcomes.of((start.a, start.b) for start in self.starts)

    @property
    def flipped(self) -> tuple[StartOutcome, ...]:
        """Starts with different outcomes."""
        return tuple(start for start in self.starts if start.a != start.b)

    @property
    def by_task(self) -> dict[str, PairedOutcomes]:
        """Task, or its group -> outcomes; empty if there is only one."""
        pairs: dict[str, list[tuple[bool, bool]]] = {}
        for start in self.starts:
            pairs.setdefault(self.groups.get(start.task, start.task), []).append((start.a, start.b))
        return {name: PairedOutcomes.of(pairs[name]) for name in sorted(pairs)} if len(pairs) > 1 else {}

    @property
    def p_value(self) -> float:
        return mcnemar(self.outcomes.only_a, self.outcomes.only_b)

    @property
    def needed(self) -> int:
        """Episodes of each policy for which a difference of two points would be found, with as many flips as now."""
        return episodes_needed(TWO_POINTS, self.outcomes.num_flipped / self.outcomes.num_starts)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        outcomes = self.outcomes
        if self.p_value < SIGNIFICANT:
            better, other = ("B", "A") if outcomes.difference > 0 else ("A", "B")
            return f"{better} is better than {other} on these tasks (p = {self.p_value:.3g})"
        return (
            f"no difference is shown (p = {self.p_value:.3g}); to find one of two points with a chance of 80 %, play "
            f"{self.needed:,} episodes of each"
        )


def paired(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], groups: Mapping[str, str] = MappingProxyType({})
) -> ComparisonScore:
    """Joins the episodes of two policies by task and seed.

    Args:
        a: rows with task, seed and success_at_end.
        groups: task -> the group that tables show it in.

    Returns: the score of the starts that both have; the caller checks that these are all.
    """
    others = {(row["task"] or "", row["seed"]): bool(row["success_at_end"]) for row in b}
    own = {(row["task"] or "", row["seed"]): bool(row["success_at_end"]) for row in a}
    starts = [
        StartOutcome(task=task, seed=seed, a=own[task, seed], b=others[task, seed])
        for task, seed in sorted(own.keys() & others.keys())
    ]
    return ComparisonScore(starts=tuple(starts), groups=groups)


def summary_lines(score: ComparisonScore, names: Sequence[str]) -> list[str]:
    """Returns the result as lines of text.

    Args:
        names: of A and B.
    """
    outcomes, lines = score.outcomes, []
    shares = (outcomes.success_a, outcomes.success_b)
    for letter, name, share in zip("AB", names, shares, strict=True):
        low, high = wilson(round(share * outcomes.num_starts), outcomes.num_starts)
        lines.append(f"{letter}: {share:.1%} ({low:.1%} to {high:.1%}) of {outcomes.num_starts} episodes, {name}")
    low, high = difference_interval(outcomes)
    lines.append(
        f"B - A: {outcomes.difference * 100:+.1f} points, 95 % interval {low * 100:+.1f} to {high * 100:+.1f}; "
        f"{outcomes.only_b} starts succeed only with B, {outcomes.only_a} only with A; McNemar p = {score.p_value:.3g}"
    )
    lines.append(score.verdict)
    return lines


def task_rows(score: ComparisonScore) -> list[tuple[str, ...]]:
    """Returns rows of `TASK_COLUMNS`, one for each task; none if there is only one. The p-values are adjusted for the
    number of tasks."""
    by_task = score.by_task
    adjusted = holm([mcnemar(one.only_a, one.only_b) for one in by_task.values()])
    return [
        (
            name,
            str(one.num_starts),
            f"{one.success_a:.1%}",
            f"{one.success_b:.1%}",
            f"{one.difference * 100:+.1f}",
            str(one.only_a),
            str(one.only_b),
            f"{p_value:.3g}",
        )
        for (name, one), p_value in zip(by_task.items(), adjusted, strict=True)
    ]


def flip_rows(score: ComparisonScore) -> list[tuple[str, ...]]:
    """Returns rows of `FLIP_COLUMNS`."""
    return [(start.task or "-", str(start.seed), _word(start.a), _word(start.b)) for start in score.flipped]


def to_json(score: ComparisonScore) -> dict[str, Any]:
    """Returns the score for result.json."""
    outcomes = score.outcomes
    return {
        "num_episodes": outcomes.num_starts,
        "success_at_end": {"a": outcomes.success_a, "b": outcomes.success_b},
        "difference": outcomes.difference,
        "difference_interval_95": list(difference_interval(outcomes)),
        "mcnemar_p": score.p_value,
        "outcomes": asdict(outcomes),
        "episodes_for_two_points": score.needed,
        "by_task": {
            name: {
                **asdict(one),
                "difference": one.difference,
                "mcnemar_p": mcnemar(one.only_a, one.only_b),
            }
            for name, one in score.by_task.items()
        },
        "flipped": [asdict(start) for start in score.flipped],
        "verdict": score.verdict,
    }


def _word(success: bool) -> str:
    return "success" if success else "failure"
