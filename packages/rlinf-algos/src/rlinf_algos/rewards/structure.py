r"""The structure of an answer: a formula, a list, a tuple or interval, a relation, a quantity with its unit, words.

`read` splits a normalised answer down to formulas, which it does not parse. Whatever fits no rule is a formula.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.units import SCALES, Unit, read_unit

Kind = Literal["formula", "list", "set", "tuple", "union", "relation", "matrix", "quantity", "phrase"]
_TOKEN = re.compile(r"\\begin\{pmatrix\}|\\end\{pmatrix\}|\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|.", flags=re.DOTALL)
_OPENING = frozenset(("(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\langle", "\\begin{pmatrix}"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\end{pmatrix}"))
_OPERATORS = frozenset(
    ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\in", "\\equiv", ":", "\\to", "\\rightarrow", "\\Rightarrow",
     "\\sim", "\\propto", "\\cong", "\\implies", "\\iff", "\\subset", "\\subseteq", "\\notin", "\\parallel", "\\perp")
)  # fmt: skip
_JOINTS = frozenset((",", ";", "\\text{or}", "\\text{and}", "\\lor", "\\vee", "\\land", "\\wedge"))
_NAME = re.compile(
    r"[A-Z]{2,3}|\\frac\{d[A-Za-z]\}\{d[a-z]\}|\\(?:angle|triangle) ?[A-Z]{1,3}"
    r"|(?:\\[A-Za-z]+ ?|[A-Za-z])'*(?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\([A-Za-z0-9](?:,[A-Za-z])*\))?"
)
_NO_NAMES = frozenset(("e", "i", r"\pi", r"\infty", r"\emptyset"))
_PLAIN_SIGNS = re.compile(r"[A-Za-z](?:_[0-9])?=(?:[^A-Za-z\\]|\\[A-Za-z]+|[ei](?![A-Za-z]))*\Z")
"""`x=1\\pm\\sqrt{2}`: a name and its values."""
_WORD = re.compile(r"\\text\{([^{}]*)\}")
BUILT = re.compile(r"\\\{(.+?)[|:](.+)\\\}")
"""A set defined by a condition: its members and the condition."""
MAX_ITEMS = 60
"""Maximum number of items of a list; no answer has more."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    r"""A part of an answer.

    Example: `x=1,2` is a list of two relations, whose sides are the formulas x and 1, x and 2.
    """

    kind: Kind
    text: str
    """The normalised text of this part."""
    parts: tuple["AnswerPart", ...] = ()
    """Items, sides of a relation, cells of a matrix by rows, formulas between words; a quantity's number."""
    marks: tuple[str, ...] = ()
    """Brackets, operators, the sizes of a matrix's rows, a compound quantity in its first unit, or the words, with ""
    for each formula between them."""
    unit: Unit | None = None


@lru_cache(maxsize=8192)
def read(text: str) -> AnswerPart:
    """The structure of a normalised answer."""
    tokens = _TOKEN.findall(text)
    items = _split(tokens, _JOINTS)
    if len(items) > 1 and len(items) <= MAX_ITEMS:
        quantity = _compound(text)
        return quantity or AnswerPart("list", text, tuple(_inherited([read(item) for item in items if item])))
    for reader in (_relation, _bracketed, _union, _matrix, _signs, _quantity, _phrase):
        answer = reader(text, tokens)
        if answer is not None:
            return answer
    return AnswerPart("formula", text)


def name_of(side: AnswerPart) -> str | None:
    """The side of a relation if it is a name, such as `x`, `f(x)` or `(x,y)`; None for other formulas."""
    if side.kind == "tuple":
        return side.text if all(name_of(part) for part in side.parts) else None
    text = side.text
    if side.kind != "formula" or not _NAME.fullmatch(text) or text.strip() in _NO_NAMES:
        return None
    return text.strip()


def mentions(answer: AnswerPart, name: str) -> bool:
    """Whether the name occurs anywhere in the answer."""
    end = r"(?![A-Za-z_'])" if name[-1].isalpha() else ""
    return re.search(r"(?<![A-Za-z\\])" + re.escape(name) + end, _WORD.sub("", answer.text)) is not None


def has_words(text: str) -> bool:
    """Whether a formula contains words, or numbers side by side, and so cannot be evaluated."""
    return r"\text" in text or " " in re.sub(r"\\[A-Za-z]+ ", "", text)


