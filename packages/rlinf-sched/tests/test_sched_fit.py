"""The fit of measured hand-overs: what it makes of a law that is known, and how it judges itself."""

import pytest
from hypothesis import given, strategies as st

from rlinf_sched import ProfileError, TimePoint
from rlinf_sched.fit import StageSample, fit_stage
from rlinf_sched.profile import InstanceProfile


def samples(sizes, law, **fields):
    return [StageSample(num_items=size, seconds=law(size), **fields) for size in sizes]


@given(st.floats(0.001, 10), st.floats(0.001, 1), st.lists(st.integers(1, 500), min_size=3, max_size=6, unique=True))
def test_a_straight_line_is_found_whatever_the_sizes(start: float, slope: float, sizes: list[int]):
    fit = fit_stage(samples(sizes, lambda n: start + slope * n))
    instance = InstanceProfile(points=fit.points)
    for n in (max(sizes), (min(sizes) + max(sizes)) // 2, 2 * max(sizes)):
        assert instance.seconds(n) == pytest.approx(start + slope * n)
    assert fit.spread == 0
    assert fit.left_out == pytest.approx(0, abs=1e-9)


def test_a_disturbed_step_does_not_count():
    fit = fit_stage([*samples([4, 4, 4, 4], lambda _: 1.0), StageSample(num_items=4, seconds=50.0)])
    assert fit.points == (TimePoint(num_items=4, seconds=1.0),)


def test_more_items_never_take_less_time():
    fit = fit_stage(samples([1, 2, 4, 8], {1: 2.0, 2: 4.0, 4: 1.0, 8: 9.0}.__getitem__))
    assert [point.seconds for point in fit.points] == [2.0, 2.5, 2.5, 9.0]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_a_table_never_falls_and_keeps_its_mean(times: list[float]):
    fit = fit_stage([StageSample(num_items=i + 1, seconds=seconds) for i, seconds in enumerate(times)])
    fitted = [point.seconds for point in fit.points]
    assert fitted == sorted(fitted)
    assert sum(fitted) == pytest.approx(sum(times))


def test_the_error_of_a_size_that_is_left_out_is_told():
    fit = fit_stage(samples([1, 2, 3], {1: 1.0, 2: 1.0, 3: 3.0}.__getitem__))
    # without the last: flat, 1 s for 3 s; without the middle: 2 s for 1 s; without the first: a line below zero, so
    # proportional, 0.5 s for 1 s
    assert fit.left_out == pytest.approx(1.0)
    assert "1 to 3 items; 3 steps, spread 0.0%; a size left out is predicted within 100.0%" in fit.describe()


def test_with_two_sizes_nothing_can_be_left_out():
    fit = fit_stage(samples([1, 2], float))
    assert fit.left_out is None
    assert "left out" not in fit.describe()


def test_spread_is_the_noise_around_the_table():
    fit = fit_stage([StageSample(num_items=2, seconds=seconds) for seconds in (0.9, 1.0, 1.1, 0.9, 1.1)])
    assert fit.spread == pytest.approx(0.1)


def test_one_item_takes_the_fixed_part_whole():
    fit = fit_stage(samples([4], lambda _: 5.0, fixed_s=1.0))
    assert fit.points == (TimePoint(num_items=1, seconds=2.0), TimePoint(num_items=4, seconds=5.0))


def test_the_rest_after_the_last_item_is_fitted_too():
    assert fit_stage(samples([4, 8], float, step_s=0.3)).step_s == 0.3


@pytest.mark.parametrize(
    "wrong",
    [[], [StageSample(num_items=0, seconds=1.0)], [StageSample(num_items=1, seconds=0.0)]],
)
def test_nothing_is_made_of_nothing(wrong):
    with pytest.raises(ProfileError, match=r"nothing can be fitted|num_items must be at least 1"):
        fit_stage(wrong)
