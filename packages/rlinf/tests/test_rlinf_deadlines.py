"""When a step is given up: by what was chosen, predicted or measured."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.loop.deadlines import LEAST_S, UNKNOWN_S, Deadlines
from rlinf.loop.session import Session
from rlinf_workers import StepTimeout


def test_what_the_config_says_wins():
    deadlines = Deadlines(30.0)
    deadlines.took("grpo", 5000.0)
    assert deadlines.of("grpo", predicted_s=9000.0).limit_s == 30.0


def test_the_longer_of_prediction_and_slowest_run_counts_ten_times():
    deadlines = Deadlines(None)
    assert deadlines.of("grpo").limit_s == UNKNOWN_S
    assert deadlines.of("grpo", predicted_s=100.0).limit_s == 1000.0
    for duration_s in (50.0, 200.0, 70.0):
        deadlines.took("grpo", duration_s)
    deadline = deadlines.of("grpo", predicted_s=100.0)
    assert (deadline.limit_s, deadline.reason) == (
        2000.0,
        "10 times its slowest run so far, 200.0 s, and at least 600 s",
    )
    assert deadlines.of("grpo", predicted_s=300.0).limit_s == 3000.0
    assert deadlines.of("evaluate").limit_s == UNKNOWN_S, "another flow takes a time of its own"


def test_rewards_at_their_limits_have_time_beside_it():
    deadlines = Deadlines(None, judging_s=250.0)
    assert deadlines.of("grpo").limit_s == UNKNOWN_S + 250
    deadline = deadlines.of("grpo", predicted_s=100.0)
    assert (deadline.limit_s, deadline.reason.rpartition("; ")[2]) == (1250.0, "250 s more for rewards at their limits")
    assert Deadlines(30.0, judging_s=250.0).of("grpo").limit_s == 30.0


def test_short_steps_have_time_to_get_over_a_hang():
    assert Deadlines(None).of("grpo", predicted_s=1.0).limit_s == LEAST_S


def test_a_session_gives_its_executor_the_limit_and_says_why_a_step_was_given_up():
    limits: list[float] = []

    def finish(timeout_s: float) -> Any:
        limits.append(timeout_s)
        if len(limits) == 3:
            raise StepTimeout("flow 'grpo', step 2: not done")
        return SimpleNamespace(duration_s=100.0 * len(limits), spans=[])

    unchecked: Any = SimpleNamespace
    job, executor = (
        unchecked(config=unchecked(seed=0)),
        unchecked(begin=lambda flow, **_: None, finish=finish, notes=[]),
    )
    folder = unchecked(trace=lambda events: None)
    progress = unchecked(doing=lambda what: nullcontext(), total=3)
    session = Session(job, unchecked(train=unchecked(name="grpo")), executor, folder, progress, Deadlines(None))
    for step in (0, 1):
        session.run_flow(unchecked(name="grpo"), step=step, feeds={}, predicted_s=90.0)
    with pytest.raises(StepTimeout, match=r"step 2: not done\nthe limit: 10 times its slowest run so far, 200\.0 s"):
        session.run_flow(unchecked(name="grpo"), step=2, feeds={}, predicted_s=90.0)
    assert limits == [900.0, 1000.0, 2000.0]