def _split(tokens: list[str], separators: frozenset[str]) -> list[str]:
    """The pieces between separators that are outside brackets."""
    pieces, depth, piece = [], 0, []
    for token in tokens:
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth = max(depth - 1, 0)
        if depth == 0 and token in separators:
            pieces.append("".join(piece))
            piece = []
        else:
            piece.append(token)
    pieces.append("".join(piece))
    stripped = [piece.strip() for piece in pieces]
    return [piece for piece in stripped if piece] if len(stripped) > 1 else stripped


def _inherited(items: list[AnswerPart]) -> Iterable[AnswerPart]:
    """`x=1,2` as `x=1, x=2`, and `x\\ne1,2` likewise: a bare item takes the name of the one before it."""
    name, mark = None, "="
    for item in items:
        if item.kind == "relation":
            mark = item.marks[0]
            name = item.parts[0] if item.marks in (("=",), ("\\ne",)) and name_of(item.parts[0]) else None
            yield item
        elif name is not None and item.kind in (("formula", "quantity") if name.kind == "formula" else ("tuple",)):
            yield AnswerPart("relation", f"{name.text}{mark}{item.text}", (name, item), (mark,))
        else:
            yield item


def _relation(text: str, tokens: list[str]) -> AnswerPart | None:
    if not _OPERATORS.intersection(tokens):
        return None
    sides = _split(tokens, _OPERATORS)
    depth, operators = 0, []
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in _OPERATORS:
            operators.append(token)
    if len(sides) == 1 and operators == ["\\approx"]:
        return read(sides[0])
    if operators == [":"] and sides and re.fullmatch(r"(?:\\text\{[^{}]*\})+", sides[0]):  # apple: 2
        operators = ["="]
    if len(sides) != len(operators) + 1 or len(sides) < 2:
        return None if not operators else AnswerPart("phrase", text, (), (text,))
    if tokens.count("\\pm") == 1 and operators == ["="] and not _PLAIN_SIGNS.match(text):
        return AnswerPart("list", text, tuple(read(text.replace("\\pm", sign)) for sign in "+-"))
    return AnswerPart("relation", text, tuple(map(read, sides)), tuple(operators))


def _bracketed(text: str, tokens: list[str]) -> AnswerPart | None:
    if tokens[:1] not in (["("], ["["], ["\\{"], ["\\langle"]) or tokens[-1] not in (")", "]", "\\}", "\\rangle"):
        return None
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and i < len(tokens) - 1:
            return None
    inner = _split(tokens[1:-1], frozenset((",", ";")))
    if tokens[0] == "\\{":
        items = tuple(read(item) for item in inner if item)
        if len(items) == 1 and items[0].kind == "list" and "\\pm" in tokens:
            items = items[0].parts
        return AnswerPart("set", text, items if items else ()) if tokens[-1] == "\\}" else None
    if len(inner) == 1:
        return None if tokens[0] != "(" or tokens[-1] != ")" else read(inner[0])
    round_ = {"\\langle": "(", "\\rangle": ")"}
    brackets = round_.get(tokens[0], tokens[0]) + round_.get(tokens[-1], tokens[-1])
    return AnswerPart("tuple", text, tuple(map(read, inner)), (brackets,))


def _union(text: str, tokens: list[str]) -> AnswerPart | None:
    if "\\cup" not in tokens:
        return None
    parts = _split(tokens, frozenset(("\\cup",)))
    return AnswerPart("union", text, tuple(map(read, parts))) if len(parts) > 1 else None


def _matrix(text: str, tokens: list[str]) -> AnswerPart | None:
    if tokens[:1] != ["\\begin{pmatrix}"] or tokens[-1] != "\\end{pmatrix}" or tokens.count(tokens[0]) > 1:
        return None
    rows = [_split(_TOKEN.findall(row), frozenset("&")) for row in _split(tokens[1:-1], frozenset(("\\\\",))) if row]
    cells = tuple(read(cell) for row in rows for cell in row)
    return AnswerPart("matrix", text, cells, tuple(str(len(row)) for row in rows))


