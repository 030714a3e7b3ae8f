"""When a run that lost processes is started again, and when it is not."""

import pytest

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
