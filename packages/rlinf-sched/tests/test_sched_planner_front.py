"""The fronts of the search: what may be dropped, and that nothing is lost by it."""

from collections.abc import Sequence

import numpy as np

from rlinf_sched import _C
from rlinf_sched.planner.columns import NUM_OUT, Columns

INFINITE = float("inf")
C = Columns(num_pools=1, num_edges=0)


def front(rows: Sequence[Sequence[float]], bound_s: float = INFINITE) -> "_C.Front":
    """Of rows [first, middle, last, tail] at an even pace on one device each; four devices, no memory limit."""
    limits = _C.Limits(
        devices=[4.0], memory=[1e18], rest_resident=[0.0], rest_peak=[0.0], bound_s=bound_s, rest_area=0.0,
        tolerance_s=0.0, tolerance_share=0.0, may_mix=True,
    )  # fmt: skip
    made = _C.Front(_C.Columns(num_pools=1, num_out=NUM_OUT, num_edges=0), limits, num_groups=0)
    full = np.zeros((len(rows), C.width))
    for row, (first, middle, last, tail) in zip(full, rows, strict=True):
        row[0], row[C.out], row[C.half], row[C.tail] = 1.0, (first, middle, last), (first + last) / 2, tail
    made.offer(full, np.zeros((len(rows), 0), dtype=np.int64), np.zeros(len(rows), dtype=bool), np.arange(len(rows)))
    return made


def joined(before: "_C.Front", after: "_C.Front", steps_under_way: int = 1, bound_s: float = INFINITE) -> float:
    """Seconds of the best step with `after` fed by `before`, side by side."""
    join = _C.Join(
        kind=1, before_part=1, feeds=True, moved_s=0.0, waits=0.0, syncs=[], sync_latency_s=0.0, sync_bytes_per_s=1.0,
        mixes=False, steps_under_way=steps_under_way,
    )  # fmt: skip
    wholes = front([], bound_s).best_joins(before, after, join, count=1)
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


def test_a_bound_keeps_a_plan_whose_period_is_below_it():
    rows = front([[1, 5, 10, 1]]), front([[1, 5, 10, 5]])
    assert joined(*rows, steps_under_way=2) == 10
    assert joined(*rows, steps_under_way=2, bound_s=12) == 10
    assert joined(*rows, steps_under_way=2, bound_s=9) == INFINITE
