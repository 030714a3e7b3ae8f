"""Tasks: sources of problems and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from rlinf.config.tasks import DrawnTaskConfig, FilesTask, GeneratedTaskConfig, TeamTask
from rlinf.tasks.arithmetic import GeneratedTask, add_digits, sort_digits
from rlinf.tasks.base import Task, TaskProblem
from rlinf.tasks.drawings import click_button, count_shapes, read_chart
from rlinf.tasks.files import FileProblems
from rlinf.tasks.games import cross_grid, multiply, repair_program, secret, two_roads

__all__ = ["TaskProblem", "Task", "make_task"]

DRAWS: Mapping[str, tuple[Callable[..., TaskProblem], str]] = {
    "sort": (sort_digits, "0123456789+="),
    "add": (add_digits, "0123456789+="),
    "calculate": (multiply, "0123456789*=[:]{}calc"),
    "repair": (repair_program, "0123456789*%=[:]{}()pythonxadFlse \n"),
    "roads": (two_roads, "bdfgklmnprtaeiou>[:]{}find1 \n"),
    "grid": (cross_grid, "abcdef123456<=lrud"),
    "team": (secret, "!01234567=wxyz"),
    "count-shapes": (count_shapes, "0123456789?=beilmruy"),
    "gui-click": (click_button, "0123456789(),= AEHTacikplt"),
    "chart-read": (read_chart, "0123456789=abcdegilmnopruy"),
}
"""Kind of a generated task -> what draws its problems, and its alphabet."""


def make_task(config: GeneratedTaskConfig | FilesTask, seed: int, *, needs_answer: bool = True) -> Task:
    """Creates the task of a config.

    Args:
        needs_answer: whether the reward compares completions with an answer, so that every row must have one.

    Raises: UserError for a data file that is missing or of another format, and for bad rows with `on_bad_row: stop`.
    """
    if isinstance(config, FilesTask):
        return FileProblems(config, seed, needs_answer=needs_answer)
    draw, alphabet = DRAWS[config.kind]
    return GeneratedTask(
        partial(draw, **config.sizes),
        "".join(dict.fromkeys(alphabet)),
        config.num_held_out,
        seed,
        holds_out=not isinstance(config, TeamTask),
        shuffles_pictures=isinstance(config, DrawnTaskConfig) and config.shuffle_pictures,
    )
