r"""Converts between equivalent forms of an answer: choices with a letter, systems as tuples, numbers of things.

Example: `(C)12` is the choice C with the content 12; `(x,y)=(1,2)` is `x=1,y=2`; `10!\\text{ways}` is a quantity.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.structure import AnswerPart, name_of, read
from rlinf_algos.rewards.units import read_unit

_CHOICE = re.compile(r"\(([A-Ja-e])\)(?:[.:]|,(?!\())?(.*)|([A-Ja-e])\)[.:]?(.*)|([A-J])[.:](.+)", flags=re.DOTALL)
_LETTERS = re.compile(r"[A-J](?:,?(?:\\text\{and\})?[A-J])*")
_IDENTITY = re.compile(r"(-|[^A-Za-z+,=]*?(?:\\(?:frac|sqrt|cdot|pi)[^A-Za-z+,=]*?)*)[IE](?:_([1-9]))?")
_RATIO = re.compile(r"([0-9]{1,9})(:|/|\\text\{to\})([0-9]{1,9})|\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}")
_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?(?:\\text\{([ap])m\})?")
_COMPASS = re.compile(r"([NS])_?\{?([0-9]{1,2}(?:\.[0-9]+)?)\}?\\text\{degrees\}([EW])")


_RESIDUE = re.compile(r"([^,]+)\\pmod\{([^{}]+)\}")
_CONDITION = re.compile(r"\\\{\(?([A-Za-z](?:_[0-9])?)\)?(?:\\in ?\\mathbb\{R\})?[|:](.+)\\\}")
_UNIT_TERM = re.compile(r"([-+]?)((?:\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\}|\([^()]*\)|[0-9.])*)([ijk])")
_SCALED_VECTOR = re.compile(r"([^(),]+?)(?:\\cdot|\\times)?(\([^()]+,[^()]+\))")
_SCALED_AFTER = re.compile(r"(\\begin\{pmatrix\}.*\\end\{pmatrix\})(/|\\cdot|\\times)([^&=,]+)")
_SCALED = re.compile(r"([^&=,]+?)(?:\\cdot|\\times)?(\\begin\{pmatrix\}.*\\end\{pmatrix\})")


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """A choice in a multiple-choice question."""

    letters: str
    """Capital letters in order."""
    content: AnswerPart | None
    """The text after the letter."""


@dataclass(frozen=True, slots=True)
class Residue:
    r"""Example: `x\equiv7\pmod{9}` is Residue(name="x", value="7", modulus="9")."""

    name: str | None
    value: str
    modulus: str


def residue_of(answer: AnswerPart) -> Residue | None:
    """The residue of an answer with a modulus; None for others. A number on the left side does not count as a name."""
    if not answer.text.endswith("}") or r"\pmod" not in answer.text:
        return None
    *left, last = answer.text.split(r"\equiv") if r"\equiv" in answer.text else answer.text.split("=")
    match = _RESIDUE.fullmatch(last)
    name = left[0].strip() if left else None
    if match is None or (name and "," in name):
        return None
    return Residue(name if name and re.search(r"(?<![A-Za-z\\])[a-z]", name) else None, match[1].strip(), match[2])


def residues_of(answer: AnswerPart) -> AnswerPart | None:
    r"""`x\equiv7\pmod{9}` as `x=9k+7,k\in\mathbb{Z}`; None for other answers."""
    residue = residue_of(answer)
    return read(rf"x={residue.modulus}k+({residue.value}),k\in\mathbb{{Z}}") if residue else None


def choice_of(text: str) -> ChoiceOption | None:
    """A normalised answer as a choice if it has a letter in brackets or before a full stop; None for others."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter, content = match[1] or match[3] or match[5], match[2] or match[4] or match[6]
    return ChoiceOption(letter.upper(), spread(read(content)) if content else None)


def letters_of(text: str) -> str | None:
    """The letters of a normalised answer that consists of letters only: AC for `A,C`."""
    text = text.upper() if len(text) == 1 else re.sub(r"\(([A-J])\)", r"\1", text)
    return "".join(sorted(re.findall(r"[A-J](?![a-z])", text))) if _LETTERS.fullmatch(text) else None


def choice_letter(text: str) -> str | None:
    """The letter of a normalised answer that is a choice, with or without its content."""
    choice = choice_of(text)
    letters = choice.letters if choice else letters_of(text)
    return letters if letters and len(letters) == 1 else None


