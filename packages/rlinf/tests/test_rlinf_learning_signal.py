"""A run that learns nothing is noticed after three steps, and reported once."""

from rlinf.loop.learning_signal import LearningSignal

NOTHING = {"actor/groups_without_advantage": 1.0, "reward/mean": 0.0}


def test_three_steps_in_a_row_without_a_signal_are_reported_once():
    signal = LearningSignal()
    reports = [signal.observe(NOTHING) for _ in range(6)]
    assert [report is not None for report in reports] == [False, False, True, False, False, False]
    assert "all completions of a prompt got the same reward (mean 0.00)" in (reports[2] or "")


def test_a_policy_that_learns_is_a_signal():
    signal = LearningSignal()
    one = NOTHING | {"policy/second/actor/groups_without_advantage": 0.5}
    assert all(signal.observe(one) is None for _ in range(3))
    none = NOTHING | {"policy/second/actor/groups_without_advantage": 1.0}
    assert [signal.observe(none) is not None for _ in range(3)] == [False, False, True]


def test_a_group_with_an_advantage_in_between_starts_the_count_anew():
    signal = LearningSignal()
    some = NOTHING | {"actor/groups_without_advantage": 0.9}
    assert all(signal.observe(metrics) is None for metrics in (NOTHING, NOTHING, some, NOTHING, NOTHING, {}))
