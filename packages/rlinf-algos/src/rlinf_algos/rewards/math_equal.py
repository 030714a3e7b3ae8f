r"""Decides with math-verify whether two LaTeX formulas are equal. The processes of a `ProcessPool` load this file by
its path: it imports nothing from this package.

Unlike a plain call of math-verify, this compares the values of formulas at a few points before it simplifies them,
which decides nearly all cases. The time limits of math-verify, which need the main thread and cannot stop a C loop, are
off, since the pool has its own. An exception during the comparison is reported, not taken for "different".

Exact numbers have no tolerance. Values that agree in 20 digits are subtracted, and the difference counts as zero only
if exact arithmetic or a separation bound proves it: Burnikel, Funke, Mehlhorn, Schirra and Schmitt, "A separation bound
for real algebraic expressions" (ESA 2001). There is no such bound for numbers that are not algebraic; they are equal if
they agree in more digits than both of them are written with, and in at least 1,200.
"""

import cmath
import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache
from operator import methodcaller
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import verify
from sympy.core.evalf import evalf
from sympy.core.function import AppliedUndef

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
"""The caller has removed units; here a final `t` or `m` is a variable."""
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_SYMBOLS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\gamma(?![a-z])"), r"g_{gamma}"),
    (re.compile(r"(\\[a-z]+ ?|[A-Za-z])(''*)"), lambda match: f"{match[1].strip()}_{{prime{len(match[2])}}}"),
    (re.compile(r"\^(?:T|\\top)(?![A-Za-z])"), r"^{h_{transposed}}"),
    (
        re.compile(r"(?<![A-Za-z\\])(?:([SNOQCE])|I(?=_))(?:_([0-9A-Za-z])|_\{([^{}]*)\})?"),
        lambda match: f"h_{{upper{match[1] or 'I'}{re.sub(r'[^0-9A-Za-z]', 'o', match[2] or match[3] or '')}}}",
    ),
)
"""Names that the parser would misread, as a constant, as nothing, or as a class of sympy -> names that it reads."""
_FACTORS = re.compile(r"\)\s*(?=\()|(?<![A-Za-z_^.0-9])[0-9]+(?:\.[0-9]+)?\s*(?=\()")
"""What precedes a factor in brackets. The parser reads `(2)(3)` and `2(3)` as mixed numbers, that is 5."""
_POINTS = ("0.7390851332151607", "1.3247179572447461", "0.5671432904097838", "1.8392867552141612")
"""Unrelated values for the symbols of two formulas."""
_DIGITS = 40
_ROUNDED = 1e-20
"""Relative difference that may be rounding, with `_DIGITS` digits."""
_ZERO = 1e-30
"""A value up to this size may be zero."""
_CERTAIN_BITS = 20
"""Number of correct bits from which a difference counts as non-zero."""
_MIN_BITS = 4096
"""Number of bits in which numbers must agree to count as equal without a proof."""
_MAX_BITS = 1 << 18
_GAMMA_BITS = 512
"""The same for values of the gamma function; more bits take seconds."""
_WITHOUT_VALUE = (sympy.Integral, sympy.Derivative, sympy.Limit)
"""Expressions that are compared in 20 digits only: an exact value may take an hour."""
_NOT_REAL = 1e-9
_NEAR = 0.01
_NO_VALUES = (sympy.zoo, sympy.nan)
_MIN_PLACES = 6
"""Number of decimal places from which a decimal may stand for a rounded number, as in math-verify."""
_DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")


def check(*questions: str) -> list[str | None]:
    """Answers all open questions about one pair of answers, under one time limit.

    Args:
        questions: from `comparison`, three texts each: the kind of question and two formulas in normalised LaTeX.

    Returns: ["right", "wrong" or "unparseable" for each question, separated by commas; None].
    """
    return [",".join(map(_answered, questions[::3], questions[1::3], questions[2::3])), None]


def _answered(question: str, one: str, other: str) -> str:
    expected, actual = _parsed(one), _parsed(other)
    if actual is None:
        return "unparseable"
    if expected is None or any(
        isinstance(formula, sympy.Basic) and formula.has(*_NO_VALUES) for formula in (expected, actual)
    ):
        return "wrong"
    are_formulas = isinstance(expected, sympy.Expr) and isinstance(actual, sympy.Expr)
    verdict = _compared(question, expected, actual, _rounding(one, other)) if are_formulas else None
    if verdict is None:
        verdict = question == "equal" and verify(expected, actual, timeout_seconds=None, raise_on_error=True)
    return "right" if verdict else "wrong"


