"""What a disturbed run is judged by, and a few minutes of them; `tools/chaos.sh` runs longer."""

import signal

import pytest

from chaos_runs import BY_US, DISTURBANCES, HANG_S, WORKER, Disturbance, judged, main

KILLED = Disturbance("kill", lambda run, victim: None, causes=WORKER)
NAMED = "error: worker actor/0 on host was lost: killed by SIGKILL\nlog: ..."


def test_a_run_may_go_on_or_stop_and_name_the_worker():
    assert judged(KILLED, 0, "") == ("went on", True)
    assert judged(KILLED, 1, NAMED) == ("stopped, named: worker actor/0 on host was lost: killed by SIGKILL", True)


@pytest.mark.parametrize("log", ["error: something else", NAMED + "\nTraceback (most recent call last):", ""])
def test_a_run_that_stops_without_a_cause_is_wrong(log):
    outcome, is_fine = judged(KILLED, 1, log)
    assert outcome.startswith("stopped with 1, unnamed") and not is_fine


def test_a_run_that_hangs_is_wrong():
    assert judged(KILLED, None, NAMED) == (f"hung for {HANG_S:.0f} s", False)


def test_a_run_may_not_stop_for_what_is_over_soon():
    stopped_shortly = Disturbance("stop for a while", KILLED.disturb)
    assert judged(stopped_shortly, 1, NAMED)[1] is False
    assert judged(stopped_shortly, 0, "")[1] is True


def test_a_driver_that_was_killed_has_no_last_word():
    driver = Disturbance("kill", KILLED.disturb, causes=BY_US)
    assert judged(driver, -signal.SIGKILL, "step 1")[1] is True
    assert judged(driver, 1, "step 1")[1] is False
    assert [one.name for one in DISTURBANCES if one.causes == BY_US] == ["kill"]


@pytest.mark.slow
def test_disturbed_runs_have_the_numbers_of_one_in_peace():
    assert main(2.0, seed=0, overrides=()) == 0
