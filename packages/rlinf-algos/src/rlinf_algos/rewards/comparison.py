r"""Decides by their structure whether two answers mean the same. Pairs of formulas become questions for math-verify.

Verdicts are True, False or None (not known yet). The first run of a `Comparison` collects the open questions; a second
one that has their answers decides. So the formulas of a whole batch are compared together, in other processes.

Conventions: a list is unordered and equals a set; a list without brackets also equals a tuple in the same order. `x=5`
equals 5. Equations are equal if their sides are, or if the differences of their sides have a constant ratio.
Inequalities equal the intervals that they describe. One of the answers may omit the unit.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rlinf_algos.rewards.families import Family, family_of, same_family, set_in_words, shifted
from rlinf_algos.rewards.forms import (
    Residue,
    alternatives_of,
    as_matrix,
    bearing_of,
    choice_of,
    clock_of,
    in_unit_vectors,
    letters_of,
    ratio_of,
    residue_of,
    residues_of,
    spread,
)
from rlinf_algos.rewards.letters import differ_in_letters
from rlinf_algos.rewards.plain_number import equal_numbers, rational
from rlinf_algos.rewards.ranges import FLIPPED, Range, integers_of, ranges, roster_of, turned
from rlinf_algos.rewards.restated import in_feet, people, restated
from rlinf_algos.rewards.structure import AnswerPart, has_words, mentions, name_of, read
from rlinf_algos.rewards.units import Unit, is_unit, read_unit
from rlinf_algos.rewards.wording import says, says_number, says_values, turns

Verdict = bool | None
Question = tuple[Literal["equal", "near", "same zeros", "same sign"], str, str]
"""equal: two formulas are equal; near: they differ by up to 1 %; same zeros: their ratio is constant; same sign: it is
also positive."""
_EQUAL = frozenset(("=", "\\approx"))
_SYMMETRIC = frozenset((*FLIPPED, *_EQUAL, "\\ne", "\\equiv", "\\cong", "\\parallel", "\\perp"))
"""Operators of relations that can be read from right to left."""
_STERLING = (("sterling", 1),)
_MONEY = ((("dollar", 1),), (("euro", 1),), (("yuan", 1),), (("rupee", 1),), _STERLING)
_DEGREE, _RADIAN = (("degree", 1),), (("radian", 1),)
_TEMPERATURES = {(("celsius", 1),), (("fahrenheit", 1),)}
_IMPLIES = re.compile(r"\\(?:implies|iff|(?:Long|long)?(?:[Ll]eft)?[Rr]ightarrow)(?![a-z])|[\u21d2\u27f9\u21d4\u27fa]")
_JOINED_UNIT = re.compile(r"(.*[0-9}])([A-Za-z])")
_WORD = re.compile(r"\\text\{[^{}]*\}")
_CONSTANTS = frozenset("cAKk")
"""Other names of the arbitrary constant C."""
_OPERATION = re.compile(r"\\(?:int|lim)(?![a-z])|\\frac\{d\}\{d[a-z]\}")
"""A left side that the right side evaluates."""
_INFINITE = frozenset((r"\infty", r"-\infty"))
_MAX_MATCHED = 12
"""Maximum length of lists of formulas whose items are compared in every order; longer lists are compared in theirs."""


class Comparison:
    """Compares one pair of answers.

    Args:
        expected, answer: normalised.
        verdicts: the answers to questions that are known so far.
    """

    def __init__(self, expected: str, answer: str, verdicts: Mapping[Question, bool]) -> None:
        if _IMPLIES.search(answer) and not _IMPLIES.search(expected):
            answer = _IMPLIES.split(answer)[-1].strip(",. ") or answer
        answer = restated(expected, _with_constant(expected, answer))
        expected = in_feet(expected, answer)
        answer = answer if r"\text" in expected else answer.removeprefix(r"\text{quadrant}")
        self._expected, self._actual = spread(read(expected)), spread(read(answer))
        self._actual = self._actual if self._expected.kind == "relation" else _result(self._actual)
        if self._expected.kind in ("set", "list"):
            self._actual = roster_of(read(answer)) or self._actual
        self._claim = read(answer)
        self._expected = self._plain(self._expected, self._actual)
        self._actual = self._plain(self._actual, self._expected)
        self._choices = choice_of(expected), choice_of(answer)
        is_list = [re.search(r",|\\text", text) is not None for text in (expected, answer)]
        self._people = people(expected), people(answer)
        self._are_letters = is_list[0] != is_list[1] and None not in (letters_of(expected), letters_of(answer))
        self._are_letters = self._are_letters or ("(" in answer and None not in map(letters_of, (expected, answer)))
        self._is_undecided = r"\text{or}" in answer and len(letters_of(expected) or "") > 1
        self._verdicts = verdicts
        self.open: list[Question] = []
        """After `run`: questions without an answer."""

    @staticmethod
    def _plain(one: AnswerPart, other: AnswerPart) -> AnswerPart:
        """A set in words or with a condition on integers, or a residue class, in the form of the other answer."""
        if one.kind == "phrase" and (other.kind in ("set", "list") or other.text == r"\mathbb{Z}"):
            return set_in_words(one.text) or one
        one = integers_of(one) or one
        residues = residues_of(one)
        return residues if residues and family_of(other) else one

    def run(self) -> Verdict:
        self.open = []
        if self._is_undecided or r"\text{is}\text{not}" in self._claim.text.partition("=")[0]:
            return False
        expected, values = self._people
        if expected and values:
            pairs = [(read(value), read(values[name])) for name, value in expected.items() if name in values]
            return len(pairs) == len(expected) == len(values) and self._all(self._same(*pair) for pair in pairs)
        if self._are_letters:  # of several choices
            return letters_of(self._expected.text) == letters_of(self._actual.text)
        if r"\begin{cases}" in self._claim.text and _unnamed(self._expected.text) == _unnamed(self._claim.text):
            return True
        if any(self._choices):
            return self._same_choices()
        family = family_of(self._expected)
        other_family = family_of(self._actual) or (family and same_family(family, self._actual))
        if other_family:
            return self._same_families(family or same_family(other_family, self._expected), other_family)
        verdict = self._same(self._expected, self._actual)
        if verdict is not False:
            return verdict
        return (
            turns(self._expected.text, self._claim.text)
            or says(self._expected, self._claim)
            or says_values(self._expected, self._claim)
            or says_number(self._expected, self._claim)
        )

    # -- three-valued logic

    def _all(self, verdicts: Iterable[Verdict]) -> Verdict:
        result: Verdict = True
        for verdict in verdicts:
            if verdict is False:
                return False
            if verdict is None:
                result = None
        return result

    def _any(self, verdicts: Iterable[Verdict]) -> Verdict:
        result: Verdict = False
        for verdict in verdicts:
            if verdict is True:
                return True
            if verdict is None:
                result = None
        return result

    def _ask(self, question: Question) -> Verdict:
        if differ_in_letters(question[1], question[2]):
            return False
        if question not in self._verdicts:
            self.open.append(question)
            return None
        return self._verdicts[question]

    # -- by kind

    def _same_choices(self) -> Verdict:
        """Compares letters with letters and contents with contents; if both answers have both, both must be equal."""
        expected, actual = self._choices
        if expected and actual:
            if expected.letters != actual.letters:
                return False
            return self._same(expected.content, actual.content) if expected.content and actual.content else True
        choice, other = (expected, self._actual) if expected else (actual, self._expected)
        assert choice is not None, "one of them is a choice"
        if letters_of(other.text):
            return choice.letters == letters_of(other.text)
        whole = self._same(self._expected, self._actual)
        if choice.content is None:
            return whole
        content = self._same(choice.content, other) if expected else self._same(other, choice.content)
        return self._any((whole, content))

    def _same_families(self, one: Family | None, other: Family) -> Verdict:
        if one is None or (one.domain and other.domain and one.domain != other.domain):
            return False
        if "Z" not in (one.domain, other.domain):
            return self._same(one.with_parameter("t"), other.with_parameter("t"))
        return self._any(self._same(one.with_parameter("t"), member) for member in shifted(other))

    def _same(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        """Whether `other`, a part of the answer found, means the same as `one`, a part of the expected one. The order
        matters: only an expected equation is taken as true."""
        if one.text == other.text:
            return True
        one, other = alternatives_of(one) or one, alternatives_of(other) or other
        if "formula" in (one.kind, other.kind) and {"tuple", "matrix"} & {one.kind, other.kind}:
            sizes = len(one.parts), len(other.parts)
            one, other = in_unit_vectors(one, sizes[1]) or one, in_unit_vectors(other, sizes[0]) or other
        if {one.kind, other.kind} == {"formula", "matrix"}:
            one, other = as_matrix(one, other.marks) or one, as_matrix(other, one.marks) or other
        is_measure = ":" in one.text + other.text or r"\text" in one.text + other.text
        verdict = _same_measures(one.text, other.text) if is_measure else None
        if verdict is not None:
            return verdict
        residues = residue_of(one), residue_of(other)
        if any(residues):
            return self._same_residues(one, other, *residues)
        pair = {one.kind, other.kind}
        sets = ranges(one), ranges(other)
        if sets[0] and sets[1] and pair != {"tuple"} and not (pair == {"relation"} and _is_harder(one, other)):
            return self._same_ranges(sets[0], sets[1])
        if "relation" in pair and pair != {"relation", "list"}:
            return self._same_relations(one, other)
        if "matrix" in pair and pair <= {"matrix", "tuple", "list"} and len(pair) == 2:
            return self._same_vectors(one, other)
        if pair == {"tuple", "set"}:
            one, other = (_without_braces(answer) for answer in (one, other))
        if pair <= {"list", "set", "tuple"}:
            return self._same_collections(one, other)
        if pair == {"union"}:
            return self._matched(one.parts, other.parts)
        if pair in ({"matrix"}, {"phrase"}):
            return one.marks == other.marks and self._in_order(one.parts, other.parts)
        if "quantity" in pair:
            return self._same_quantities(one, other)
        if _is_one_value(one) or _is_one_value(other):  # 7/2 or 3.5
            ones, others = (answer.parts if _is_one_value(answer) else (answer,) for answer in (one, other))
            return self._all(self._same(expected, actual) for expected in ones for actual in others)
        return self._same_formulas(one.text, other.text) if pair == {"formula"} else False

    def _same_residues(
        self, one: AnswerPart, other: AnswerPart, expected: Residue | None, actual: Residue | None
    ) -> Verdict:
        """Residues with the same modulus are equal if they differ by a multiple of it; a number equals only the residue
        as written."""
        if expected is None or actual is None:
            residue, bare = expected or actual, other if expected else one
            assert residue is not None, "one of them is a residue"
            value, modulus = rational(residue.value), rational(residue.modulus)
            is_reduced = not value or not modulus or 0 <= value.value < modulus.value
            return is_reduced and bare.kind == "formula" and self._same_formulas(residue.value, bare.text)
        values = rational(expected.value), rational(actual.value)
        modulus = rational(expected.modulus)
        if expected.modulus != actual.modulus or (expected.name and actual.name and expected.name != actual.name):
            return False
        if values[0] is None or values[1] is None or modulus is None or not modulus.value:
            return self._same_formulas(expected.value, actual.value)
        return ((values[0].value - values[1].value) / modulus.value).denominator == 1

    def _same_formulas(self, one: str, other: str) -> Verdict:
        if one == other:
            return True
        number, other_number = rational(one), rational(other)
        if number and other_number:
            return equal_numbers(number, other_number)
        if has_words(one) or has_words(other) or r"\emptyset" in (one, other) or one in _INFINITE or other in _INFINITE:
            return False
        return self._ask(("equal", one, other))

    def _in_order(self, ones: tuple[AnswerPart, ...], others: tuple[AnswerPart, ...]) -> Verdict:
        if len(ones) != len(others):
            return False
        return self._all(self._same(one, other) for one, other in zip(ones, others, strict=True))

    def _matched(self, ones: tuple[AnswerPart, ...], others: tuple[AnswerPart, ...]) -> Verdict:
        """Whether each item has an equal one on the other side, in both directions."""
        if len(ones) == len(others) and _are_numbers(ones) and _are_numbers(others):
            values, other_values = (
                [number.value for item in items if (number := rational(item.text))] for items in (ones, others)
            )
            if all(value in other_values for value in values) and sorted(values) != sorted(other_values):
                return False  # 3, 3, 5 is not 3, 5, 5
        ones, others = _distinct(ones), _distinct(others)
        if len(ones) != len(others) and not (_are_numbers(ones) and _are_numbers(others)):
            return False
        if len(ones) > _MAX_MATCHED and not (_are_numbers(ones) and _are_numbers(others)):
            return self._in_order(ones, others)
        verdicts = [[self._same(one, other) for other in others] for one in ones]
        return self._all(
            [*(self._any(row) for row in verdicts), *(self._any(column) for column in zip(*verdicts, strict=True))]
        )

    def _same_collections(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        if one.kind == other.kind == "tuple":
            return one.marks == other.marks and self._in_order(one.parts, other.parts)
        if (r"\text{or}" in one.text) != (r"\text{or}" in other.text) and len(_named(one) or _named(other) or ()) > 1:
            return False  # x=1 or y=2 is not both
        if "tuple" in (one.kind, other.kind):
            bracketed, bare = (one, other) if one.kind == "tuple" else (other, one)
            is_comparable = bare.kind == "list" and bracketed.marks == ("()",)
            return self._in_order(_by_letter(one), _by_letter(other)) if is_comparable else False
        names, numbered = _named(one), {"_" in part.parts[0].text for part in one.parts + other.parts if part.parts}
        if names and names == _named(other) and len(names) == 1 and len(numbered) == 2:  # x=1,2 and x_1=1, x_2=2
            one, other = (AnswerPart("list", a.text, tuple(part.parts[-1] for part in a.parts)) for a in (one, other))
        if (_named(one) is None) != (_named(other) is None) and len(_named(one) or _named(other) or ()) > 1:
            return self._in_order(one.parts, other.parts)  # x=5, y=2 is 5, 2; x=1, x=2 is 1, 2 in any order
        return self._matched(one.parts, other.parts)

    def _same_vectors(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        """A matrix of one row or column equals the tuple of its cells."""
        matrix, items = (one, other) if one.kind == "matrix" else (other, one)
        is_vector = len(matrix.marks) == 1 or set(matrix.marks) == {"1"}
        return is_vector and items.marks in ((), ("()",), ("[]",)) and self._in_order(one.parts, other.parts)

    def _same_quantities(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        if one.unit is not None and other.unit is not None:
            if _DEGREE in (one.unit.bases, other.unit.bases) and _TEMPERATURES & {one.unit.bases, other.unit.bases}:
                return one.unit.factor == other.unit.factor and self._same(one.parts[0], other.parts[0])
            if {one.unit.bases, other.unit.bases} == {_DEGREE, _RADIAN}:
                return self._same_angles(one, other)
            if _is_rate(one.unit, other.unit) or _are_one_currency(one, other) or one.unit == other.unit:
                return self._same(one.parts[0], other.parts[0])
            if one.unit.bases != other.unit.bases:
                return False
            values = rational(one.parts[0].text), rational(other.parts[0].text)
            if values[0] is None or values[1] is None:
                return False
            return values[0].value * one.unit.factor == values[1].value * other.unit.factor
        quantity, bare = (one, other) if one.unit is not None else (other, one)
        if quantity.marks:  # 2 hours 30 minutes is 2.5, not 150
            return bare.kind == "formula" and self._same_formulas(quantity.marks[0], bare.text)
        if quantity.unit and quantity.unit.bases == _DEGREE and r"\pi" in bare.text and bare.kind == "formula":
            return self._same_angles(
                quantity, AnswerPart("quantity", bare.text, (bare,), (), Unit(_RADIAN, Fraction(1)))
            )
        if quantity.unit and quantity.unit.factor == Fraction(1, 100) and quantity.unit.bases in _MONEY:
            number, cents = rational(bare.text), rational(quantity.parts[0].text)  # 75 cents for 0.75
            if number and cents and number.places:
                return number.value in (cents.value, cents.value / 100)
        if quantity.unit and quantity.unit.bases == _STERLING and re.fullmatch(r"[0-9.]+p", bare.text):
            pence = AnswerPart("quantity", bare.text, (read(bare.text[:-1]),), (), Unit(_STERLING, Fraction(1, 100)))
            return self._same_quantities(quantity, pence)
        joined = _JOINED_UNIT.fullmatch(bare.text) if bare.kind == "formula" else None
        if joined and quantity.unit and read_unit(rf"\text{{{joined[2]}}}") == quantity.unit:
            bare = read(joined[1])
            return self._same(one.parts[0], bare) if quantity is one else self._same(bare, other.parts[0])
        if bare.kind not in ("formula", "list", "tuple", "set"):
            return False
        return self._same(one.parts[0], other) if quantity is one else self._same(one, other.parts[0])

    def _same_angles(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        degrees, radians = (one, other) if one.unit and one.unit.bases == _DEGREE else (other, one)
        if degrees.unit is None or degrees.parts[0].kind != "formula" or radians.parts[0].kind != "formula":
            return False
        degree = degrees.unit.factor / 180
        return self._ask(("equal", rf"({degrees.parts[0].text})\cdot({degree})\cdot\pi", radians.parts[0].text))

    # -- relations

    def _same_relations(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        chain, other_chain = _chain(one), _chain(other)
        if chain and other_chain and (None in (chain.name, other_chain.name) or chain.name == other_chain.name):
            return self._same_values(chain, other_chain)
        if chain and other_chain and not _are_mixed(chain, other_chain):
            return False  # x=5 is not y=5
        if one.kind != "relation" or other.kind != "relation":
            is_identity = set(other.marks) == {"="} and one.kind == "formula" and name_of(one) is None
            is_identity = is_identity and len(_distinct(other.parts)) == len(other.parts)  # x^2=x^2 evaluates nothing
            return is_identity and self._all(self._same(one, part) for part in other.parts)
        reverse = turned(other)
        verdict: Verdict = False
        if one.marks == other.marks:
            verdict = self._in_order(one.parts, other.parts)
        if verdict is not True and one.marks == reverse.marks and _SYMMETRIC.issuperset(one.marks):
            verdict = self._any((verdict, self._in_order(one.parts, reverse.parts)))
        if verdict is True or len(one.parts) != 2 or len(other.parts) != 2:
            return verdict
        return self._any((verdict, self._same_differences(one, other)))

    def _same_differences(self, one: AnswerPart, other: AnswerPart) -> Verdict:
        operator = one.marks[0]
        if any(part.kind != "formula" or has_words(part.text) for part in (*one.parts, *other.parts)):
            return False
        if operator in _EQUAL | {"\\ne"} and (other.marks[0] == operator or {operator, other.marks[0]} <= _EQUAL):
            return self._ask(("same zeros", _difference(one), _difference(other)))
        if operator in FLIPPED and other.marks[0] in (operator, FLIPPED[operator]):
            other = other if other.marks[0] == operator else turned(other)
            return self._ask(("same sign", _difference(one), _difference(other)))
        return False

    def _same_values(self, expected: "_Chain", actual: "_Chain") -> Verdict:
        """Compares single values, whatever their names: `actual` must be exactly the expected value, or that value
        rounded."""
        verdicts: list[Verdict] = []
        for value in (*expected.exact, *expected.rounded):
            verdicts.append(self._all(self._same(value, other) for other in actual.exact))
            if actual.rounded:
                verdicts.append(self._all(self._same(value, other) for other in actual.rounded))
        verdict = self._any(verdicts)
        if not actual.rounded or verdict is False:
            return verdict
        near = [self._is_near(actual.exact[0].text, rounded.text) for rounded in actual.rounded]
        return self._all((verdict, *near))

    def _is_near(self, exact: str, rounded: str) -> Verdict:
        number, percentage = rational(exact), rational(rounded)
        if number and percentage and percentage.is_percent and not number.is_percent:
            return abs(number.value - percentage.value / 100) <= abs(number.value) / 100
        return self._ask(("near", exact, rounded))

    def _same_ranges(self, ones: tuple[Range, ...], others: tuple[Range, ...]) -> Verdict:
        verdicts = [[self._same_range(one, other) for other in others] for one in ones]
        return self._all(self._any(line) for line in (*verdicts, *zip(*verdicts, strict=True)))

    def _same_range(self, one: Range, other: Range) -> Verdict:
        if one.brackets != other.brackets:
            return False
        return self._all((self._same(one.low, other.low), self._same(one.high, other.high)))


def _same_measures(one: str, other: str) -> Verdict:
    """Whether two times of day, ratios or directions are the same; None for other answers, or if not certain."""
    times = clock_of(one), clock_of(other)
    if times[0] and times[1] and times[0][1] and times[1][1]:
        return times[0][0] == times[1][0]
    if times[0] and times[1] and "m}" in one + other:  # 11:00 for 11:00 am
        return times[0][0] % 720 == times[1][0] % 720
    ratios = ratio_of(one), ratio_of(other)
    if ratios[0] and ratios[1] and (ratios[0][1] or ratios[1][1]):
        return ratios[0][0] == ratios[1][0]
    is_compass = one[:1] in "NS" or other[:1] in "NS"
    bearings = (bearing_of(one), bearing_of(other)) if is_compass else (None, None)
    return None if None in bearings else bearings[0] == bearings[1]


def _unnamed(text: str) -> str:
    """The text without a function's name at its beginning."""
    return re.sub(r"\A[A-Za-z](?:\([a-z]\))?=", "", text)