def _rounding(*texts: str) -> float:
    """The rounding error of a decimal with six or more places, not all of them zeros."""
    decimals = [text for text in texts if _DECIMAL.fullmatch(text) and text.strip("-.0")]
    places = [len(text.partition(".")[2]) for text in decimals]
    return 10.0 ** -max(places) if places and max(places) >= _MIN_PLACES else 0.0


def _compared(question: str, expected: Any, actual: Any, rounding: float) -> bool | None:
    """Whether two formulas are equal, by their values at a few points; None if this does not decide.

    Formulas that agree to 20 digits at all points where they are real are equal; simplifying their difference would
    take a hundred times as long. Points at which a root or logarithm is not real are ignored, so its branch does not
    matter.
    """
    one, other = _plain(expected), _plain(actual)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    try:
        points = _points(symbols)
        pairs = [(_value(one, point), _value(other, point)) for point in points]
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None  # a part has no numeric value: a limit, an infinity
    if not all(_is_finite(value) for pair in pairs[:2] for value in pair):
        return None
    if question == "near":
        return not symbols and abs(pairs[0][0] - pairs[0][1]) <= _NEAR * abs(pairs[0][1])
    if question != "equal":
        return _have_one_ratio(pairs, is_positive=question == "same sign") and _is_zero(
            one.subs(points[0]) * other.subs(points[1]) - one.subs(points[1]) * other.subs(points[0])
        )
    if not symbols and rounding and abs(pairs[0][0] - pairs[0][1]) < rounding:
        return True
    agreed = [point for point, pair in zip(points, pairs, strict=True) if not _differ(*pair)]
    for point in points:
        if point not in agreed and _is_real(one, point) and _is_real(other, point):
            return False
    return len(agreed) >= min(2, len(points)) and _is_zero((one - other).subs(agreed[0]))


def _have_one_ratio(pairs: list[tuple[Any, Any]], *, is_positive: bool) -> bool:
    """Whether the ratio of the two values is the same non-zero constant for all pairs."""
    if len(pairs) < 2 or any(abs(value) < 1e-12 or not _is_finite(value) for pair in pairs for value in pair):
        return False
    ratios = [one / other for one, other in pairs]
    if any(_differ(ratio, ratios[0]) for ratio in ratios):
        return False
    return not is_positive or abs(sympy.im(ratios[0])) < 1e-12 < sympy.re(ratios[0])


def _plain(formula: Any) -> Any:
    """The formula with unknown functions and derivatives replaced by symbols, and finite sums evaluated."""
    formula = formula.replace(_is_finite_sum, methodcaller("doit"))
    unknown = formula.atoms(AppliedUndef, sympy.Derivative)
    return formula.subs({part: sympy.Symbol(f"value of {part}") for part in unknown}) if unknown else formula


