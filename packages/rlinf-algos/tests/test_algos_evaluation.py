"""Estimators of sampled answers against brute force over all subsets, and intervals against their formulas."""

import itertools
import math
import random
import statistics
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    avg_at_k,
    maj_at_k,
    mean_over_problems,
    pass_at_k,
)
from rlinf_algos.evaluation import canonical_answer


@given(st.data(), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(data: st.DataObject, n: int):
    verdicts = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(verdicts, k))
    expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    actual = pass_at_k(torch.tensor([sum(verdicts)]), n, k)
    assert actual.dtype == torch.float64
    assert float(actual[0]) == pytest.approx(float(expected), rel=1e-12, abs=1e-15)


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_of_many_samples_equals_the_binomials(n: int, data: st.DataObject):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert float(pass_at_k(torch.tensor([c]), n, k)[0]) == pytest.approx(float(expected), rel=1e-9, abs=1e-13)


def test_pass_at_k_of_problems_with_different_numbers_of_samples():
    scores = pass_at_k(torch.tensor([1, 0, 3]), torch.tensor([4, 2, 3]), 2)
    assert scores.tolist() == pytest.approx([0.5, 0.0, 1.0])


@pytest.mark.parametrize(
    ("num_right", "num_samples", "k", "message"),
    [
        ([1], 4, 5, r"k=5 must be between 1 and num_samples\[0\]=4"),
        ([1], 4, 0, "k=0 must be between 1"),
        ([1, 5], 4, 2, r"num_right\[1\]=5 must be a whole number between 0 and num_samples=4"),
        ([-1], 4, 2, r"num_right\[0\]=-1"),
    ],
)
def test_pass_at_k_refuses_counts_that_cannot_be(num_right: list[int], num_samples: int, k: int, message: str):
    with pytest.raises(AlgosError, match=message):
        pass_at_k(torch.tensor(num_right), num_samples, k)


def majority_by_hand(answers: list[str | None], is_right: list[bool], k: int) -> Fraction:
    """Every subset votes; the first place is shared in equal parts."""
    total, num_subsets = Fraction(0), 0
    for subset in itertools.combinations(range(len(answers)), k):
        votes = Counter("the right one" if is_right[i] else answers[i] for i in subset if is_right[i] or answers[i])
        num_subsets += 1
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += Fraction("the right one" in winners, max(1, len(winners)))
    return total / num_subsets