def spread(answer: AnswerPart) -> AnswerPart:
    r"""`x\in\{1,2\}` as the set, `\{x|x>1\}` as its condition, a matrix with a factor as a matrix, a relation between a
    tuple of names and a tuple of values as a list of relations, a formula with what it counts as a quantity; other
    answers unchanged."""
    built = _CONDITION.fullmatch(answer.text) if answer.kind == "set" else None
    if built and not re.search(r"\\in|\\mathbb", built[2]):
        return spread(read(built[2]))
    if answer.kind == "formula" and answer.text.endswith(")"):
        vector = _SCALED_VECTOR.fullmatch(answer.text)
        factor = rational(vector[1]) if vector else None
        if vector and (factor or vector[1] == "-"):
            cells = tuple(_product(vector[1], cell) for cell in read(vector[2]).parts)
            return AnswerPart("tuple", answer.text, cells, ("()",))
    scaled = _SCALED.fullmatch(answer.text) or _SCALED_AFTER.fullmatch(answer.text)
    if scaled and scaled.re is _SCALED_AFTER:
        factor = f"\\frac{{1}}{{{scaled[3]}}}" if scaled[2] == "/" else scaled[3]
        return spread(read(f"{factor}{scaled[1]}")) if rational(scaled[3]) else answer
    if scaled and answer.kind == "formula" and scaled[1].count("(") == scaled[1].count(")"):
        matrix = read(scaled[2])
        cells = tuple(_product(scaled[1], cell) for cell in matrix.parts)
        return AnswerPart("matrix", answer.text, cells, matrix.marks) if matrix.kind == "matrix" else answer
    if answer.kind == "relation" and answer.marks == ("\\in",) and answer.parts[1].kind == "set":
        return answer.parts[1] if name_of(answer.parts[0]) else answer
    if answer.kind == "relation" and len(answer.parts) > 2 and set(answer.marks) == {"="}:
        *names, last = answer.parts
        if all(map(name_of, names)) and not name_of(last):  # a=b=2
            items = (AnswerPart("relation", f"{name.text}={last.text}", (name, last), ("=",)) for name in names)
            return AnswerPart("list", answer.text, tuple(items))
        if name_of(names[0]) and last.kind == "list":
            return last
    if answer.kind == "relation" and answer.marks == ("=",) and len(answer.parts) == 2:
        names, values = answer.parts
        if name_of(names) and values.kind == "list":
            return values
        are_tuples = names.kind == values.kind == "tuple" and len(names.parts) == len(values.parts)
        if are_tuples and all(name_of(name) for name in names.parts):
            pairs = zip(names.parts, values.parts, strict=True)
            items = tuple(AnswerPart("relation", f"{x.text}={y.text}", (x, y), ("=",)) for x, y in pairs)
            return AnswerPart("list", answer.text, items)
    if answer.kind == "union" and all(
        part.kind == "set" and "|" not in part.text and ":" not in part.text for part in answer.parts
    ):
        return AnswerPart("set", answer.text, tuple(item for part in answer.parts for item in part.parts))
    if answer.kind == "list":
        items = (
            part if part.kind == "relation" and part.parts[0].kind == "tuple" else spread(part) for part in answer.parts
        )
        parts = (part.parts if part.kind == "list" else (part,) for part in items)
        return AnswerPart("list", answer.text, tuple(item for items in parts for item in items))
    if answer.kind == "phrase" and len(answer.marks) == 2 and answer.marks[0] == "" and len(answer.parts) == 1:
        words = "".join(rf"\text{{{word}}}" for word in answer.marks[1].split())
        unit = read_unit(words)
        if unit is not None and not re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", answer.parts[0].text):
            return AnswerPart("quantity", answer.text, answer.parts, (), unit)
    return answer


def alternatives_of(answer: AnswerPart) -> AnswerPart | None:
    r"""`x=2,y=3\\text{or}x=3,y=2` as a list of tuples; None for other answers."""
    if answer.kind != "list" or r"\text{or}" not in answer.text:
        return None
    groups = [spread(read(piece)) for piece in answer.text.split(r"\text{or}")]
    named = [_by_name(group) for group in groups]
    names = sorted(named[0] or ())
    if len(names) < 2 or any(group is None or sorted(group) != names for group in named):
        return None
    tuples = [read(f"({','.join(group[name] for name in names)})") for group in named if group]
    return AnswerPart("list", answer.text, tuple(tuples))


