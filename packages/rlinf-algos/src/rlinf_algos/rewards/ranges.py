r"""Reads the intervals that an answer describes in any form: `x<2 \text{or} x>3`, `|x|<3`, `\{x|x>3\}`, `x\ne0`,
`\mathbb{R}\setminus\{0\}`, `x\in[0,1]`, `(-\infty,2)\cup(3,\infty)`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_algos.rewards.forms import spread
from rlinf_algos.rewards.plain_number import place_of, rational
from rlinf_algos.rewards.structure import BUILT, AnswerPart, name_of, read

FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_INFINITY, _MINUS_INFINITY, _EVERYTHING = read(r"\infty"), read(r"-\infty"), r"\mathbb{R}"
_WITHOUT = re.compile(
    r"(\\mathbb\{R\}|[(\[][^()\[\]]+[)\]])(?:\\setminus|\\backslash|(?:(?<=R\})|(?<=\\infty\)))-) ?"
    r"(?:\\\{(.+)\\\}|((?:\\frac\{[^{}]*\}\{[^{}]*\}|\\(?:text|sqrt)\{[^{}]*\}|[^{}])+))"
)
_DOMAIN = re.compile(r"[a-z]\\in ?\\mathbb\{([ZN])\}(\^(?:\\cdot|\\ast|\+|\{\+\}|\{\\ast ?\})|_\+|_\{\+\})?")
_MAX_INTEGERS = 60
_ABSOLUTE = re.compile(r"\|(?:([1-9][0-9]{0,9})(?:\\cdot)?)?([A-Za-z])(?:([-+])([^|A-Za-z]+))?\|")


@dataclass(frozen=True, slots=True)
class Range:
    """An interval from `low` to `high`; `brackets` are "[" or "(", and "]" or ")"."""

    low: AnswerPart
    high: AnswerPart
    brackets: str


def ranges(answer: AnswerPart) -> tuple[Range, ...] | None:
    """The intervals of an answer; None if it describes none."""
    answer = spread(answer)
    without = _WITHOUT.fullmatch(answer.text)
    if without:
        whole = ranges(read(without[1]))
        excluded = re.sub(r"(?<![A-Za-z])[A-Za-z]=", "", without[2] or without[3])
        excluded = read(excluded.replace(r"\text{zero}", "0"))
        if excluded.kind in ("tuple", "union"):
            return _without(whole, ranges(excluded))
        return _without(whole, _points(excluded.parts if excluded.kind in ("list", "set") else (excluded,)))
    if answer.kind == "tuple" and len(answer.parts) == 2:
        low, high = answer.parts
        return (Range(low, high, answer.marks[0]),)
    if answer.kind == "formula" and answer.text == _EVERYTHING:
        return (Range(_MINUS_INFINITY, _INFINITY, "()"),)
    if answer.kind == "union" or (answer.kind == "list" and re.search(r"\\text\{or\}|\\lor|\\vee", answer.text)):
        pieces = [ranges(part) for part in answer.parts]
        if any(pieces):
            pieces = [piece or _single(part) for piece, part in zip(pieces, answer.parts, strict=True)]
        return None if None in pieces else tuple(piece for group in pieces if group for piece in group)
    if answer.kind == "list":
        return _of_all(answer.parts, is_joined=re.search(r"\\text|\\land|\\wedge", answer.text) is not None)
    if answer.kind != "relation":
        return None
    if answer.marks == ("\\in",) and name_of(answer.parts[0]):
        return ranges(answer.parts[1])
    if answer.marks == ("\\ne",) and name_of(answer.parts[0]):
        excluded = answer.parts[1]
        return _around(excluded.parts if excluded.kind == "list" else (excluded,))
    return _of_absolute(_of_square(answer)) or _of_inequality(answer)


def _of_square(relation: AnswerPart) -> AnswerPart:
    r"""`|x|\le2` for `x^2\le4`; other relations unchanged."""
    squared = re.fullmatch(r"([A-Za-z])\^2(<|>|\\[lg]e) ?([1-9][0-9]{0,9})", relation.text)
    if squared is None:
        return relation
    return read(rf"|{squared[1]}|{squared[2]}{_root_of(squared[3])}")


def _root_of(number: str) -> str:
    root = math.isqrt(int(number))
    return str(root) if root * root == int(number) else rf"\sqrt{{{number}}}"


def _single(answer: AnswerPart) -> tuple[Range, ...] | None:
    r"""The points of `\{1,2\}` or `x=1`."""
    if answer.kind == "relation" and answer.marks == ("=",) and name_of(answer.parts[0]):
        answer = answer.parts[1]
        return _points((answer,)) if answer.kind == "formula" else None
    is_plain = answer.kind == "set" and all(part.kind == "formula" for part in answer.parts)
    return _points(answer.parts) if is_plain else None


def turned(relation: AnswerPart) -> AnswerPart:
    """The relation read from right to left."""
    marks = tuple(FLIPPED.get(mark, mark) for mark in reversed(relation.marks))
    return AnswerPart("relation", relation.text, relation.parts[::-1], marks)


def _around(values: Sequence[AnswerPart]) -> tuple[Range, ...] | None:
    """Everything but these values."""
    return _without((Range(_MINUS_INFINITY, _INFINITY, "()"),), _points(values))


def _points(values: Sequence[AnswerPart]) -> tuple[Range, ...]:
    return tuple(Range(value, value, "[]") for value in values)


def _without(whole: tuple[Range, ...] | None, excluded: tuple[Range, ...] | None) -> tuple[Range, ...] | None:
    """`whole` without `excluded`; None if their ends cannot be put in order."""
    if not whole or not excluded:
        return None
    for cut in excluded:
        pieces: list[Range] = []
        for piece in whole:
            below = _earlier(piece.high, piece.brackets[1], cut.low, ")" if cut.brackets[0] == "[" else "]")
            above = _later(piece.low, piece.brackets[0], cut.high, "(" if cut.brackets[1] == "]" else "[")
            if below is None or above is None:
                return None
            pieces += [Range(piece.low, below[0], piece.brackets[0] + below[1])]
            pieces += [Range(above[0], piece.high, above[1] + piece.brackets[1])]
        filled = [_is_filled(piece) for piece in pieces]
        whole = tuple(piece for piece, is_filled in zip(pieces, filled, strict=True) if is_filled)
    return whole or None


def _earlier(one: AnswerPart, bracket: str, other: AnswerPart, other_bracket: str) -> tuple[AnswerPart, str] | None:
    """The lower of two upper ends; None if it is not known."""
    low, high = _place(one), _place(other)
    if one.text == other.text or (low is not None and low == high):
        return one, ")" if ")" in (bracket, other_bracket) else "]"
    if high == math.inf or low == -math.inf:
        return one, bracket
    if low == math.inf or high == -math.inf:
        return other, other_bracket
    if low is None or high is None:
        return None
    return (one, bracket) if low < high else (other, other_bracket)


def _later(one: AnswerPart, bracket: str, other: AnswerPart, other_bracket: str) -> tuple[AnswerPart, str] | None:
    """The higher of two lower ends; None if it is not known."""
    earlier = _earlier(one, bracket, other, other_bracket)
    if one.text == other.text or (_place(one) is not None and _place(one) == _place(other)):
        return one, "(" if "(" in (bracket, other_bracket) else "["
    if earlier is None:
        return None
    return (other, other_bracket) if earlier[0] is one else (one, bracket)


def _is_filled(piece: Range) -> bool:
    """Whether the interval is not empty; ends that are not numbers are compared as texts."""
    low, high = _place(piece.low), _place(piece.high)
    if low is None or high is None:
        return piece.low.text != piece.high.text or piece.brackets == "[]"
    return low < high or (low == high and piece.brackets == "[]" and abs(low) != math.inf)


def _place(end: AnswerPart) -> float | None:
    return place_of(end.text)


def integers_of(answer: AnswerPart) -> AnswerPart | None:
    r"""`\{x\in\mathbb{Z}|-2\le x\le2\}` and `1\le n\le3,n\in\mathbb{Z}` as the set of those integers; None for
    others, or if there are too many."""
    if answer.kind not in ("set", "list") or r"\mathbb" not in answer.text:
        return None
    built = BUILT.fullmatch(answer.text) if answer.kind == "set" else None
    whole = read(f"{built[1]},{built[2]}" if _DOMAIN.fullmatch(built[1]) else built[2]) if built else answer
    if whole.kind != "list":
        return None
    domains = [domain for part in whole.parts if (domain := _DOMAIN.fullmatch(part.text))]
    conditions = tuple(part for part in whole.parts if not _DOMAIN.fullmatch(part.text))
    if len(domains) != 1 or not conditions or any(part.kind != "relation" for part in conditions):
        return None
    intervals = ranges(conditions[0]) if len(conditions) == 1 else _of_all(conditions)
    least = 1 if domains[0][2] else 0 if domains[0][1] == "N" else -math.inf
    values: set[int] = set()
    for interval in intervals or ():
        low, high = _place(interval.low), _place(interval.high)
        if low is None or high is None or high == math.inf or max(low, least) == -math.inf:
            return None
        is_open = interval.brackets[0] == "(" and low > -math.inf and low == math.ceil(low)
        first = math.ceil(max(low + is_open, least))
        last = math.floor(high) - (interval.brackets[1] == ")" and high == math.floor(high))
        if last - first >= _MAX_INTEGERS:
            return None
        values.update(range(first, last + 1))
    if not values:
        return None
    return AnswerPart("set", answer.text, tuple(read(str(value)) for value in sorted(values)))


def roster_of(answer: AnswerPart) -> AnswerPart | None:
    r"""`\{2n:1\le n\le4\}` and `\{x:x^2=4\}` as the sets of their members; None for others."""
    built = BUILT.fullmatch(answer.text) if answer.kind == "set" else None
    squared = built and re.fullmatch(r"([a-z])\^2=([0-9]{1,9})", built[2])
    if built and squared and built[1] in (squared[1], rf"{squared[1]}\in{_EVERYTHING}"):
        root = _root_of(squared[2])
        return read(rf"\{{-{root},{root}\}}" if root != "0" else r"\{0\}")
    member = built and re.fullmatch(r"([1-9][0-9]{0,3})?([kmn])(\^2)?([-+][0-9]{1,4})?", built[1])
    if not built or not member or not re.search(rf"(?<![a-z]){member[2]}(?![a-z])", built[2]):
        return None
    condition = built[2] if r"\mathbb" in built[2] else rf"{built[2]},{member[2]}\in\mathbb{{Z}}"
    values = integers_of(read(condition))
    if values is None:
        return None
    numbers = (int(part.text) for part in values.parts)
    members = (int(member[1] or 1) * (n * n if member[3] else n) + int(member[4] or 0) for n in numbers)
    return read(rf"\{{{','.join(map(str, sorted(set(members))))}\}}")


def _of_all(parts: tuple[AnswerPart, ...], *, is_joined: bool = True) -> tuple[Range, ...] | None:
    """The intervals where all inequalities of one name hold: exclusions, or a lower and an upper bound. If no number
    satisfies both bounds and there is no "and", the intervals where one of them holds."""
    if not all(part.kind == "relation" and len(part.parts) <= 3 for part in parts):
        return None
    parts = tuple(part for part in parts if part.marks != ("\\in",) or part.parts[1].text != _EVERYTHING)
    names = {name_of(side) for part in parts for side in part.parts} - {None}
    if len(names) != 1:
        return None
    excluded = [part.parts[1] for part in parts if part.marks == ("\\ne",)]
    if excluded:
        bounds = tuple(part for part in parts if part.marks != ("\\ne",))
        return _without(_of_all(bounds), _points(excluded)) if bounds else _around(excluded)
    if len(parts) == 1:
        return _of_absolute(parts[0]) or _of_inequality(parts[0])
    pieces = [_of_inequality(part) for part in parts]
    if len(pieces) != 2 or not pieces[0] or not pieces[1]:
        return None
    below, above = pieces[0][0], pieces[1][0]
    if below.low is not _MINUS_INFINITY:
        below, above = above, below
    if len(pieces[0] + pieces[1]) > 2 or below.low is not _MINUS_INFINITY or above.high is not _INFINITY:
        return None
    low, high = _place(above.low), _place(below.high)
    if not is_joined and low is not None and high is not None and high < low:
        return below, above
    return (Range(above.low, below.high, above.brackets[0] + below.brackets[1]),)


def _of_absolute(relation: AnswerPart) -> tuple[Range, ...] | None:
    """`|x-1|<3` as (-2,4), `|x|>3` as the two intervals outside, `1<|x|<2` as those between."""
    if len(relation.parts) == 3 and re.fullmatch(r"\|[A-Za-z]\|", relation.parts[1].text):
        return _between(relation)
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


def _between(relation: AnswerPart) -> tuple[Range, ...] | None:
    if relation.marks[0] in (">", "\\ge"):
        relation = turned(relation)
    low, high = relation.parts[0], relation.parts[2]
    places = _place(low), _place(high)
    if not set(relation.marks) <= {"<", "\\le"} or places[0] is None or places[1] is None or places[0] < 0:
        return None
    minus_low, minus_high = (
        read("0" if place == 0 else f"-{end.text}") for end, place in zip((low, high), places, strict=True)
    )
    left, right = ("(" if mark == "<" else "[" for mark in relation.marks)
    closing = {"(": ")", "[": "]"}
    return Range(minus_high, minus_low, right + closing[left]), Range(low, high, left + closing[right])


def _evaluated(text: str, factor: str | None) -> AnswerPart:
    """A sum of two terms in brackets, divided by the factor; a plain number if the terms are plain numbers."""
    terms = [(sign, rational(term)) for sign, term in re.findall(r"([-+]?)\(([^()]*)\)", text)]
    if all(number for _, number in terms) and text == "".join(re.findall(r"[-+]?\([^()]*\)", text)):
        value = sum(-number.value if sign == "-" else number.value for sign, number in terms if number)
        return read(str(value / int(factor or 1)))
    return read(rf"\frac{{{text}}}{{{factor}}}" if factor else text)


def _of_inequality(relation: AnswerPart) -> tuple[Range, ...] | None:
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