def _result(answer: AnswerPart) -> AnswerPart:
    """The last side of an equation if it is a number, 7 for `a+b=7`; other answers unchanged."""
    if answer.kind == "list":
        parts = tuple(_result(part) if _is_derivation(part) else part for part in answer.parts)
        return AnswerPart("list", answer.text, parts, answer.marks, answer.unit)
    if answer.kind != "relation" or set(answer.marks) != {"="}:
        return answer
    last = spread(answer.parts[-1])
    if name_of(answer.parts[0]) or _OPERATION.match(answer.parts[0].text):
        name, *sides, _ = answer.parts
        if name_of(name) is None:
            name = AnswerPart("formula", "y")
        letters = _letters(last.text)
        sides = [
            side
            for side in map(spread, sides)
            if side.kind == last.kind and not has_words(side.text) and letters >= _letters(side.text)
        ]
        return AnswerPart("relation", answer.text, (name, *sides, last), ("=",) * (len(sides) + 1))
    if last.kind in ("quantity", "formula") and any(part.kind == "phrase" for part in answer.parts[:-1]):
        return last
    value = last.parts[0] if last.kind == "quantity" else last
    has_letters = re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|\\begin", answer.parts[0].text)
    is_value = last.kind in ("matrix", "set", "tuple") or (rational(value.text) is not None and value.text != "0")
    return last if has_letters and is_value else answer


