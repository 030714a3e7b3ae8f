"""Metrics: means, deviations and totals over all tables, the same whoever recorded what."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rlinf_workers.metrics import MetricTable, merge


@settings(max_examples=50)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_numbers_do_not_depend_on_who_recorded_them(count, num_tables, seed):
    rng = np.random.default_rng(seed)
    values, weights, owners = rng.normal(1e6, 1.0, count), rng.random(count), rng.integers(0, num_tables, count)
    merged = []
    for dealt in (owners, np.zeros(count, dtype=int), owners[::-1]):
        tables = [MetricTable() for _ in range(num_tables)]
        for value, weight, owner in zip(values, weights, dealt, strict=True):
            tables[owner].add("mean", value, weight)
            tables[owner].add("std", value, statistic="spread")
            tables[owner].add("sum", value, statistic="total")
        merged.append(merge(table.drain() for table in tables))
    assert merged[0] == merged[1] == merged[2]
    if count:
        assert merged[0]["mean"] == pytest.approx(float(np.average(values, weights=weights)), rel=1e-12)
        assert merged[0]["sum"] == pytest.approx(float(values.sum()), rel=1e-12)
    assert ("std" in merged[0]) == (count > 1), "one number has no deviation"
    if count > 1:
        assert merged[0]["std"] == pytest.approx(float(values.std(ddof=1)), rel=1e-6)


def test_a_mean_without_weight_is_left_out():
    table = MetricTable()
    table.add("nothing", math.nan, 0.0)
    assert merge([table.drain()]) == {}
    assert table.drain() == {}


@pytest.mark.parametrize("values", [(math.inf, -math.inf), (1e308, 1e308, 1e308), (math.nan, 1.0)])
def test_numbers_without_a_mean_give_none_of_float64s_numbers(values):
    table = MetricTable()
    for value in values:
        table.add("mean", value)
        table.add("std", value, statistic="spread")
    assert all(not math.isfinite(number) for number in merge([table.drain()]).values())
