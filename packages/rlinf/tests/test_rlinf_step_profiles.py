"""`run.profile_steps`: which steps are profiled, and where the traces are named."""

from pathlib import Path
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.loop.profiling import StepProfiles


class CountingExecutor:
    """Writes one trace for each profile."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin_profile(self) -> None:
        self.begun.append("begin")

    def end_profile(self, folder: Path) -> list[Path]:
        self.begun.append(folder.name)
        return [folder / "actor-0.json.gz"]


def calls(steps: tuple[int, int] | None, num_steps: int, tmp_path: Path) -> list[str]:
    executor: Any = CountingExecutor()
    profiles = StepProfiles(steps, tmp_path, lambda text: None)
    for step in range(num_steps):
        executor.begun.append(str(step + 1))
        profiles.before_step(step, executor)
        profiles.after_step(step + 1, executor, is_last=step + 1 == num_steps)
    return executor.begun


def test_the_chosen_steps_are_profiled_and_others_cost_nothing(tmp_path: Path):
    assert calls((2, 3), 4, tmp_path) == ["1", "2", "begin", "3", "steps-2-3", "4"]
    assert calls((3, 9), 4, tmp_path) == ["1", "2", "3", "begin", "4", "steps-3-4"]  # the run ends before
    assert calls(None, 2, tmp_path) == ["1", "2"]


def test_after_lost_processes_the_rest_of_the_steps_begins_a_new_profile(tmp_path: Path):
    executor: Any = CountingExecutor()
    profiles = StepProfiles((1, 3), tmp_path, lambda text: None)
    profiles.before_step(0, executor)
    profiles.forget()
    profiles.before_step(1, executor)
    profiles.after_step(3, executor, is_last=False)
    assert executor.begun == ["begin", "begin", "steps-2-3"]


def test_the_key_is_checked(tmp_path: Path):
    config = load_config("sort-grpo", parse_overrides(["--run.profile_steps", "5-7"]))
    assert config.run.profiled_steps == (5, 7)
    assert load_config("sort-grpo", parse_overrides(["--run.profile_steps", "5"])).run.profiled_steps == (5, 5)
    for wrong, text in (("7-5", "the steps of this run are 1 to"), ("1-9999", "are 1 to"), ("0-3", "profile_steps")):
        with pytest.raises(UserError, match=text):
            load_config("sort-grpo", parse_overrides(["--run.profile_steps", wrong]))
