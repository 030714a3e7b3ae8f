"""Tasks: where problems and their answers come from."""

from rlinf.tasks.base import Problem, Task, make_task

__all__ = ["Problem", "Task", "make_task"]
