"""Tasks: sources of problems and their answers."""

from __future__ import annotations

from rlinf.config.tasks import AddTask, FilesTask, SortTask
from rlinf.tasks.arithmetic import GeneratedTask, add_digits, sort_digits
from rlinf.tasks.base import Task, TaskProblem
from rlinf.tasks.files import FileProblems

__all__ = ["TaskProblem", "Task", "make_task"]


def make_task(config: SortTask | AddTask | FilesTask, seed: int, *, needs_answer: bool = True) -> Task:
    """Creates the task of a config.

    Args:
        needs_answer: whether the reward compares completions with an answer, so that every row must have one.

    Raises: UserError for a data file that is missing or of another format, and for bad rows with `on_bad_row: stop`.
    """
    if isinstance(config, FilesTask):
        return FileProblems(config, seed, needs_answer=needs_answer)
    draw = sort_digits if isinstance(config, SortTask) else add_digits
    return GeneratedTask(draw, config.num_digits, config.num_held_out, seed)