def _with_constant(expected: str, answer: str) -> str:
    """The answer with another name of an arbitrary constant replaced by C, if C is the only letter that it lacks."""
    if "C" in answer or not re.search(r"[-+=]C(?![A-Za-z])|C(?:_[0-9])?[a-z\\]", expected) or choice_of(expected):
        return answer
    letters, others = _letters(_WORD.sub("", expected)), _letters(_WORD.sub("", answer))
    name = "".join(others - letters)
    if letters - others != {"C"} or name not in _CONSTANTS:
        return answer
    return re.sub(rf"(?<![A-Za-z\\{{]){name}(?![A-Za-z}}])", "C", answer)


def _letters(formula: str) -> set[str]:
    """The single letters in a formula."""
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", formula)))


def _is_derivation(answer: AnswerPart) -> bool:
    """Whether the answer is a named value together with its calculation."""
    return answer.kind == "relation" and len(answer.parts) > 2 and name_of(answer.parts[0]) is not None


def _are_one_currency(one: AnswerPart, other: AnswerPart) -> bool:
    """Whether one is in pounds sterling and the other in ambiguous pounds, or one in yen or yuan and the other in
    \u00a5."""
    pairs = ((one, other), (other, one))
    currencies = {answer.unit.bases[0] for answer in (one, other) if answer.unit and answer.unit.bases}
    if ("yensign", 1) in currencies and currencies & {("yen", 1), ("yuan", 1)}:
        return one.unit is not None and other.unit is not None and one.unit.factor == other.unit.factor == 1
    return any(
        sterling.unit and sterling.unit.bases == (("sterling", 1),) and other.text.endswith((r"{pounds}", r"{pound}"))
        for sterling, other in pairs
    )


