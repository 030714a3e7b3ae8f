"""DAgger as data: how many questions a step has, and refusals."""

import pytest

from rlinf_algos import AlgorithmError, AlgosError, DaggerAlgorithm, preset


def test_the_share_of_the_expert_falls_by_the_step():
    algorithm = DaggerAlgorithm(expert_share=1.0, expert_decay=0.5)
    assert [algorithm.takeovers(step, 8, num_answers=10) for step in range(2, 5)] == [[0, 0], [0], []]


def test_the_expert_takes_over_at_times_that_are_evenly_spread():
    algorithm = DaggerAlgorithm(expert_share=1.0, takes_over=True, query_rate=0.0)
    assert algorithm.takeovers(0, num_envs=4, num_answers=20) == [2, 7, 12, 17]
    assert algorithm.takeovers(1, num_envs=2, num_answers=20) == [10]
    assert algorithm.num_asked(0, num_envs=4, num_answers=20) == 18 + 13 + 8 + 3


def test_the_expert_is_asked_wherever_it_acts_and_for_a_share_of_the_rest():
    algorithm = DaggerAlgorithm(expert_share=0.5, expert_decay=0.0, query_rate=0.25)
    assert algorithm.num_asked(0, num_envs=4, num_answers=10) == 2 * 10 + 5
    assert algorithm.num_asked(1, num_envs=4, num_answers=10) == 10
    assert DaggerAlgorithm(query_rate=0.0).num_asked(0, num_envs=4, num_answers=10) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query_rate": 1.5}, "query_rate=1.5 must be between 0 and 1: it is a share"),
        ({"num_updates": 0}, "num_updates=0 must be at least 1"),
        ({"max_expert_actions": 0}, "max_expert_actions=0 must be at least 1: it counts actions; null sets no limit"),
    ],
)
def test_refusals(changes, says):
    with pytest.raises(AlgorithmError, match=says):
        DaggerAlgorithm(**changes)


def test_its_name_is_suggested_for_episodes():
    with pytest.raises(AlgosError, match="did you mean 'dagger'"):
        preset("dager", samples="episodes")
