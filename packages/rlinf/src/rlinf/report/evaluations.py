"""The report's section on robot evaluations: success by task for each evaluation, and films."""

from __future__ import annotations

from rlinf.report import html
from rlinf.report.axes import percent
from rlinf.report.records import RunRecords
from rlinf.run_folder.plain_files import read_plain

BY_TASK = "success_at_end/"
MAX_COLUMNS = 10
"""Maximum number of evaluations in the table: the first, the last, and some in between."""
LEGEND = (
    "The same episodes at each evaluation, without exploration. Green frames are successes, red ones failures; amber "
    "is an episode that succeeded and lost it again."
)


def success_by_task(records: RunRecords) -> str:
    """Returns a table with a row per task and a column per evaluation; empty without tasks."""
    tasks = sorted(name for name in records.metric_names(evaluation=True) if name.startswith(BY_TASK))
    evaluations = _some(list({row["step"]: row for row in records.evaluations}.values()))
    rows = [(name.removeprefix(BY_TASK), *(_cell(row["metrics"].get(name)) for row in evaluations)) for name in tasks]
    if rows:
        rows.append(("all", *(_cell(row["metrics"].get("success_at_end")) for row in evaluations)))
    columns = ("task", *(f"step {row['step']:,}" for row in evaluations))
    return html.section(
        "Success by task",
        html.table(columns, rows, numeric=range(1, len(columns))),
        note="Evaluation episodes that end in success." if rows else "",
    )


def films(records: RunRecords) -> str:
    """Returns the last and the first film; other films are only named."""
    files = {
        step: file for step, file in records.films.items() if any(row["step"] == step for row in records.evaluations)
    }
    steps = dict.fromkeys([*list(files)[-1:], *list(files)[:1]])
    parts = []
    for step in steps:
        film = html.video(read_plain(files[step], within=records.path), f"film after {step} steps")
        parts.append(f'<p class="sub">After {step:,} training steps</p>{film}<br>')
    others = len(files) - len(steps)
    more = f" {others} more are in {next(iter(files.values())).parent.name}/." if others else ""
    return html.section("Films of evaluations", *parts, note=LEGEND + more if parts else "")


def _cell(share: float | None) -> str:
    return "-" if share is None else html.shaded(share, percent(share))


def _some(rows: list) -> list:
    """Returns at most `MAX_COLUMNS` rows, evenly spread, including the first and the last."""
    if len(rows) <= MAX_COLUMNS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (MAX_COLUMNS - 1))] for i in range(MAX_COLUMNS)]
