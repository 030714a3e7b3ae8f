"""One screen about a checked set-up."""

from __future__ import annotations

import math

from rlinf.cli.table import aligned, wrapped
from rlinf.conventions.checked import ConventionVerdict
from rlinf.conventions.scoring import OpenLoopError

MAX_NUMBERS = 8
"""Numbers of an action with a column of their own."""
NUM_TRIED = 6


def verdict_text(title: str, verdict: ConventionVerdict) -> str:
    """Returns a verdict as text for the terminal."""
    frames = verdict.frames
    about = f"{title}: {len(frames.actions)} frames of {frames.num_demonstrations} demonstrations"
    parts = [about, _errors(verdict), _tried(verdict), _lines(verdict), _conclusion(verdict)]
    return "\n\n".join(part for part in parts if part)


def _errors(verdict: ConventionVerdict) -> str:
    size = len(verdict.search.as_configured.error.by_number)
    columns = range(min(size, MAX_NUMBERS))
    rows: list[tuple[str, ...]] = [("open-loop error", "all", *(f"number {n}" for n in columns))]
    result = verdict.search
    rows.append(_row("as configured", result.as_configured.error, columns))
    if result.causes:
        rows.append(_row("with the changes below", result.explained.error, columns))
    rows += [_row(name, error, columns) for name, error in verdict.baselines.items()]
    return aligned(rows)


def _row(name: str, error: OpenLoopError, columns: range) -> tuple[str, ...]:
    numbers = [error.by_number[n].item() for n in columns]
    return (name, f"{error.mean:.2f}", *("-" if math.isnan(number) else f"{number:.2f}" for number in numbers))


def _tried(verdict: ConventionVerdict) -> str:
    base = verdict.search.as_configured.error.mean
    rows = [("one change at a time", "convention", "error", "difference")]
    for trial in verdict.search.singles[:NUM_TRIED]:
        (one,) = trial.alternatives
        rows.append((one.change, one.convention, f"{trial.error.mean:.2f}", f"{trial.error.mean - base:+.2f}"))
    return aligned(rows)


def _lines(verdict: ConventionVerdict) -> str:
    lines = [verdict.replays.text] if verdict.replays is not None else []
    lines += verdict.lines
    if verdict.refused:
        lines.append(f"not tried: {', '.join(verdict.refused)}")
    return "\n".join(line for text in lines for line in wrapped(text, indent=0))


def _conclusion(verdict: ConventionVerdict) -> str:
    if not verdict.causes:
        if verdict.predicts:
            return (
                f"nothing is wrong: none of {verdict.search.num_trials - 1} changes predicts the demonstrations better."
            )
        return (
            f"UNEXPLAINED: the policy predicts these demonstrations no better than the mean action, and none of "
            f"{verdict.search.num_trials - 1} changes explains it. Is it a policy for this task, and were its weights "
            "loaded?"
        )
    lines = []
    for number, cause in enumerate(verdict.causes, start=1):
        lines.append(f"CAUSE {number}: {cause.convention}: {cause.change}")
        lines += wrapped(f"{cause.evidence}", indent=4)
        lines += wrapped(f"-> {cause.setting}", indent=4)
        for other in cause.equivalents:
            lines += wrapped(f"or, as good: {other.convention}: {other.change} -> {other.setting}", indent=4)
    for cause in verdict.causes:
        if cause.hides:
            lines += wrapped(f"NOTE: {cause.hides}.", indent=0)
    return "\n".join(lines)