def _without_braces(answer: AnswerPart) -> AnswerPart:
    r"""The tuple in a set that contains only it; other answers unchanged."""
    return answer.parts[0] if answer.kind == "set" and [part.kind for part in answer.parts] == ["tuple"] else answer


def _is_one_value(answer: AnswerPart) -> bool:
    """Whether the items may be several forms of one value: not if they have different names."""
    return (answer.kind == "list" and len(_named(answer) or ()) < 2) or (
        answer.kind == "set" and len(answer.parts) == 1
    )


def _is_rate(one: Unit, other: Unit) -> bool:
    """Whether one is money or a thing, and the other the same per something: yuan, and yuan per month."""
    short, long = sorted((dict(one.bases), dict(other.bases)), key=len)
    added = {base: power for base, power in long.items() if base not in short}
    is_money_or_thing = len(short) == 1 and (tuple(short.items()) in _MONEY or not is_unit(next(iter(short))))
    is_same = all(long.get(base) == power == 1 for base, power in short.items())
    return is_money_or_thing and is_same and list(added.values()) == [-1]


def _by_letter(answer: AnswerPart) -> tuple[AnswerPart, ...]:
    """The items of an answer; values of x, y and z are sorted in this order."""
    names = _named(answer) or set()
    is_ordered = names <= set("xyz") and len(names) == len(answer.parts)
    return tuple(sorted(answer.parts, key=lambda part: part.text[0])) if is_ordered else answer.parts


