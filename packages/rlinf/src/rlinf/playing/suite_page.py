"""A suite's scores as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlinf.playing.suite_scores import COLUMNS, VariantScore, axis_means, rows
from rlinf.report import html
from rlinf.report.axes import percent

NOTE = (
    "Each variant has the same number of episodes and, where it names no other, the same seeds as seen. The interval "
    "is Wilson's, of 95 %; the drop is the success of seen less that of the variant."
)


def render(title: str, line: str, scores: Sequence[VariantScore], film: Path | None, notes: Sequence[str]) -> str:
    """Returns the page, without external resources.

    Args:
        scores: `seen` is the first.
        film: film of some episodes of each variant.
    """
    cells = [("seen", percent(scores[0].success_at_end))]
    cells += [(f"{axis}, mean of variants", percent(mean)) for axis, mean in axis_means(scores).items()]
    shares = {one.name: one.success_at_end for one in scores}
    table_rows = [
        tuple(html.shaded(shares[row[1]], cell) if i == 3 and row[1] in shares else cell for i, cell in enumerate(row))
        for row in rows(scores)
    ]
    facts = [(one.name, one.about) for one in scores]
    body = [
        html.header(title, line, badge=f"{len(scores) - 1} variants"),
        html.boxes(cells, main="seen"),
        html.notes("Notes", notes),
        html.section("Success by variant", html.table(COLUMNS, table_rows, numeric=range(2, 8)), note=NOTE),
        html.section("What is other", html.facts(facts)),
        _by_task(scores),
        html.section("Film", html.video(film.read_bytes(), "film of the variants") if film else ""),
    ]
    return html.document(title, body, footer="Written by rlinf eval --suite.")


def _by_task(scores: Sequence[VariantScore]) -> str:
    tasks = sorted({task for one in scores for task in one.by_task})
    table = [
        (
            one.name,
            *(
                html.shaded(one.by_task[task], percent(one.by_task[task])) if task in one.by_task else "-"
                for task in tasks
            ),
        )
        for one in scores
    ]
    numeric = range(1, len(tasks) + 1)
    return html.section("Success by task", html.table(("variant", *tasks), table, numeric=numeric) if tasks else "")
