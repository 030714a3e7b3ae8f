"""Compares runs: a row each, what differs in their configs, curves over each other, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.load import differences
from rlinf.errors import UserError
from rlinf.glossary import SHARE
from rlinf.report import html
from rlinf.report.axes import number, percent
from rlinf.report.curves import NUM_COLORS, Curve, Line, draw
from rlinf.report.metric_names import EVALUATION, SCORES, panels_of, score_name, unit_of
from rlinf.report.picture import write_picture
from rlinf.report.records import RunRecords, read_run
from rlinf.run_folder.rows import write_file

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantile of Student's t distribution for 1 to 9 degrees of freedom; above, the normal distribution's 1.96."""
COLUMNS = ("run", "score", "before", "after", "best", "steps", "time", "compute by stage, all ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run, finished or under way."""

    label: str
    records: RunRecords
    score: str | None
    """Metric of its evaluations that is its score; None before the first evaluation."""

    @property
    def scores(self) -> tuple[float, ...]:
        return () if self.score is None else self.records.series(self.score, evaluation=True).values

    def text(self, value: float) -> str:
        """As the terminal shows it too, which prints no no-break space."""
        return percent(value).replace("\N{NO-BREAK SPACE}", " ") if self.score in SCORES else number(value)

    def row(self) -> tuple[str, ...]:
        """Its cells of `COLUMNS`."""
        result, scores = self.records.result, self.scores
        best = result.get("best")
        times = sorted(result.get("stage_seconds", {}).items(), key=lambda item: -item[1])
        training_s = result.get("training_s") or max(
            (row.get("time_s") or 0 for row in self.records.metrics), default=0
        )
        num_steps = self.records.num_steps_done
        return (
            self.label,
            str(self.score or "-"),
            self.text(scores[0]) if scores else "-",
            self.text(scores[-1]) if scores else "-",
            "-" if best is None else f"{self.text(best['score'])} ({best['checkpoint']})",
            f"{num_steps:,}" if result else f"{num_steps:,}, not finished",
            f"{training_s:.0f} s",
            ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in times) or "-",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedGroup:
    """Runs whose configs differ in the seed alone, at least two."""

    runs: tuple[ComparedRun, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """Mean of the last scores, and half of its 95 % interval by Student's t."""
        values = [run.scores[-1] for run in self.runs]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        quantile = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else 1.96
        return mean, quantile * math.sqrt(variance / len(values))

    def describe(self) -> str:
        run, (mean, half) = self.runs[0], self.interval
        seeds = ", ".join(str(one.records.config.get("seed")) for one in self.runs)
        return f"{run.score} of {len(self.runs)} seeds ({seeds}): {run.text(mean)} ± {run.text(half)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRuns:
    """Several runs."""

    runs: tuple[ComparedRun, ...]
    differences: Mapping[str, tuple[Any, ...]]
    """Dotted key -> its value in each run, for the keys whose values differ."""
    groups: tuple[SeedGroup, ...]

    @property
    def difference_rows(self) -> list[tuple[str, ...]]:
        """A key and its values as text, for each key that differs."""
        return [
            (key, *("-" if value is None else str(value) for value in values))
            for key, values in self.differences.items()
        ]


def compare(paths: Sequence[Path]) -> ComparedRuns:
    """Reads runs. Raises: UserError for a folder that holds no run."""
    labels = [path.resolve().name for path in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in paths]
    runs = []
    for label, path in zip(labels, paths, strict=True):
        records = read_run(path)
        runs.append(ComparedRun(label=label, records=records, score=score_name(records)))
    configs = [dict(run.records.config) for run in runs]
    keys = dict.fromkeys(key for config in configs[1:] for key in differences(configs[0], config))
    values = {key: tuple(_value(config, key) for config in configs) for key in keys}
    by_config: dict[str, list[ComparedRun]] = {}
    for run in runs:
        rest = {key: value for key, value in run.records.config.items() if key != "seed"}
        if run.scores:
            by_config.setdefault(repr((rest, run.score)), []).append(run)
    groups = tuple(SeedGroup(runs=tuple(group)) for group in by_config.values() if len(group) > 1)
    return ComparedRuns(runs=tuple(runs), differences=values, groups=groups)


def write_comparison(comparison: ComparedRuns, path: Path) -> None:
    """Writes the page, or the picture of the curves if the name ends in .png. Raises: UserError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".png":
        write_file(path, render(comparison))
        return
    runs = comparison.runs
    curves = _curves(runs, [f"C{i}" for i in range(len(runs))])
    if not curves:
        raise UserError(f"--output={path}: no run has a metric yet", hint="compare them after their first steps")
    write_picture(curves, path)


def render(comparison: ComparedRuns) -> str:
    """Returns the page, without external resources."""
    runs = comparison.runs
    colors = [f"var(--c{i % NUM_COLORS})" for i in range(len(runs))]
    cells = [run.row() for run in runs]
    changed = comparison.difference_rows
    figures = "".join(draw(curve) for curve in _curves(runs, colors))
    body = [
        html.header("Runs compared", ", ".join(run.label for run in runs), badge=f"{len(runs)} runs"),
        html.section("Scores", html.table(COLUMNS, cells, numeric=(2, 3, 5, 6))),
        html.notes("Over seeds", [f"{group.describe()}, 95 % interval" for group in comparison.groups]),
        html.section(
            "What differs",
            html.table(("key", *(run.label for run in runs)), changed) or '<p class="sub">Nothing but the folder.</p>',
        ),
        html.section(
            "Curves",
            html.color_key(zip((run.label for run in runs), colors, strict=True)),
            f'<div class="curves">{figures}</div>' if figures else "",
        ),
    ]
    return html.document("Runs compared", body, footer="Written by rlinf compare.")


def _curves(runs: Sequence[ComparedRun], colors: Sequence[str]) -> list[Curve]:
    """A plot for each metric of the reports' main plots, with a line a run."""
    charts = []
    for title, metrics in panels_of([run.records for run in runs]).items():
        for name, label in metrics.items():
            own_name, is_evaluation = name.removeprefix(EVALUATION), name.startswith(EVALUATION)
            lines = tuple(
                Line(label=run.label, series=series, color=color, has_marks=is_evaluation)
                for run, color in zip(runs, colors, strict=True)
                if len(series := run.records.series(own_name, evaluation=is_evaluation))
            )
            if lines:
                unit = unit_of(own_name, evaluation=is_evaluation)
                what = title if len(metrics) == 1 else f"{title}: {label}"
                is_share = unit == SHARE
                charts.append(Curve(title=what, lines=lines, unit="" if is_share else unit, is_share=is_share))
    return charts


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