def _distinct(items: tuple[AnswerPart, ...]) -> tuple[AnswerPart, ...]:
    return tuple({item.text: item for item in items}.values())


def _are_numbers(items: tuple[AnswerPart, ...]) -> bool:
    return all(rational(item.text) is not None for item in items)


def _named(items: AnswerPart) -> set[str] | None:
    """The names in a list of assignments; None if an item is not an assignment."""
    chains = [_chain(item) for item in items.parts]
    names = {re.sub(r"_\{?[0-9]\}?\Z", "", chain.name) for chain in chains if chain and chain.name}
    return names if chains and all(chain and chain.name for chain in chains) else None


@dataclass(frozen=True, slots=True)
class _Chain:
    r"""`x=\frac{22}{7}\approx3.14`: one value, its name, and its rounded forms."""

    name: str | None
    exact: tuple[AnswerPart, ...]
    rounded: tuple[AnswerPart, ...] = ()


def _chain(answer: AnswerPart) -> _Chain | None:
    """A value alone, named, or a chain of numbers such as `2+3=5`; None for other relations."""
    if answer.kind != "relation":
        return _Chain(None, (answer,))
    if not _EQUAL.issuperset(answer.marks):
        return None
    first, sides, marks = answer.parts[0], answer.parts, ("=", *answer.marks)
    name = first.text if first.kind == "phrase" and not first.parts else name_of(first)
    if name is not None and not any(mentions(side, name) for side in sides[1:]):
        sides, marks = sides[1:], ("=", *marks[2:])
    elif any(re.search(r"[A-Za-z]", re.sub(r"\\text\{[^{}]*\}|\\[A-Za-z]+", "", side.text)) for side in sides):
        return None
    else:
        name = None
    pairs = zip(sides, sides[1:], marks[1:], strict=False)
    marks = (marks[0], *("\\approx" if _is_rounded(*pair) else pair[2] for pair in pairs))
    exact = tuple(side for mark, side in zip(marks, sides, strict=True) if mark == "=")
    return _Chain(name, exact, tuple(side for mark, side in zip(marks, sides, strict=True) if mark != "="))


