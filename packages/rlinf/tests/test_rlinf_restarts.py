"""When a run that lost processes is started again, and when it is not."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlinf import jobs
from rlinf.config.common import RunConfig
from rlinf.errors import ProcessesLost, RunFailed
from rlinf.loop.restarts import Restarts

LOST = ProcessesLost("worker rollout/0 was lost")


def test_a_run_that_makes_progress_is_restarted_for_ever():
    restarts = Restarts(RunConfig(num_steps=1000, max_restarts=1))
    for step in range(200):
        restarts.check(LOST, step)


@pytest.mark.parametrize("steps", [[5, 5, 5], [5, 3, 5], [0, 0, 0], [1, 2, 2, 2]])
def test_a_run_that_comes_no_further_ends_with_the_cause(steps: list[int]):
    restarts = Restarts(RunConfig(num_steps=1000, max_restarts=2))
    for step in steps[:-1]:
        restarts.check(LOST, step)
    with pytest.raises(RunFailed, match=r"rollout/0 was lost\nafter 2 restarts .* \(run\.max_restarts=2\)"):
        restarts.check(LOST, steps[-1])


def test_a_run_that_is_to_stop_stops_at_once():
    with pytest.raises(RunFailed, match=r"^worker rollout/0 was lost$") as caught:
        Restarts(RunConfig(num_steps=1000, on_failure="stop")).check(LOST, 10)
    assert not isinstance(caught.value, ProcessesLost), "nobody must begin again"


@pytest.mark.parametrize(
    ("now", "ends"), [("1", "the table"), ("2", "model.path=m changed while the run was under way")]
)
def test_a_run_on_other_machines_goes_on_with_the_same_inputs(monkeypatch: pytest.MonkeyPatch, now: str, ends: str):
    class Loop:
        step = 3

        def __init__(self, job: Any, folder: Any, restarts: Restarts) -> None:
            self.job, self.progress = job, SimpleNamespace(warning=lambda text: None, message=lambda text: None)

        def run(self) -> str:
            if self.job.is_first:
                raise LOST
            return "the table"

    config = SimpleNamespace(run=RunConfig(num_steps=10))
    job = SimpleNamespace(config=config, inputs={"model.path=m": "1"}, is_first=True)
    moved = SimpleNamespace(config=config, inputs={"model.path=m": now}, is_first=False)
    monkeypatch.setattr("rlinf.loop.training_loop.TrainingLoop", Loop)
    monkeypatch.setattr(jobs, "_where_machines_are_left", lambda job: (moved, ", on 1 of 2 nodes"))
    folder: Any = SimpleNamespace(begin_again=lambda text: None, note=lambda text: None)
    try:
        message = jobs.run(job, folder)  # pyright: ignore[reportArgumentType]
    except RunFailed as error:
        message = str(error).splitlines()[-1].removeprefix("and then: ")
    assert message == ends
