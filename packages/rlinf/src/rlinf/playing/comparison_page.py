"""A comparison of two policies as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.playing.comparison_scores import FLIP_COLUMNS, TASK_COLUMNS, ComparisonScore, flip_rows, task_rows
from rlinf.playing.paired import difference_interval
from rlinf.playing.protocol import flat
from rlinf.report import html
from rlinf.report.axes import percent

PAGE, TITLE = "compare.html", "A and B on the same starts"
NOTE = (
    "Both policies had the same starts. The interval is Tango's score interval for paired shares, of 95 %; p is "
    "that of McNemar's exact test, by task adjusted for the number of tasks (Holm). They hold for these tasks and "
    "starts, not for other trainings of the same policies."
)
FILM_NOTE = "A start in each row, A on the left and B on the right. Green frames are successes, red ones failures."


def render(
    line: str,
    score: ComparisonScore,
    protocol: Mapping[str, Any],
    film: Path | None,
    notes: Sequence[str],
) -> str:
    """Returns the page, without external resources.

    Args:
        protocol: as in result.json.
    """
    outcomes = score.outcomes
    low, high = difference_interval(outcomes)
    cells = [
        ("B - A", f"{outcomes.difference * 100:+.1f} points"),
        ("95 % interval", f"{low * 100:+.1f} to {high * 100:+.1f}"),
        ("McNemar's p", f"{score.p_value:.3g}"),
        ("A", percent(outcomes.success_a)),
        ("B", percent(outcomes.success_b)),
        ("only A succeeds", str(outcomes.only_a)),
        ("only B succeeds", str(outcomes.only_b)),
        ("episodes for two points", f"{score.needed:,}"),
    ]
    body = [
        html.header(TITLE, line, badge=f"{outcomes.num_starts} starts"),
        html.boxes(cells, main="B - A"),
        html.notes("Notes", [score.verdict, *notes, NOTE]),
        html.section("By task", html.table(TASK_COLUMNS, task_rows(score), numeric=range(1, 8))),
        html.section("Film", html.video(film.read_bytes(), "film of flipped starts") if film else "", note=FILM_NOTE),
        html.section("Flipped starts", html.table(FLIP_COLUMNS, flip_rows(score), numeric=(1,))),
        html.section("Protocol", html.facts(flat(protocol).items())),
    ]
    return html.document(TITLE, body, footer="Written by rlinf eval --compare.")
