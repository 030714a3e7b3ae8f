r"""The exact value of an answer that is a plain number: integers, decimals, numbers with an exponent or in another
base, fractions, mixed numbers, repeating decimals and percentages.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400
"""Largest power of ten that is evaluated here; the checker, which has a time limit, evaluates larger ones."""
MIN_PLACES = 6
"""Number of decimal places from which a decimal may stand for a fraction, as in math-verify."""
_INTEGER = r"[0-9]+"
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_TEN_POWER = r"(?:(?:\\times|\\cdot|\*)10\^(?:\{(?P<braced>[-+]?[0-9]{1,4})\}|(?P<bare>[-+]?[0-9]{1,4})))"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<decimal>{_DECIMAL}){_TEN_POWER}?|10\^(?:\{{(?P<power>[-+]?[0-9]{{1,4}})\}}"
    r"|(?P<digit>[0-9])))"
)
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>{_INTEGER})?(?:\\frac\{{(?P<top>-?{_DECIMAL})\}}\{{(?P<bottom>-?{_DECIMAL})\}})"
    rf"|(?P<sign2>[-+]?)(?P<top2>{_DECIMAL})/(?P<bottom2>{_DECIMAL})"
)
_REPEATING = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)\.(?P<digits>[0-9]*)\\overline\{?(?P<again>[0-9]+)\}?")
_BASED = re.compile(r"(?P<sign>[-+]?)(?P<digits>[0-9][0-9A-F]*)_(?:\{(?P<braced>[0-9]{1,2})\}|(?P<bare>[0-9]))")

_MULTIPLE = re.compile(
    r"(?P<sign>-?)(?P<open>\\frac\{)?(?P<factor>[1-9][0-9]{0,8})?(?P<base>\\sqrt\{(?P<root>[0-9]{1,9})\}|\\pi|e) ?"
    r"(?(open)\}\{(?P<under>[1-9][0-9]{0,8})\}|(?:/(?P<below>[1-9][0-9]{0,8}))?)"
)
_INFINITIES = {r"\infty": math.inf, r"-\infty": -math.inf}


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """An exact value and the form in which it was written."""

    value: Fraction
    is_percent: bool
    places: int | None = None
    """Number of digits after the decimal point, less the exponent of ten; None for numbers without a point. A decimal
    may be rounded; integers, fractions and powers are exact."""


def rational(normal: str) -> PlainNumber | None:
    r"""The exact value of a normalised answer that is a plain number, or None.

    Example: rational("0.75") and rational(r"\frac{3}{4}") both have the value 3/4; rational(r"\sqrt{2}") is None.
    """
    if len(normal) > 200 or not any(character.isdigit() for character in normal):
        return None
    is_percent = normal.endswith("%")
    text = normal.removesuffix("%")
    while text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1]
    plain = _PLAIN.fullmatch(text)
    if plain:
        return _plain(plain, is_percent)
    for reader in (_fraction, _based, _repeating):
        value = reader(text)
        if value is not None:
            return PlainNumber(value, is_percent=is_percent)
    return None


def place_of(normal: str) -> float | None:
    r"""The approximate value of a normalised number, or of a multiple of a root, of e or of pi; None for others."""
    number = rational(normal)
    if number:
        return float(number.value)
    if normal in _INFINITIES:
        return _INFINITIES[normal]
    multiple = _MULTIPLE.fullmatch(normal)
    if multiple is None:
        return None
    base = math.sqrt(int(multiple["root"])) if multiple["root"] else {"e": math.e}.get(multiple["base"], math.pi)
    value = int(multiple["factor"] or 1) * base / int(multiple["under"] or multiple["below"] or 1)
    return -value if multiple["sign"] else value


def equal_numbers(one: PlainNumber, other: PlainNumber) -> bool:
    """Whether two numbers are equal in value. A percentage also equals the number before its sign, unless that number
    is a fraction or below 1: 12.5% is 1/8 or 12.5, but 0.125% is not 1/8. A decimal of at least six places may be a
    rounded or truncated fraction, unless all its digits are zeros."""
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        is_fraction = plain.value.denominator > 1 and (plain.places is None or abs(plain.value) < 1)
        return plain.value == percent.value / 100 or (plain.value == percent.value and not is_fraction)
    if one.value == other.value or (one.places is None) == (other.places is None):
        return one.value == other.value
    decimal, exact = (other, one) if one.places is None else (one, other)
    assert decimal.places is not None, "one of them is written with a point"
    is_rounded = decimal.places >= MIN_PLACES and decimal.value != 0
    return is_rounded and abs(decimal.value - exact.value) < Fraction(1, 10**decimal.places)


def _plain(match: re.Match[str], is_percent: bool) -> PlainNumber | None:
    exponent = int(match["braced"] or match["bare"] or match["power"] or match["digit"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = _digits(match["decimal"] or "1") * Fraction(10) ** exponent
    _, point, digits = (match["decimal"] or "").partition(".")
    value = -value if match["sign"] == "-" else value
    return PlainNumber(value, is_percent=is_percent, places=len(digits) - exponent if point else None)


def _fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    top, bottom = _digits(match["top"] or match["top2"]), _digits(match["bottom"] or match["bottom2"])
    whole = _digits(match["whole"] or "0")
    if bottom == 0 or (match["whole"] and (top < 0 or bottom < 0)):
        return None
    value = whole + top / bottom
    return -value if (match["sign"] or match["sign2"]) == "-" else value


def _based(text: str) -> Fraction | None:
    """`1010_2` is ten."""
    match = _BASED.fullmatch(text)
    base = int(match["braced"] or match["bare"]) if match else 0
    if match is None or not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in match["digits"]):
        return None
    value = Fraction(int(match["digits"], base))
    return -value if match["sign"] == "-" else value


def _repeating(text: str) -> Fraction | None:
    r"""`0.1\overline{6}` is a sixth."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    digits, again = match["digits"], match["again"]
    shift = 10 ** len(digits)
    value = Fraction(int(match["whole"] + digits or 0), shift) + Fraction(int(again), shift * (10 ** len(again) - 1))
    return -value if match["sign"] == "-" else value


def _digits(digits: str) -> Fraction:
    return Fraction(digits.rstrip(".") or "0")
