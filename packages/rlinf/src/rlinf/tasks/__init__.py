"""Tasks: where problems and their answers come from."""

from rlinf.tasks.base import Problem, Task
from rlinf.tasks.choose import make_task

__all__ = ["Problem", "Task", "make_task"]