def _is_finite_sum(part: Any) -> bool:
    """Whether it is a sum or product with integer bounds."""
    return isinstance(part, sympy.Sum | sympy.Product) and all(
        len(limit) == 3 and limit[1].is_Integer and limit[2].is_Integer for limit in part.limits
    )


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    """Two points with positive coordinates and two with coordinates of both signs; only one if there are no symbols."""
    shifts = range(4 if symbols else 1)
    return [
        {
            symbol: (sympy.Rational(_POINTS[(i + shift) % 4]) + i // 4) * (-1 if shift > 1 and (i + shift) % 2 else 1)
            for i, symbol in enumerate(symbols)
        }
        for shift in shifts
    ]


def _value(formula: Any, point: dict[Any, Any]) -> Any:
    value = formula.evalf(_DIGITS, subs=point)
    if not value.is_number or value.is_finite is False or not isinstance(complex(value), complex):
        raise ValueError("no number")
    return value


def _is_real(formula: Any, point: dict[Any, Any]) -> bool:
    """Whether every root, logarithm or other function in it is real at the point, or the formula is a complex one."""
    if formula.has(sympy.I) or not point:
        return True
    parts = formula.atoms(sympy.Pow, sympy.Function)
    return all(abs(complex(part.evalf(15, subs=point)).imag) < _NOT_REAL for part in parts)


def _is_finite(value: Any) -> bool:
    return value.is_finite is not False and cmath.isfinite(complex(value))


def _differ(one: Any, other: Any) -> bool:
    scale = max(abs(one), abs(other))
    return bool(abs(one - other) > _ROUNDED * scale) and bool(scale > _ZERO)


# -- exact numbers ---------------------------------------------------------------------------------------------------


def _is_zero(number: Any) -> bool:
    """Whether a small constant is zero: by exact arithmetic, or with more and more digits until they decide."""
    if number.has(*_WITHOUT_VALUE) or not all(map(_is_finite_sum, number.atoms(sympy.Sum, sympy.Product))):
        return True
    number = number.doit()
    if number.is_Rational:
        return bool(number == 0)
    bits = _separation_bits(number)
    *_, accuracy, imaginary_accuracy = evalf(number, 2 * _CERTAIN_BITS, {"maxprec": bits})
    return all(correct is None or correct < _CERTAIN_BITS for correct in (accuracy, imaginary_accuracy))


def _separation_bits(number: Any) -> int:
    """Number of bits after which a number that still looks like zero is known to be zero."""
    if number.has(sympy.factorial, sympy.gamma, sympy.binomial):
        return _GAMMA_BITS
    degree = math.prod(power.exp.q for power in number.atoms(sympy.Pow) if power.exp.is_Rational)
    bounds = _bounds(number)
    if bounds is None:
        written = sum(_size(part.p) + _size(part.q) for part in number.atoms(sympy.Rational))
        return min(_MIN_BITS + 4 * math.ceil(written), _MAX_BITS)
    above, below = bounds
    size = (2 * degree if number.has(sympy.I) else degree) * above + below
    return min(math.ceil(size) + 4 * _CERTAIN_BITS, _MAX_BITS)


def _bounds(number: Any) -> tuple[float, float] | None:
    """log2 of the bounds u and l of an algebraic expression; None for others."""
    if number.is_Rational:
        return _size(number.p), _size(number.q)
    if number is sympy.I:
        return 0.0, 0.0
    if number.is_Pow and number.exp.is_Rational:
        bounds, p, q = _bounds(number.base), abs(number.exp.p), number.exp.q
        above, below = bounds or (0.0, 0.0)
        if number.exp < 0:
            above, below = below, above
        above, below = p * above, p * below
        root = ((above + (q - 1) * below) / q, below) if above >= below else (above, ((q - 1) * above + below) / q)
        return bounds and root
    if not (number.is_Add or number.is_Mul):
        return None
    parts = [_bounds(part) for part in number.args]
    part_bounds = [part for part in parts if part is not None]
    if len(part_bounds) < len(parts):
        return None
    above, below = part_bounds[0]
    for other_above, other_below in part_bounds[1:]:
        if number.is_Mul:
            above += other_above
        else:
            above = max(above + other_below, other_above + below) + 1
        below += other_below
    return above, below


def _size(integer: int) -> float:
    return float(abs(integer).bit_length())


@lru_cache(maxsize=1024)  # a group of completions has one reference, and often the same few answers
def _parsed(latex: str) -> Any:
    """The formula in sympy, with i as the imaginary unit; None if it cannot be parsed."""
    latex = _FACTORS.sub(r"\g<0>\\cdot ", latex)
    for pattern, symbol in _SYMBOLS:
        latex = pattern.sub(symbol, latex)
    try:
        formula = latex2sympy(
            latex,
            is_real=True,
            convert_degrees=False,
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever the exception, the formula cannot be parsed
        return None
    if isinstance(formula, sympy.Basic) and not formula.has(sympy.Sum, sympy.Product):
        formula = formula.subs({symbol: sympy.I for symbol in formula.free_symbols if str(symbol) == "i"})
    if isinstance(formula, sympy.Expr):  # decimals are fractions
        formula = formula.xreplace({part: sympy.Rational(str(part)) for part in formula.atoms(sympy.Float)})
    return formula


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
"""Formulas of many kinds that are parsed once, to fill the parser's caches (0.1 s per kind) for all processes that are
forked from here."""

for _pair in _WARM_UP:
    check("equal", *_pair.rsplit("|", 1))
_parsed.cache_clear()
