r"""Whether two answers in LaTeX are equal, by math-verify. Loaded by the processes of a `ProcessPool`, by path: it
imports nothing of this package.

Departs from a plain call of math-verify: its own limits of time, which need the main thread and stop no C loop, are off
(the pool's hold); an exception while comparing is told, not taken for "different".
"""

import cmath
import logging
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        # The pool's caller takes units away where they are units; here a last `t` or `m` is a variable.
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
]
_POINTS = (0.7390851332151607, 1.3247179572447461, 0.5671432904097838, 1.8392867552141612)
"""Values without a relation to each other, for the symbols of two formulas."""
_CLEARLY = 1e-3
"""Relative difference that neither rounding nor math-verify's tolerance (six places) explains."""


def check(reference: str, answer: str) -> list[str | None]:
    """["right" | "wrong" | "unparseable", detail]: the answer against the reference, both normalised LaTeX."""
    expected, found = _parsed(reference), _parsed(answer)
    if "%" not in reference + answer and expected and found and _are_clearly_different(expected[0], found[0]):
        return ["wrong", None]
    if verify(expected, found, timeout_seconds=None, raise_on_error=True):
        return ["right", None]
    return ["unparseable" if all(isinstance(form, str) for form in found) else "wrong", None]


def _are_clearly_different(expected: object, found: object) -> bool:
    """Whether two formulas differ at a point, which proves them different; to simplify their difference takes a hundred
    times as long. Equations: whether a point that solves the one does not solve the other."""
    try:
        if isinstance(expected, sympy.Expr) and isinstance(found, sympy.Expr):
            one, other = _plain(expected), _plain(found)
            points = [_point(shift, one, other) for shift in range(2)]
            return any(_differ(_value(one, point), _value(other, point)) for point in points)
        if isinstance(expected, sympy.Eq) and isinstance(found, sympy.Eq):
            sides = [*expected.args, *found.args]
            if any(isinstance(side, sympy.Symbol) for side in sides):
                return False  # an assignment, of which math-verify may take the value alone
            one_left, one_right, other_left, other_right = plain = [_plain(side) for side in sides]
            solution = _solution(one_left - one_right, _point(0, *plain))
            return solution is not None and _differ(_value(other_left, solution), _value(other_right, solution))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        pass  # something has no number: a limit, an infinity; math-verify decides
    return False


def _plain(formula: Any) -> Any:
    """With a symbol in the place of each unknown function and derivative."""
    unknown = formula.atoms(AppliedUndef, sympy.Derivative)
    return formula.subs({part: sympy.Symbol(f"value of {part}") for part in unknown}) if unknown else formula


def _point(shift: int, *formulas: Any) -> dict:
    symbols = sorted(set().union(*(formula.free_symbols for formula in formulas)), key=str)
    return {symbol: _POINTS[(i + shift) % 4] + i // 4 for i, symbol in enumerate(symbols)}


def _value(formula: Any, point: dict) -> complex:
    return complex(formula.evalf(15, subs=point))


def _differ(one: complex, other: complex) -> bool:
    difference = abs(one - other)
    return cmath.isfinite(difference) and difference > _CLEARLY * max(abs(one), abs(other), 1e-6)


def _solution(zero: Any, point: dict) -> dict | None:
    """The point moved along one symbol, in which the formula is linear, to where the formula is zero."""
    for symbol in sorted(zero.free_symbols, key=str):
        at_0, at_1 = (_value(zero, {**point, symbol: sympy.Float(value)}) for value in (0, 1))
        if abs(at_1 - at_0) > 1e-6:
            root = -at_0 / (at_1 - at_0)
            moved = {**point, symbol: sympy.sympify(root)}
            if abs(_value(zero, moved)) < 1e-9 * max(abs(at_0), abs(at_1)):
                return moved
    return None


@lru_cache(maxsize=1024)  # a group of completions has one reference, and often the same few answers
def _parsed(latex: str) -> list:
    return parse(f"${latex}$", _LATEX, parsing_timeout=None)  # type: ignore[arg-type]


_WARM_UP = (
    r"\frac{a}{b}+c|c+a/b",
    r"-\frac{2}{3}z^{-\frac{1}{3}}|-\frac{2}{3\sqrt[3]{z}}",
    r"x^2-9|(x-3)(x+3)",
    r"\frac{\sin(3x)}{7}+A_1e^{5x}-A_2\cos(x)|\frac{1}{7}\sin(3x)+A_1e^{5x}-A_2\cos x",
    r"\frac{e^{-q}}{q(q+4)}-\frac{3}{q}|\frac{e^{-q}-3q-12}{q(q+4)}",
    r"(x-\frac{1}{3}\cos{3x})v(x)|v(x)(x-\cos(3x)/3)",
    r"\sqrt{3\pi k\sigma_1q^2}|q\sqrt{3\pi k\sigma_1}",
    r"\frac{3\pi a^2b}{\mu^3[e^{ka/(cT)}+2]}|0",
    r"z'-kz=2|\frac{dz}{dx}=kz+2",
    r"\ln5-i\pi/4|\frac{\log(25)-i\pi/2}{2}",
    r"[2,7)|x\in[2,7)",
    r"(-\infty,2)\cup(3,\infty)|x<2",
    r"\{1,\sqrt{3}\}|\sqrt{3},1",
    r"4,x+1|x+1,4",
    r"(1,\frac{\pi}{6})|(1,\pi/6)",
    r"\begin{pmatrix}1&0\\0&1\end{pmatrix}|\begin{pmatrix}1&0\\0&1\end{pmatrix}",
    r"x=5|5",
    r"2^{10}|1024",
    r"3+4\cdot5|23",
    r"\frac{6}{4}\times2|3",
    r"10!|3628800",
    r"\log_2(8)|3",
    r"Mu^2(\beta^2+1)\cos^2\phi|0",
    r"\arccos{0.7\cos{\phi_1}}|0",
    r"\binom{5}{2}|10",
    r"|x-1||x",
    r"50%|\frac{1}{2}",
)
"""Formulas of many kinds, from which the parser learns its way through the grammar once (0.1 s a kind), for all the
processes that are forked from here."""

for _pair in _WARM_UP:
    check(*_pair.rsplit("|", 1))
_parsed.cache_clear()
