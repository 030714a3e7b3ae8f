"""Request priority of multi-turn rollouts: an example by hand, laws that both priorities obey, and the effect."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_sched import SchedError
from rlinf_sched.dynamic import simulate_multi_turn


def test_two_trajectories_on_one_slot():
    turns = [[1.0, 1.0], [1.0, 1.0]]
    fifo = simulate_multi_turn(turns, num_slots=1, tool_s=0.0, priority="fifo")
    deep = simulate_multi_turn([[1.0, 1.0]] * 3, num_slots=1, tool_s=0.5, priority="most_turns")
    assert list(fifo.ends_s) == [3.0, 4.0] and fifo.most_open == 2
    # 0 runs, 1 runs while 0's tool answers, then both second turns come before 2's first
    assert list(deep.ends_s) == [3.0, 4.0, 6.5] and deep.most_open == 2


@given(
    turns=st.lists(st.lists(st.floats(0.1, 5), min_size=1, max_size=5), min_size=1, max_size=20),
    num_slots=st.integers(1, 6),
    tool_s=st.floats(0, 2),
    priority=st.sampled_from(["fifo", "most_turns"]),
)
def test_work_is_neither_lost_nor_hurried(turns, num_slots, tool_s, priority):
    outcome = simulate_multi_turn(turns, num_slots=num_slots, tool_s=tool_s, priority=priority)
    alone = [sum(own) + tool_s * (len(own) - 1) for own in turns]
    work = sum(map(sum, turns))
    assert len(outcome.ends_s) == len(turns)
    assert outcome.end_s >= max(*alone, work / num_slots, 0) - 1e-9
    assert outcome.end_s <= work + tool_s * sum(len(own) - 1 for own in turns) + 1e-9
    assert 1 <= outcome.most_open <= len(turns)


def test_most_turns_first_completes_half_earlier_with_fewer_open():
    draw = np.random.default_rng(0)
    turns = [list(draw.lognormal(1, 0.75, draw.integers(2, 9))) for _ in range(512)]
    fifo, deep = (simulate_multi_turn(turns, num_slots=64, tool_s=2.0, priority=p) for p in ("fifo", "most_turns"))
    assert deep.half_s < 0.8 * fifo.half_s
    assert deep.mean_open < 0.6 * fifo.mean_open
    assert deep.end_s < 1.1 * fifo.end_s


def test_what_is_refused():
    with pytest.raises(SchedError, match="did you mean 'fifo'"):
        simulate_multi_turn([[1.0]], num_slots=1, tool_s=0, priority="fif")  # type: ignore[arg-type]
    with pytest.raises(SchedError, match="num_slots=0"):
        simulate_multi_turn([[1.0]], num_slots=0, tool_s=0)
    with pytest.raises(SchedError, match="at least one turn"):
        simulate_multi_turn([[]], num_slots=1, tool_s=0)
