"""Statistics of pairs, against enumeration of all outcomes and published examples."""

import itertools
import math

import pytest

from rlinf.playing.paired import PairedOutcomes, difference_interval, episodes_needed, holm, mcnemar


def outcomes(only_a: int, only_b: int, num_starts: int) -> PairedOutcomes:
    return PairedOutcomes(both=0, only_a=only_a, only_b=only_b, neither=num_starts - only_a - only_b)


@pytest.mark.parametrize(("only_a", "only_b"), [(a, b) for a in range(7) for b in range(7)])
def test_mcnemar_is_the_share_of_equally_likely_splits_at_least_as_uneven(only_a, only_b):
    splits = list(itertools.product((-1, 1), repeat=only_a + only_b))
    uneven = sum(abs(sum(split)) >= abs(only_a - only_b) for split in splits)
    assert mcnemar(only_a, only_b) == uneven / len(splits)


def test_the_published_example_has_its_published_numbers():
    """Airway hyper-responsiveness of 21 children before and after a transplantation (Bentur et al. 2009), in Fagerland,
    Lydersen and Laake, "Recommended tests and confidence intervals for paired binomial proportions", Statistics in
    Medicine 33, 2014."""
    children = PairedOutcomes(both=1, only_a=1, only_b=7, neither=12)
    assert children.difference == pytest.approx(6 / 21)
    assert mcnemar(1, 7) == pytest.approx(0.0703, abs=5e-5)
    low, high = difference_interval(children)
    assert (low, high) == (pytest.approx(0.026, abs=5e-4), pytest.approx(0.517, abs=5e-4))


def score_by_search(only_a: int, only_b: int, num_starts: int, difference: float) -> float:
    """The score statistic, its nuisance parameter by maximising the likelihood of the multinomial on a grid."""

    def log_likelihood(away: float) -> float:
        towards, rest = away + difference, 1 - 2 * away - difference
        terms = [(only_a, away), (only_b, towards), (num_starts - only_a - only_b, rest)]
        if any(share < -1e-12 or (share <= 0 and count) for count, share in terms):
            return -math.inf
        return sum(count * math.log(share) for count, share in terms if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    grid = [low + (high - low) * i / 20000 for i in range(20001)]
    away = max(grid, key=log_likelihood)
    spread = num_starts * (2 * away + difference - difference**2)
    return (only_b - only_a - num_starts * difference) / math.sqrt(spread)


@pytest.mark.parametrize(("only_a", "only_b", "num_starts"), [(1, 7, 21), (0, 3, 50), (12, 9, 40), (40, 20, 160)])
def test_the_ends_of_the_interval_are_just_rejected_by_the_score_test(only_a, only_b, num_starts):
    low, high = difference_interval(outcomes(only_a, only_b, num_starts))
    assert score_by_search(only_a, only_b, num_starts, low) == pytest.approx(1.96, abs=2e-3)
    assert score_by_search(only_a, only_b, num_starts, high) == pytest.approx(-1.96, abs=2e-3)


def trinomial(num_starts: int, away: float, towards: float):
    """Yields (only_a, only_b, probability) of all outcomes."""
    rest = 1 - away - towards
    for a in range(num_starts + 1):
        for b in range(num_starts + 1 - a):
            ways = math.comb(num_starts, a) * math.comb(num_starts - a, b)
            yield a, b, ways * away**a * towards**b * rest ** (num_starts - a - b)


def test_the_interval_contains_the_true_difference_as_often_as_it_says():
    num_starts = 30
    intervals = {(a, b): difference_interval(outcomes(a, b, num_starts)) for a, b, _ in trinomial(num_starts, 0.1, 0.1)}
    coverages = []
    for away, towards in itertools.product((0.02, 0.05, 0.1, 0.2, 0.3), (0.05, 0.1, 0.2, 0.4, 0.6)):
        true = towards - away
        inside = [
            share
            for a, b, share in trinomial(num_starts, away, towards)
            if intervals[a, b][0] <= true <= intervals[a, b][1]
        ]
        coverages.append(sum(inside))
    assert min(coverages) > 0.93 and max(coverages) < 0.99
    assert sum(coverages) / len(coverages) == pytest.approx(0.95, abs=0.008)


@pytest.mark.parametrize("flipped", [0.05, 0.2, 0.5])
def test_equal_policies_are_told_apart_in_at_most_5_percent(flipped):
    power = sum(share for a, b, share in trinomial(60, flipped / 2, flipped / 2) if mcnemar(a, b) < 0.05)
    assert power <= 0.05


def test_the_interval_without_flips_and_with_flips_alone_ends_where_shares_end():
    low, high = difference_interval(outcomes(0, 0, 20))
    assert low == pytest.approx(-high) and 0.1 < high < 0.2
    assert difference_interval(outcomes(0, 20, 20))[1] == pytest.approx(1.0)
    assert difference_interval(outcomes(20, 0, 20))[0] == pytest.approx(-1.0)


@pytest.mark.parametrize(("difference", "flipped"), [(0.2, 0.4), (0.1, 0.3), (0.25, 0.6)])
def test_the_number_of_episodes_finds_the_difference_with_80_percent(difference, flipped):
    number = episodes_needed(difference, flipped)
    away, towards = (flipped - difference) / 2, (flipped + difference) / 2
    power = sum(
        share
        for a, b, share in trinomial(number, away, towards)
        if a + b and abs(a - b) / math.sqrt(a + b) > 1.96  # the formula is that of the asymptotic test
    )
    assert power == pytest.approx(0.8, abs=0.035)


def test_a_difference_needs_as_many_flips():
    assert episodes_needed(0.02, 0.0) == episodes_needed(0.02, 0.02) == 391
    assert episodes_needed(0.02, 0.1) == 1960


def test_holm_multiplies_by_the_number_that_is_left():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_pairs_are_counted_by_both_outcomes():
    counted = PairedOutcomes.of([(True, True), (True, False), (False, True), (False, True), (False, False)])
    assert counted == PairedOutcomes(both=1, only_a=1, only_b=2, neither=1)
    assert (counted.success_a, counted.success_b, counted.difference) == (0.4, 0.6, 0.2)
