"""The report's section on who waited for whom, and on the age of the weights that sampled."""

from __future__ import annotations

from rlinf.report import html
from rlinf.report.axes import percent
from rlinf.report.records import RunRecords
from rlinf.report.waits import Cause, Waits
from rlinf_sched.explain import seconds

MAX_ROWS = 12
"""Newest steps with a row each."""
AGE = "rollout/staleness_{}_fraction"
"""Metric with the share of the tokens or environment steps whose weights were so many steps old."""


def draw_waits(waits: Waits | None, records: RunRecords) -> str:
    """Returns the section as HTML; empty if generation and training share devices."""
    if waits is None:
        return ""
    first, last = waits.steps[0] + 1, waits.steps[-1] + 1
    return html.section(
        "Who waited for whom",
        html.table(("", "waits for", "share of the time", "a step", "longest", ""), _pairs(waits), numeric=(2, 3, 4)),
        html.folded("Step by step", html.table(_columns(waits), _steps(waits, records), numeric=range(0, 99))),
        _ages(records),
        note=f"{waits.advice()} Steps {first} to {last}; means over the workers of a group.",
    )


def _pairs(waits: Waits) -> list[tuple[str, ...]]:
    """A row for each group and what it waits for."""
    trained = f"before step n: until step n - {waits.max_staleness + 1} has been trained"
    kinds: tuple[tuple[str, Cause, str], ...] = (
        *((group, "weights", trained) for group in waits.generation),
        *((group, "samples", "samples of its step") for group in waits.training),
        *(
            (group, "pause", "evaluations, checkpoints and the driver")
            for group in (*waits.generation, *waits.training)
        ),
    )
    rows = []
    for group, cause, text in kinds:
        mine = [wait for wait in waits.waits if (wait.group, wait.cause) == (group, cause)]
        if not mine:
            continue
        longest = max(mine, key=lambda wait: wait.duration_s)
        share = waits.share(group, cause)
        rows.append(
            (
                group,
                text,
                percent(share),
                seconds(waits.seconds(group, cause) / len(waits.steps)),
                f"{seconds(longest.duration_s)}, step {longest.step + 1}",
                html.share_bar(min(share, 1.0), "var(--wait)"),
            )
        )
    return rows


def _columns(waits: Waits) -> tuple[str, ...]:
    return (
        "step",
        *(f"{group} waited for weights" for group in waits.generation),
        "until this step was trained",
        *(f"{group} waited for samples" for group in waits.training),
        "pause",
        "time of the step",
    )


def _steps(waits: Waits, records: RunRecords) -> list[tuple[str, ...]]:
    """A row for each of the newest steps."""
    times = {row["step"]: row["metrics"].get("time/step_s") for row in records.metrics}

    def text(duration_s: float | None) -> str:
        return seconds(duration_s) if duration_s else "-"

    return [
        (
            f"{step + 1:,}",
            *(text(waits.seconds(group, "weights", step)) for group in waits.generation),
            f"{step - waits.max_staleness:,}" if step > waits.max_staleness else "-",
            *(text(waits.seconds(group, "samples", step)) for group in waits.training),
            text(waits.seconds(waits.generation[0], "pause", step)),
            text(times.get(step)),
        )
        for step in waits.steps[-MAX_ROWS:]
    ]


def _ages(records: RunRecords) -> str:
    """A table of the tokens or environment steps by the age of the weights that sampled them."""
    names = {age: AGE.format(age) for age in range(9)}
    series = {age: records.series(name) for age, name in names.items() if len(records.series(name))}
    rows = [
        (
            "the newest" if age == 0 else f"{age} step{'s' if age > 1 else ''} older",
            percent(sum(values.values) / len(values)),
            percent(values.values[-1]),
            html.share_bar(sum(values.values) / len(values), f"var(--c{age % 7})"),
        )
        for age, values in series.items()
    ]
    return html.table(("sampled by weights that are", "of all steps", "of the last step", ""), rows, numeric=(1, 2))
