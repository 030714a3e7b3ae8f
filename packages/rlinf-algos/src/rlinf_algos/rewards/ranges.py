r"""The intervals that an answer describes, whatever its form: `x<2 \text{or} x>3`, `|x|<3`, `\{x|x>3\}`, `x\ne0`,
`\mathbb{R}\setminus\{0\}`, `x\in[0,1]`, `(-\infty,2)\cup(3,\infty)`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlinf_algos.rewards.forms import spread
from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.structure import Answer, name_of, read

FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_INFINITY, _MINUS_INFINITY, _EVERYTHING = read(r"\infty"), read(r"-\infty"), r"\mathbb{R}"
_WITHOUT = re.compile(
    r"(?:\\mathbb\{R\}|\(-\\infty,\\infty\))(?:\\setminus|\\backslash|-) ?"
    r"(?:\\\{(.+)\\\}|((?:[^{}]|\\text\{(?:and|or|zero)\})+))"
)
_ABSOLUTE = re.compile(r"\|(?:([1-9][0-9]{0,9})(?:\\cdot)?)?([A-Za-z])(?:([-+])([^|A-Za-z]+))?\|")


@dataclass(frozen=True, slots=True)
class Range:
    """An interval from `low` to `high`; `brackets` are "[" or "(", and "]" or ")"."""

    low: Answer
    high: Answer
    brackets: str


def ranges(answer: Answer) -> tuple[Range, ...] | None:
    """The intervals of an answer; None where it describes none."""
    answer = spread(answer)
    without = _WITHOUT.fullmatch(answer.text)
    if without:
        excluded = read(re.sub(r"(?<![A-Za-z])[A-Za-z]=|\\text\{zero\}", _excluded, without[1] or without[2]))
        return _around(excluded.parts if excluded.kind in ("list", "set") else (excluded,))
    if answer.kind == "tuple" and len(answer.parts) == 2:
        low, high = answer.parts
        return (Range(low, high, answer.marks[0]),)
    if answer.kind == "formula" and answer.text == _EVERYTHING:
        return (Range(_MINUS_INFINITY, _INFINITY, "()"),)
    if answer.kind == "union" or (answer.kind == "list" and re.search(r"\\text\{or\}|\\lor|\\vee", answer.text)):
        pieces = [ranges(part) for part in answer.parts]
        return None if None in pieces else tuple(piece for group in pieces if group for piece in group)
    if answer.kind == "list":
        return _of_all(answer.parts)
    if answer.kind != "relation":
        return None
    if answer.marks == ("\\in",) and name_of(answer.parts[0]):
        return ranges(answer.parts[1])
    if answer.marks == ("\\ne",) and name_of(answer.parts[0]):
        excluded = answer.parts[1]
        return _around(excluded.parts if excluded.kind == "list" else (excluded,))
    return _of_absolute(answer) or _of_inequality(answer)


def _excluded(match: re.Match[str]) -> str:
    return "" if match[0].endswith("=") else "0"


def turned(relation: Answer) -> Answer:
    """The relation read from right to left."""
    marks = tuple(FLIPPED.get(mark, mark) for mark in reversed(relation.marks))
    return Answer("relation", relation.text, relation.parts[::-1], marks)


def _around(values: Sequence[Answer]) -> tuple[Range, ...] | None:
    """Everything but these values; more than one have to be plain numbers, which can be ordered."""
    if len(values) > 1:
        numbers = [rational(value.text) for value in values]
        if any(number is None for number in numbers):
            return None
        ordered = {number.value: value for number, value in zip(numbers, values, strict=True) if number}
        values = [ordered[number] for number in sorted(ordered)]
    bounds = [_MINUS_INFINITY, *values, _INFINITY]
    return tuple(Range(low, high, "()") for low, high in pairwise(bounds))


def _of_all(parts: tuple[Answer, ...]) -> tuple[Range, ...] | None:
    """Inequalities of one name that all hold: exclusions, or a lower and an upper bound."""
    if not all(part.kind == "relation" and len(part.parts) == 2 for part in parts):
        return None
    parts = tuple(part for part in parts if part.marks != ("\\in",) or part.parts[1].text != _EVERYTHING)
    names = {name_of(side) for part in parts for side in part.parts} - {None}
    if len(names) != 1:
        return None
    if parts and all(part.marks == ("\\ne",) for part in parts):
        return _around([part.parts[1] for part in parts])
    pieces = [_of_inequality(part) for part in parts]
    if len(pieces) != 2 or not pieces[0] or not pieces[1]:
        return None
    below, above = pieces[0][0], pieces[1][0]
    if below.low is not _MINUS_INFINITY:
        below, above = above, below
    if below.low is not _MINUS_INFINITY or above.high is not _INFINITY:
        return None
    return (Range(above.low, below.high, above.brackets[0] + below.brackets[1]),)


def _of_absolute(relation: Answer) -> tuple[Range, ...] | None:
    """`|x-1|<3` as (-2,4), `|x|>3` as the two intervals outside."""
    if len(relation.parts) != 2 or relation.marks[0] not in FLIPPED:
        return None
    if relation.parts[1].text.startswith("|"):
        relation = turned(relation)
    inner = _ABSOLUTE.fullmatch(relation.parts[0].text)
    bound = relation.parts[1]
    if inner is None or bound.kind != "formula" or re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\|", bound.text):
        return None
    shift = f"{'+' if inner[3] == '-' else '-'}({inner[4]})" if inner[3] else ""
    low, high = (_evaluated(f"{sign}({bound.text}){shift}", inner[1]) for sign in ("-", ""))
    is_strict = relation.marks[0] in ("<", ">")
    if relation.marks[0] in ("<", "\\le"):
        return (Range(low, high, "()" if is_strict else "[]"),)
    ends = ")(" if is_strict else "]["
    return Range(_MINUS_INFINITY, low, "(" + ends[0]), Range(high, _INFINITY, ends[1] + ")")


def _evaluated(text: str, factor: str | None) -> Answer:
    """A sum of two terms in brackets, divided by the factor; a plain number where the terms are ones."""
    terms = [(sign, rational(term)) for sign, term in re.findall(r"([-+]?)\(([^()]*)\)", text)]
    if all(number for _, number in terms) and text == "".join(re.findall(r"[-+]?\([^()]*\)", text)):
        value = sum(-number.value if sign == "-" else number.value for sign, number in terms if number)
        return read(str(value / int(factor or 1)))
    return read(rf"\frac{{{text}}}{{{factor}}}" if factor else text)


def _of_inequality(relation: Answer) -> tuple[Range, ...] | None:
    if not set(relation.marks) <= set(FLIPPED):
        return None
    if relation.marks[0] in (">", "\\ge"):
        relation = turned(relation)
    names = [name_of(part) for part in relation.parts]
    if not set(relation.marks) <= {"<", "\\le"} or any(part.kind != "formula" for part in relation.parts):
        return None
    brackets = ["[" if mark == "\\le" else "(" for mark in relation.marks]
    closing = {"[": "]", "(": ")"}
    if len(names) == 3 and names[1]:
        low = relation.parts[0].text == _MINUS_INFINITY.text
        return (Range(relation.parts[0], relation.parts[2], ("(" if low else brackets[0]) + closing[brackets[1]]),)
    if len(names) == 2 and names[0] and not names[1]:
        return (Range(_MINUS_INFINITY, relation.parts[1], "(" + closing[brackets[0]]),)
    if len(names) == 2 and names[1] and not names[0]:
        return (Range(relation.parts[0], _INFINITY, brackets[0] + ")"),)
    return None