def _signs(text: str, tokens: list[str]) -> AnswerPart | None:
    r"""`a\pm b` as the list of its two values."""
    if tokens.count("\\pm") != 1 or "\\mp" in tokens:
        return None
    i = tokens.index("\\pm")
    before, after = "".join(tokens[:i]), "".join(tokens[i + 1 :]).strip()
    return AnswerPart("list", text, (read(f"{before}+{after}" if before else after), read(f"{before}-{after}")))


def _quantity(text: str, tokens: list[str]) -> AnswerPart | None:
    """A number or formula, a word that scales it, and a unit; `5 million dollars` is 5 times 10^6 of a unit."""
    start = next((i for i, token in enumerate(tokens) if token.startswith("\\text{")), 0)
    if start == 0:
        return None
    while start > 1 and tokens[start - 1] in ("/", "\\cdot", "\\mu", "1") and tokens[start - 1 : start] != ["1"]:
        start -= 1
    value, rest = "".join(tokens[:start]), "".join(tokens[start:])
    scale = _WORD.match(rest)
    if scale and scale[1] in SCALES:
        number, rest = rational(value), rest[scale.end() :]
        value = f"({value})\\cdot{SCALES[scale[1]]}" if number is None else str(number.value * SCALES[scale[1]])
        if not rest:
            return AnswerPart("formula", value)
    unit = read_unit(rest)
    if unit is None:
        return _compound(text)
    if _counts(unit) and rational(value) is None:
        return None
    return AnswerPart("quantity", text, (read(value),), (), unit)


def _counts(unit: Unit) -> bool:
    """Whether the unit may be an ordinary word, which is a unit only after a plain number."""
    return len(unit.bases) == 1 and unit.bases[0][1] == 1 and unit.factor == 1


def _compound(text: str) -> AnswerPart | None:
    """`2 hours 30 minutes` as one quantity in the smaller unit, 150 minutes, with its value in the larger one, 5/2."""
    parts = re.findall(r"([0-9.]+)((?:\\text\{[^{}]*\})+?)(?:,|\\text\{and\})?(?=[0-9]|$)", text)
    if len(parts) < 2 or re.sub(r"[0-9.,]|\\text\{[^{}]*\}", "", text):
        return None
    read_parts = [(rational(number), read_unit(unit)) for number, unit in parts]
    if {("sterling", 1)} in [set(unit.bases) for _, unit in read_parts[1:] if unit] and "\\text{pound" in parts[0][1]:
        read_parts[0] = (read_parts[0][0], Unit((("sterling", 1),), Fraction(1)))
    read_parts = [(number, _subunit(read_parts[0][1], unit)) for number, unit in read_parts]
    last = read_parts[-1][1]
    total, factors = 0, set()
    for number, unit in read_parts:
        if number is None or unit is None or last is None or unit.bases != last.bases or unit.factor in factors:
            return None  # "30 degrees, 150 degrees" are two values
        factors.add(unit.factor)
        total += number.value * unit.factor / last.factor
    value = str(total) if total.denominator > 1 else str(total.numerator)  # type: ignore[union-attr]
    first = read_parts[0][1]
    assert last is not None and first is not None, "each part has its unit"
    whole = total * last.factor / first.factor
    return AnswerPart("quantity", text, (AnswerPart("formula", value),), (str(whole),), last)


def _subunit(first: Unit | None, unit: Unit | None) -> Unit | None:
    """Cents after euros, and minutes and seconds after degrees, as parts of these; other units unchanged."""
    if first is None or unit is None:
        return unit
    if first.bases == (("degree", 1),) and unit.bases == (("s", 1),) and unit.factor in (1, 60):
        return Unit(first.bases, unit.factor / 3600)
    is_cents = unit.bases == (("dollar", 1),) and unit.factor == Fraction(1, 100)
    return Unit(first.bases, unit.factor) if is_cents and first.bases == (("euro", 1),) else unit


def _phrase(text: str, tokens: list[str]) -> AnswerPart | None:
    """Words and the formulas between them."""
    if not any(token.startswith("\\text{") for token in tokens):
        return None
    words: list[str] = []
    parts: list[AnswerPart] = []
    for piece in re.split(r"((?:\\text\{[^{}]*\})+)", text):
        if piece.startswith("\\text{"):
            words.append(" ".join(_WORD.findall(piece)))
        elif piece:
            words.append("")
            parts.append(AnswerPart("formula", piece) if r"\text" in piece else read(piece))
    return AnswerPart("phrase", text, tuple(parts), tuple(words))
