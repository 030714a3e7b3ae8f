"""Which task a config means."""

from __future__ import annotations

from rlinf.config.tasks import AddTask, FilesTask, SortTask
from rlinf.tasks.arithmetic import AddDigits, SortDigits
from rlinf.tasks.base import Task
from rlinf.tasks.files import FileProblems


def make_task(config: SortTask | AddTask | FilesTask, seed: int) -> Task:
    """The task that a config names.

    Raises: UserError for a data file that is missing or of another format, and for bad rows where they stop the run.
    """
    if isinstance(config, SortTask):
        return SortDigits(config.num_digits, config.num_held_out, seed)
    if isinstance(config, AddTask):
        return AddDigits(config.num_digits, config.num_held_out, seed)
    return FileProblems(config, seed)