def _is_rounded(exact: AnswerPart, side: AnswerPart, mark: str) -> bool:
    r"""Whether a decimal after an equals sign is a rounded fraction: `\frac{2}{3}=0.667`."""
    numbers = rational(exact.text), rational(side.text)
    if mark != "=" or not numbers[0] or not numbers[1] or numbers[0].places is not None or not numbers[1].places:
        return False
    places, difference = numbers[1].places, abs(numbers[0].value - numbers[1].value)
    return places > 1 and 0 < difference * 10**places <= Fraction(1, 2)


def _are_mixed(one: _Chain, other: _Chain) -> bool:
    """Whether the name of one occurs in the values of the other: y=2x and x=y/2."""
    pairs = ((one.name, other), (other.name, one))
    return any(name and any(mentions(side, name) for side in (*chain.exact, *chain.rounded)) for name, chain in pairs)


def _difference(relation: AnswerPart) -> str:
    left, right = (part.text for part in relation.parts)
    return left if right == "0" else f"({left})-({right})"


def _is_harder(one: AnswerPart, other: AnswerPart) -> bool:
    """Whether two inequalities are about different names."""
    names, others = ({name_of(part) for part in answer.parts} - {None} for answer in (one, other))
    return _letters(one.text) != _letters(other.text) or (bool(names) and bool(others) and names != others)
