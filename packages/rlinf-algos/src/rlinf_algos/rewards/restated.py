r"""Restates the answer found in the form of the expected one: without the domain after a formula, the "per day" of a
rate or words around a value, and with a quantity given in two units as a list of both.

Every step takes normalised answers and drops nothing that may change the value.
"""

import re

from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.units import read_unit

_SIGN = r"(?:<|>|\\(?:[lg]e|ne|in) ?)"
_HOLDS = rf"(?:[^<>,()\\=]{{1,12}}(?:<|\\le ?))?([a-z]){_SIGN}[^<>=,a-zA-Z]{{0,20}}(?:\\mathbb\{{[ZNQR]\}}[^,]{{0,8}})?"
_DOMAIN = re.compile(rf"(?:,|,?(?:\\text\{{(?:for|where|with)\}}))\(?{_HOLDS}\)?\Z|\({_HOLDS}\)\Z")
_ANY_SIGN = re.compile(_SIGN)
_UNITS = r"(?:\\text\{[^{}]*\}){1,2}"
_AGAIN = re.compile(rf"((-?[0-9.]+)({_UNITS}))\((-?[0-9.]+)({_UNITS})\)")
_IN_OTHER_UNIT = re.compile(r",?\(?\\text\{or\}(?:\\text\{in\}\\text\{(?:radians|degrees)\},?)?(?=.)")
_LOSS = re.compile(
    r"-([0-9.]+)\\text\{dollars\},?i\.e\.,?(?:a|\\text\{(?:he|she|it|they|made|an?)\})*\\text\{loss\}\\text\{of\}"
    r"([0-9.]+)\\text\{dollars\}"
)
_FEET = re.compile(r"([0-9]{1,3})(?:'|\\text\{(?:ft|feet|foot)\})([0-9]{1,2}(?:\.[0-9]+)?)(?:''|\")?")
_WAYS = re.compile(r"\A(-?[0-9.]+\\text\{ways\})\\text\{(?:to|of)\}(?:\\text\{(?!or\}|not\}|if\})[a-z]+\}){1,8}\Z")
_SOLUTION = re.compile(
    r"\A(?:\\text\{(?:the|only|solution|answer|value|result)\}){1,3}\\text\{is\}(?=-?[0-9]|[A-Za-z]=|\\[fs])"
)
_RATE = re.compile(r"\A(-?[0-9.]+\\text\{([a-z]{3,20})\})\\text\{(?:per|each|every)\}\\text\{[a-z]+\}\Z")
_INFINITE = re.compile(r"(?:\\text\{(?:the|limit|integral|sum|it|value|is)\}){0,4}\\text\{infinite\}")
_NUMBER = re.compile(r"-?[0-9.]+")
_PERSON = re.compile(
    r"-?(?:\\text\{([a-z]+)\}|([A-Z][a-z]+))(?:[:=]|\\text\{(?:is|has|gets)\})?"
    r"(-?[0-9.]+)(\\text\{[a-z]+\})?(?:,|\Z|\\text\{and\})(?:\\text\{and\})?"
)


def restated(expected: str, answer: str) -> str:
    """Example: restated("2n+1", r"2n+1,n\\ge1") == "2n+1"."""
    answer = _without_domain(expected, answer)
    if r"\text" not in answer and "'" not in answer:
        return answer
    answer = re.sub(r"(?<=[0-9])\\min ?(?=[0-9])", r"\\text{min}", answer)
    answer = in_feet(answer, expected)
    if "(" not in expected:
        answer = _without_repetition(answer)
        answer = _of_both_units(expected, answer)
    loss = _LOSS.fullmatch(answer)
    if loss and loss[1] == loss[2]:
        answer = rf"-{loss[1]}\text{{dollars}}"
    if expected == r"\infty" and _INFINITE.fullmatch(answer):
        return expected
    rate = _RATE.match(answer)
    if rate and (_NUMBER.fullmatch(expected) or expected.endswith(rf"\text{{{rate[2]}}}")):
        answer = rate[1] if r"\text{per}" not in expected else answer
    return _SOLUTION.sub("", _WAYS.sub(r"\1", answer))


def _without_repetition(answer: str) -> str:
    """4500 g for "4500 g (4.5 kg)", if the two are equal."""
    again = _AGAIN.fullmatch(answer)
    if again is None:
        return answer
    values, units = (rational(again[2]), rational(again[4])), (read_unit(again[3]), read_unit(again[5]))
    if not values[0] or not values[1] or not units[0] or not units[1] or units[0].bases != units[1].bases:
        return answer
    is_same = values[0].value * units[0].factor == values[1].value * units[1].factor
    return again[1] if is_same else answer


def people(text: str) -> dict[str, str] | None:
    """Name -> value for "Tom 14, Ann 9"; None for other texts."""
    items = list(_PERSON.finditer(text)) if len(text) < 300 else []
    values = {(item[1] or item[2]).lower(): item[3] + (item[4] or "") for item in items}
    is_whole = "".join(item[0] for item in items) == text
    return values if is_whole and len(items) == len(values) > 1 else None


def in_feet(text: str, other: str) -> str:
    """`5'3"` as feet and inches, or as minutes and seconds if the other answer is in these units."""
    height = _FEET.fullmatch(text) if "'" in text or r"\text{f" in text else None
    if height is None:
        return text
    large, small = ("minutes", "seconds") if r"\text{min" in other and "'" in text else ("feet", "inches")
    return rf"{height[1]}\text{{{large}}}{height[2]}\text{{{small}}}"


def _of_both_units(expected: str, answer: str) -> str:
    r"""An angle in degrees and in radians as a list: `60\text{degrees},\theta=\frac{\pi}{3}`."""
    other = _IN_OTHER_UNIT.search(answer)
    is_both = other is not None and r"\pi" in answer and r"\text{degrees}" in answer and r"\text{or}" not in expected
    if not is_both or other is None:
        return answer
    rest = answer[other.end() :]
    return f"{answer[: other.start()]},{rest.removesuffix(')') if '(' in other[0] else rest}"


def _without_domain(expected: str, answer: str) -> str:
    """A formula, with or without a name, without the conditions on its letters that follow it."""
    if _ANY_SIGN.search(expected) or r"\pmod" in expected or not _ANY_SIGN.search(answer):
        return answer
    for _ in range(2):
        domain = _DOMAIN.search(answer, max(0, len(answer) - 80))
        if domain is None:
            break
        formula = answer[: domain.start()]
        value, letter = formula.rpartition("=")[2], domain[1] or domain[2]
        is_formula = formula.count("=") < 2 and not re.search(_SIGN + r"|\\\{|\\text|,", formula)
        if not is_formula or not re.search(rf"(?<![A-Za-z\\]){letter}(?![a-z])", re.sub(r"\\[a-z]+ ?", " ", value)):
            break
        is_curve = "=" in formula and not re.match(r"[A-Za-z](?:_\{?[a-z]\}?|\([a-z]\))?=", formula)
        if is_curve or re.fullmatch(r"-?[A-Za-z]", value):
            break
        answer = formula
    return answer
