"""From a recipe to a planning problem, with profiles derived from public shapes; nothing is loaded or run."""

from __future__ import annotations

from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf_sched.problem import Problem


def problem_of_recipe(config: Config) -> Problem:
    """The problem that a recipe poses on the devices it names.

    Raises: UserError for a recipe whose times nothing is known about.
    """
    raise UserError(
        f"{config.name}: the times of this recipe's stages are not known, so it cannot be planned",
        hint="give a problem file with profiles: docs/problem-file.md",
    )
