"""Exact numbers are compared exactly: one unit decides, however many digits agree."""

import math
import random
from fractions import Fraction

import pytest

pytest.importorskip("math_verify")
from rlinf_algos.rewards.mathematics import MathReward


@pytest.fixture(scope="module")
def check():
    """Imported late: the module teaches the parser its grammar, which takes seconds."""
    from rlinf_algos.rewards.math_equal import check

    return check


def _exact_numbers(num_rounds: int):
    """(number, another one that is one unit away, the number in another form), checked by Python's integers."""
    draw = random.Random(0)
    for _ in range(num_rounds):
        base, exponent, k = draw.choice((2, 3, 5, 7, 10)), draw.randint(60, 110), draw.randint(30, 60)
        large, power = draw.randint(10**25, 10**26), base**exponent
        assert Fraction(power - 1, power) == 1 - Fraction(1, power) != 1 - Fraction(1, power + 1)
        assert sum(2**i for i in range(k + 1)) == 2 ** (k + 1) - 1
        written = f"{base}^{{{exponent}}}"
        yield written, f"{written}+1", rf"{base}\cdot {base}^{{{exponent - 1}}}"
        yield f"{written}-1", str(power), str(power - 1)
        yield rf"1-\frac{{1}}{{{written}}}", rf"1-\frac{{1}}{{{written}+1}}", rf"\frac{{{written}-1}}{{{written}}}"
        yield f"{k}!", str(math.factorial(k) + 1), rf"{k}\cdot {k - 1}!"
        yield rf"\binom{{{2 * k}}}{{{k}}}", str(math.comb(2 * k, k) - 1), str(math.comb(2 * k, k))
        yield (
            rf"\frac{{{large}}}{{{large + 7}}}",
            rf"\frac{{{large + 1}}}{{{large + 7}}}",
            rf"{3 * large}/{3 * large + 21}",
        )
        yield rf"\sum_{{i=0}}^{{{k}}}2^i", str(2 ** (k + 1)), f"2^{{{k + 1}}}-1"
        yield rf"\sqrt{{{power**2 + 1}}}", str(power), rf"\frac{{1}}{{3}}\sqrt{{{9 * power**2 + 9}}}"
        yield rf"\sqrt[3]{{{large}}}", rf"\sqrt[3]{{{large + 1}}}", rf"\frac{{\sqrt[3]{{{8 * large}}}}}{{2}}"
        yield (
            rf"{large}+\sqrt{{2}}+\sqrt{{3}}",
            rf"{large + 1}+\sqrt{{2}}+\sqrt{{3}}",
            rf"{large}+\sqrt{{5+2\sqrt{{6}}}}",
        )
        yield rf"{large}\pi", rf"{large + 1}\pi", rf"\pi\cdot {large}"
        yield f"{large}x+y", f"{large + 1}x+y", rf"y+x\cdot {large}"


def test_numbers_that_differ_by_one_unit_are_different():
    numbers = list(_exact_numbers(42))
    assert len(numbers) >= 500
    with MathReward(num_processes=1, time_limit_s=5, wall_limit_s=120) as reward:
        for column, outcome in ((1, "wrong"), (2, "right")):
            results = reward.score_batch([rf"\boxed{{{row[column]}}}" for row in numbers], [row[0] for row in numbers])
            assert not [
                (*row, r.outcome) for row, r in zip(numbers, results, strict=True) if r.outcome != outcome
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (r"\sqrt{5+2\sqrt{6}}", r"\sqrt{2}+\sqrt{3}", "right"),
        (r"\sqrt{5+2\sqrt{6}}-\sqrt{2}-\sqrt{3}", "0", "right"),
        (r"\sqrt{5+2\sqrt{6}}-\sqrt{2}-\sqrt{3}", r"\frac{1}{10^{300}}", "wrong"),
        (r"\sqrt{10^{1000}+1}", "10^{500}", "wrong"),
        (r"1+e^{-5000}", "1", "wrong"),
        (r"\ln(1+10^{-600})", "10^{-600}", "wrong"),
        (r"\sin\frac{\pi}{7}", r"\cos\frac{5\pi}{14}", "right"),
        (r"\frac{\ln(25)}{2}", r"\ln 5", "right"),
        (r"(\sqrt{2}+1)^{50}", r"\frac{1}{(\sqrt{2}-1)^{50}}", "right"),
        ("0", r"\frac{1}{10^{40}}", "wrong"),
        (r"\sum_{k=0}^{300}2^k", "2^{301}", "wrong"),
        (r"\prod_{k=1}^{30}k", "30!", "right"),
        (r"\sum_{k=1}^{\infty}\frac{1}{k^2}", r"\frac{\pi^2}{6}", "right"),
        (r"\int_0^1 x^2 dx", r"\frac{1}{3}", "right"),
        ("0.1x", r"\frac{x}{10}", "right"),
    ],
)
def test_constants_of_many_kinds(check, one, other, verdict):
    assert check("equal", one, other) == [verdict, None]


@pytest.mark.parametrize(("factor", "verdict"), [("2^{90}", "right"), ("(2^{90}+1)", "wrong")])
def test_equations_have_exactly_one_ratio(check, factor, verdict):
    assert check("same zeros", r"2^{90}x+y-3", rf"{factor}x+y-3") == [verdict, None]
