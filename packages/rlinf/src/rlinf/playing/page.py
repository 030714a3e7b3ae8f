"""Played episodes as one HTML page: the film, tables, and the actions and rewards of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlinf.playing.tables import EPISODE_COLUMNS, SUMMARY_COLUMNS, by_task, episode_row, summary, summary_rows
from rlinf.report import html
from rlinf.report.axes import number, percent
from rlinf.report.curves import Curve, Line, draw
from rlinf.report.records import Series
from rlinf_envs import EpisodeEnd, RecordedEpisode, outcome_of

NUM_COLORS = 8
MAX_DIMENSIONS = 16
"""Maximum number of action dimensions drawn."""


def render(
    title: str,
    line: str,
    episodes: Sequence[EpisodeEnd],
    recorded: Sequence[RecordedEpisode],
    film: Path | None,
    notes: Sequence[str],
    groups: Mapping[str, str],
) -> str:
    """Returns the page, without external resources.

    Args:
        line: text below the title.
        recorded: the episodes whose actions and rewards are drawn.
        groups: task -> the group that the summary shows it in.
    """
    ordered = sorted(recorded, key=lambda episode: (episode.end.task or "", episode.end.seed))
    body = [
        html.header(title, line, badge=f"{len(episodes)} episodes"),
        _numbers(episodes),
        html.notes("Notes", notes),
        html.section("Film", html.video(film.read_bytes(), "film of the episodes") if film else "", note=_LEGEND),
        html.section("By task", html.table(SUMMARY_COLUMNS, summary_rows(episodes, groups), numeric=range(1, 7))),
        html.section(
            "Episodes",
            html.table(EPISODE_COLUMNS, [episode_row(end) for end in by_task(episodes)], numeric=(1, 3, 4)),
        ),
        html.section("Actions and rewards", *(f'<div class="curves">{plots(episode)}</div>' for episode in ordered)),
    ]
    return html.document(title, body, footer="Written by rlinf play.")


_LEGEND = "Green frames are successes, red ones failures; amber is an episode that succeeded and lost it again."


def plots(episode: RecordedEpisode) -> str:
    """Draws one episode as HTML: its actions, a line per dimension, and its rewards."""
    end = episode.end
    which = f"{end.task}, seed {end.seed}" if end.task else f"seed {end.seed}"
    actions = episode.actions.reshape(len(episode.actions), -1)[:, :MAX_DIMENSIONS]
    lines = [_line(f"{i}", actions[:, i], i) for i in range(actions.shape[1])]
    drawings = (
        Curve(title=f"Actions ({which})", lines=tuple(lines), axis="steps of the episode"),
        Curve(
            title=f"Rewards ({which}: {outcome_of(end)})",
            lines=(_line("reward", episode.rewards, 0),),
            axis="steps of the episode",
        ),
    )
    return "".join(draw(drawing) for drawing in drawings)


def _line(label: str, values: np.ndarray, place: int) -> Line:
    steps, numbers = range(1, len(values) + 1), (float(value) for value in values)
    return Line(
        label=label, series=Series(steps=tuple(steps), values=tuple(numbers)), color=f"var(--c{place % NUM_COLORS})"
    )


def _numbers(episodes: Sequence[EpisodeEnd]) -> str:
    means = summary(episodes)
    shares = {"success at the end": means["success_at_end"], "success at any time": means["success_once"]}
    cells = [(label, percent(share)) for label, share in shares.items() if share is not None]
    if means["interval_95"] is not None:
        cells.insert(1, ("95 % interval", " to ".join(map(percent, means["interval_95"]))))
    cells += [("mean return", number(means["return"])), ("mean length", number(means["episode_length"]))]
    return html.boxes(cells, main=cells[0][0])
