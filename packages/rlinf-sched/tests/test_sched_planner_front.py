"""The fronts of the search: what may be dropped, and that nothing is lost by it."""

from collections.abc import Sequence

import numpy as np
import pytest

from rlinf_sched import _C
from rlinf_sched.planner.columns import NUM_OUT, RowColumns
from rlinf_sched.planner.tree import JOINS, JoinKind

INFINITE = float("inf")
C = RowColumns(num_pools=1, num_edges=0)


def front(
    rows: Sequence[Sequence[float]],
    bound_s: float = INFINITE,
    *,
    devices: Sequence[int] = (),
    share: float = 0.0,
    steps_under_way: int = 1,
) -> "_C.Front":
    """A front of rows [first, middle, last, tail] at an even pace, in a cluster of ten devices without a memory limit.

    Args:
        devices: devices of each row; empty: one each.
        share: share of the devices within which two numbers of devices count as equal.
        steps_under_way: with several, a step takes as long among others as alone.
    """
    limits = _C.Limits(
        devices=[10.0], memory=[1e18], rest_resident=[0.0], rest_peak=[0.0], rest_area=0.0,
        steps_under_way=steps_under_way, bound_s=bound_s, tolerance_s=0.0, tolerance_share=share, may_mix=True,
    )  # fmt: skip
    pareto = _C.Front(_C.Columns(num_pools=1, num_out=NUM_OUT, num_edges=0), limits, num_groups=0)
    full = np.zeros((len(rows), C.width))
    full[:, 0] = devices or 1.0
    for row, (first, middle, last, tail) in zip(full, rows, strict=True):
        row[C.out], row[C.half], row[C.tail] = (first, middle, last), (first + last) / 2, tail
        row[C.period] = row[C.further] = last
    pareto.offer(full, np.zeros((len(rows), 0), dtype=np.int64), np.zeros(len(rows), dtype=bool), np.arange(len(rows)))
    return pareto


def join_of(kind: JoinKind, *, waits: float = 0.0) -> "_C.Join":
    """A join of two parts, the first of which feeds the second."""
    return _C.Join(
        kind=JOINS.index(kind), before_part=1, feeds=True, moved_s=0.0, waits=waits, syncs=[], sync_latency_s=0.0,
        sync_bytes_per_s=1.0, mixes=False,
    )  # fmt: skip


def joined(
    before: "_C.Front",
    after: "_C.Front",
    steps_under_way: int = 1,
    bound_s: float = INFINITE,
    kind: JoinKind = "side by side",
) -> float:
    """Seconds of the best step with `after` fed by `before`."""
    whole = front([], bound_s, steps_under_way=steps_under_way)
    wholes = whole.best_joins(before, after, join_of(kind), count=1)
    return min((whole[0] for whole in wholes), default=INFINITE)


def test_of_two_rows_the_one_that_is_better_in_all_columns_stays():
    assert len(front([[1, 5, 10, 1], [2, 5, 10, 1]])) == 1
    assert len(front([[2, 5, 10, 1], [1, 5, 10, 1]])) == 1
    assert len(front([[2, 5, 9, 1], [1, 5, 10, 1]])) == 2


def test_a_fed_part_ends_when_what_came_in_late_was_served():
    feeding, fed = [1, 5, 10, 1], [1, 2, 3, 1]
    assert joined(front([feeding]), front([fed])) == 11  # the last item, and the tail


def test_no_row_that_is_dropped_would_have_joined_better():
    feeding, late, early = [1, 5, 10, 1], [1, 8, 10, 1], [1, 2, 10, 1]
    alone = min(joined(front([feeding]), front([row])) for row in (late, early))
    assert joined(front([feeding]), front([late, early])) == alone


def test_a_fed_part_serves_the_second_half_after_its_middle_came():
    feeding, fed = [1, 9, 10, 1], [1, 4, 7, 1]
    assert joined(front([feeding]), front([fed])) == 9 + (1 + 7) / 2


@pytest.mark.parametrize(("waits", "left"), [(0.0, 3), (0.4, 3 + 0.4 * (8 - 3)), (1.0, 8)])
def test_an_interleaved_part_may_have_more_than_its_tail_left_to_do(waits: float, left: float):
    pair = front([])
    pair.offer_joins(front([[1, 5, 10, 2]]), front([[1, 2, 8, 3]]), join_of("interleaved", waits=waits), forget=[])
    assert pair.rows[0, C.last] == 10 + 8
    assert pair.rows[0, C.tail] == pytest.approx(2 + left)


def test_numbers_of_devices_count_as_equal_within_the_tolerance():
    rows = [[1, 5, 10, 1], [1, 5, 10, 1]]
    assert len(front(rows, devices=(6, 5), share=0.0)) == 1
    assert front(rows, devices=(6, 5), share=0.0).rows[0, 0] == 5
    assert front(rows, devices=(6, 5), share=0.1).rows[0, 0] == 6
    assert front(rows, devices=(7, 5), share=0.1).rows[0, 0] == 5


def test_a_bound_keeps_a_plan_whose_period_is_below_it():
    rows = front([[1, 5, 10, 1]]), front([[1, 5, 10, 5]])
    assert joined(*rows, steps_under_way=2) == 10
    assert joined(*rows, steps_under_way=2, bound_s=12) == 10
    assert joined(*rows, steps_under_way=2, bound_s=9) == INFINITE


def test_stages_of_one_side_overlap_across_steps():
    """Three whole batches of 10 s: 30 s for a step alone, at most as many steps under way as may be."""
    alone = [[10, 10, 10, 10]]
    for steps_under_way, expected in ((1, 30), (2, 15), (3, 10), (4, 10)):
        pair = front([], steps_under_way=steps_under_way)
        pair.offer_joins(front(alone), front(alone), join_of("side by side"), [])
        assert joined(pair, front(alone), steps_under_way) == expected
        assert joined(front(alone), front(alone), steps_under_way, kind="in turn") == 20


def test_evenly_spaced_steps_hold_each_other_up_no_longer_than_they_meet():
    """4 s and 3 s in turn on the same devices, then 5 s on others, two steps under way. Begun together the first of the
    two ends after 8 + 3 + 5 s; 7 s apart neither waits."""
    pair = front([], steps_under_way=2)
    pair.offer_joins(front([[4, 4, 4, 4]]), front([[3, 3, 3, 3]]), join_of("in turn"), [])
    assert joined(pair, front([[5, 5, 5, 5]]), steps_under_way=2) == 4 + 3
