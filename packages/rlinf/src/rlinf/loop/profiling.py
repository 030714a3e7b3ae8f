"""Profiles of chosen training steps, for `run.profile_steps`: a trace of every worker in the run's folder.

profiles/steps-5-7/actor-0.json.gz     opens in ui.perfetto.dev, beside trace.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlinf_workers import Executor

PROFILES = "profiles"


class StepProfiles:
    """Begins and ends the profile around the chosen steps.

    Args:
        steps: the first and the last step, counted from 1 as on the terminal; None: no profile.
        folder: the run's.
        message: takes a line for whoever watches the run.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, message: Callable[[str], None]) -> None:
        self._steps, self._folder, self._message = steps, folder, message
        self._began: int | None = None
        """Number of the first step of the profile that is under way."""

    def before_step(self, step: int, executor: Executor) -> None:
        """Begins the profile if a step of the chosen ones comes next; `step` counts the steps done."""
        if self._steps is not None and self._began is None and self._steps[0] <= step + 1 <= self._steps[1]:
            executor.begin_profile()
            self._began = step + 1

    def after_step(self, num_done: int, executor: Executor, *, is_last: bool) -> None:
        """Writes the traces if the last of the chosen steps is done, or the run ends."""
        if self._steps is None or self._began is None or not (is_last or num_done >= self._steps[1]):
            return
        folder = self._folder / PROFILES / f"steps-{self._began}-{num_done}"
        self._began = None
        files = executor.end_profile(folder)
        self._message(f"profile of {len(files)} workers: {folder}; ui.perfetto.dev opens the files")

    def forget(self) -> None:
        """Called when processes were replaced: the chosen steps that follow begin another profile."""
        self._began = None