def names_of(expected: str) -> tuple[str, ...]:
    """The names of the values of a reference, "-" for a value without a name; empty unless it is a list or tuple."""
    answer = spread(read(expected))
    is_tuple = answer.kind == "tuple" and answer.marks == ("()",)
    if (answer.kind != "list" and not is_tuple) or r"\text{or}" in expected:
        return ()
    named = [part.kind == "relation" and part.marks == ("=",) and name_of(part.parts[0]) for part in answer.parts]
    names = tuple(str(name or "-") for name in named)
    is_plain = all(named) or not any(named)
    return names if is_plain and len(names) > 1 and not any(" " in name for name in names) else ()


def _by_name(group: AnswerPart) -> dict[str, str] | None:
    """The values of a list of assignments by their names."""
    if group.kind != "list" or any(part.kind != "relation" or part.marks != ("=",) for part in group.parts):
        return None
    return {part.parts[0].text: part.parts[1].text for part in group.parts if name_of(part.parts[0])}


def in_unit_vectors(answer: AnswerPart, size: int) -> AnswerPart | None:
    """A sum of multiples of i, j and k as the tuple of its components, three of them if the size is three; None for
    others."""
    terms = _UNIT_TERM.findall(answer.text) if answer.kind == "formula" else []
    if not terms or "".join(map("".join, terms)) != answer.text:
        return None
    components = {name: f"{sign if sign == '-' else ''}{factor or '1'}" for sign, factor, name in terms}
    if len(components) < len(terms):
        return None
    names = "ijk" if "k" in components or size == 3 else "ij"
    return AnswerPart("tuple", answer.text, tuple(read(components.get(name, "0")) for name in names), ("()",))


def as_matrix(answer: AnswerPart, sizes: tuple[str, ...]) -> AnswerPart | None:
    r"""`3I_2` and `O` written out as matrices with rows of these sizes; None for others."""
    n = len(sizes)
    if answer.text in ("0", "O"):
        return AnswerPart("matrix", answer.text, (read("0"),) * sum(map(int, sizes)), sizes)
    identity = _IDENTITY.fullmatch(answer.text)
    is_square = set(sizes) == {str(n)} and n > 1
    if identity is None or not is_square or (identity[2] and int(identity[2]) != n):
        return None
    factor = read({"": "1", "-": "-1"}.get(identity[1], identity[1]))
    cells = tuple(factor if i % (n + 1) == 0 else read("0") for i in range(n * n))
    return AnswerPart("matrix", answer.text, cells, sizes)


def ratio_of(text: str) -> tuple[Fraction, bool] | None:
    r"""The value of `3:4` or of a fraction of integers, and whether it is written as a ratio that cannot be a time of
    day; None for others."""
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    top, colon, bottom = (ratio[1], ratio[2], ratio[3]) if ratio[1] else (ratio[4], "", ratio[5])
    if not int(bottom) or (colon == ":" and clock_of(text)):
        return None
    return Fraction(int(top), int(bottom)), bool(colon)


def clock_of(text: str) -> tuple[int, bool] | None:
    """Minutes since midnight, and whether it is known to be a.m. or p.m.; None for what is not a time of day."""
    time = _CLOCK.fullmatch(text)
    hour, minute = (int(time[1]), int(time[2] or 0)) if time else (24, 0)
    if time is None or hour > 23 or minute > 59 or (time[3] and not 0 < hour <= 12) or not (time[2] or time[3]):
        return None
    if time[3]:
        return hour % 12 * 60 + minute + (720 if time[3] == "p" else 0), True
    return hour * 60 + minute, hour > 12 or time[1][0] == "0"


def bearing_of(text: str) -> Fraction | None:
    r"""Degrees from north, clockwise, of `N30\text{degrees}E` or `030\text{degrees}`; None for other answers."""
    compass = _COMPASS.fullmatch(text)
    if compass is None:
        plain = re.fullmatch(r"([0-3][0-9]{2}(?:\.[0-9]+)?)(?:\\text\{degrees\})?", text)
        return Fraction(plain[1]) if plain else None
    angle = Fraction(compass[2])
    if angle > 90:
        return None
    east = angle if compass[1] == "N" else 180 - angle
    return east if compass[3] == "E" else 360 - east


def _product(factor: str, cell: AnswerPart) -> AnswerPart:
    factor = "-1" if factor == "-" else factor
    numbers = rational(factor), rational(cell.text)
    if numbers[0] and numbers[1]:
        return read(str(numbers[0].value * numbers[1].value))
    return read(f"({factor})({cell.text})")