@given(st.lists(st.sampled_from(["right", "a", "b", "c", None]), min_size=1, max_size=9), st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(drawn: list[str | None], data: st.DataObject):
    k = data.draw(st.integers(1, len(drawn)))
    is_right = [answer == "right" for answer in drawn]
    expected = majority_by_hand(drawn, is_right, k)
    assert maj_at_k(drawn, is_right, k) == pytest.approx(float(expected), rel=1e-12, abs=1e-15)


def test_one_vote_is_the_share_of_right_samples():
    answers, is_right = ["1", "2", "2", "3", None], [True, False, False, False, False]
    assert maj_at_k(answers, is_right, 1) == pytest.approx(0.2)


def test_a_sample_without_an_answer_casts_no_vote():
    assert maj_at_k(["1", None, None, None], [True, False, False, False], 4) == 1.0
    assert maj_at_k([None, None], [False, False], 2) == 0.0


def test_spellings_of_one_answer_vote_together():
    assert maj_at_k(["1/2", "0.5", "7", "7.0", "$7$"], [True, True, False, False, False], 5) == 0.0
    assert maj_at_k(["1/2", "0.5", "7", "8"], [True, True, False, False], 4) == 1.0


def test_maj_at_k_of_many_samples_is_finite_and_agrees_with_drawn_subsets():
    generator = random.Random(0)
    answers = [str(generator.choice([1, 1, 1, 2, 2, 3, 4])) for _ in range(200)]
    is_right = [answer == "1" for answer in answers]
    drawn = [generator.sample(range(200), 8) for _ in range(4000)]
    shares = []
    for subset in drawn:
        shares.append(float(majority_by_hand([answers[i] for i in subset], [is_right[i] for i in subset], 8)))
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert maj_at_k(answers, is_right, 8) == pytest.approx(statistics.fmean(shares), abs=5 * error)
    assert maj_at_k(["1"] * 500 + ["2"] * 499, [True] * 500 + [False] * 499, 999) == pytest.approx(1.0)


def test_maj_at_k_refuses():
    with pytest.raises(AlgosError, match="2 answers, 1 verdicts"):
        maj_at_k(["1", "2"], [True], 1)
    with pytest.raises(AlgosError, match="k=3 must be between 1 and the number of samples=2"):
        maj_at_k(["1", "2"], [True, False], 3)
    with pytest.raises(AlgosError, match="at most 1000"):
        maj_at_k(["1"] * 1001, [True] * 1001, 1)


@pytest.mark.parametrize(
    ("spellings", "canonical"),
    [
        (["18", "18.0", " 18.", "+18", "$18", "\\$18", "$18$", "18%", "18\\%", "18.000"], "18"),
        (["1,234", "1234", "1234.0"], "1234"),
        (["0", "-0", "0.0", "+.0"], "0"),
        (["-.5", "-0.50"], "-0.5"),
        (["12345678901234567890123456789012345"], "12345678901234567890123456789012345"),
        (["\\frac{1}{2}", "\\dfrac{1}{2}", "$\\tfrac{1}{2}$", " \\frac {1}{2}."], "\\frac{1}{2}"),
        (["\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\,\\frac{\\pi}{2})"], "(3,\\frac{\\pi}{2})"),
        (["\\text{Evelyn}", "evelyn", "Evelyn."], "evelyn"),
        (["1,23"], "1,23"),
        (["", "."], ""),
        (["\\leftarrow"], "\\leftarrow"),
    ],
)
def test_canonical_answer(spellings: list[str], canonical: str):
    assert {canonical_answer(spelling) for spelling in spellings} == {canonical}


def test_avg_at_k():
    scores = avg_at_k(torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]]))
    assert scores.tolist() == [0.75, 0.0]
    assert scores.dtype == torch.float64
    assert avg_at_k(torch.tensor([[True]])).tolist() == [1.0]
    assert avg_at_k(torch.tensor([[0.25, 0.75]])).tolist() == [0.5]
    with pytest.raises(ShapeError, match=r"is_right has shape \[2\]; it must be \[P, n\]"):
        avg_at_k(torch.tensor([1.0, 0.0]))
    with pytest.raises(NonFiniteError, match=r"is_right\[0, 1\]"):
        avg_at_k(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(AlgosError, match=r"is_right\[0, 0\]=2.0"):
        avg_at_k(torch.tensor([[2.0]]))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
@example([0.0, 1.4619707445772982e-160])  # whose squares are no numbers
def test_the_standard_error_is_that_of_a_mean(scores: list[float]):
    estimate = mean_over_problems(torch.tensor(scores, dtype=torch.float64))
    assert estimate.value == pytest.approx(statistics.fmean(scores), abs=1e-12)
    assert estimate.standard_error == pytest.approx(statistics.stdev(scores) / math.sqrt(len(scores)), abs=1e-12)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


@pytest.mark.parametrize(("num_right", "size"), [(27, 30), (1, 30), (15, 30), (700, 1319)])
def test_one_sample_a_problem_has_wilsons_interval(num_right: int, size: int):
    """The roots of (p - q)^2 = z^2 q (1 - q) / m, found by bisection instead of the closed form; m is the number of
    problems but for the n - 1 of the sample variance."""
    estimate = mean_over_problems(torch.tensor([1.0] * num_right + [0.0] * (size - num_right)))
    p, z = num_right / size, 1.959963984540054

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            q = (inside + outside) / 2
            is_inside = (p - q) ** 2 <= z * z * q * (1 - q) / (size - 1)
            inside, outside = (q, outside) if is_inside else (inside, q)
        return inside

    assert (estimate.low, estimate.high) == pytest.approx((root(p, 0.0), root(p, 1.0)), abs=1e-9)


def test_nothing_right_is_not_certain():
    estimate = mean_over_problems(torch.zeros(30))
    z = 1.959963984540054
    assert (estimate.value, estimate.standard_error, estimate.low) == (0.0, 0.0, 0.0)
    assert estimate.high == pytest.approx(z * z / (30 + z * z))
    assert mean_over_problems(torch.ones(30)).low == pytest.approx(1 - estimate.high)


def test_a_single_problem_has_no_standard_error():
    estimate = mean_over_problems(torch.tensor([0.5]))
    assert math.isnan(estimate.standard_error)
    assert estimate.low < 0.5 < estimate.high
    assert estimate.num_problems == 1


def test_samples_of_one_problem_do_not_narrow_the_interval():
    """Eight equal samples of each problem say no more than one."""
    one = torch.tensor([[1.0]] * 12 + [[0.0]] * 18)
    assert mean_over_problems(avg_at_k(one)) == mean_over_problems(avg_at_k(one.expand(30, 8)))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(600):
        ability = torch.rand(60, 1, generator=generator).expand(60, 4)
        estimate = mean_over_problems(avg_at_k(torch.bernoulli(ability, generator=generator)))
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 600 <= 0.98


def test_estimates_refuse():
    with pytest.raises(ShapeError, match=r"scores has shape \[0\]"):
        mean_over_problems(torch.zeros(0))
    with pytest.raises(NonFiniteError, match=r"scores\[1\]=nan"):
        mean_over_problems(torch.tensor([0.0, math.nan]))
    with pytest.raises(AlgosError, match=r"scores\[1\]=1.5"):
        mean_over_problems(torch.tensor([0.0, 1.5]))
