r"""Decides whether a claim in words means the same as a reference in words: "right isosceles triangle with ..." and
"isosceles right triangle", "the series is divergent" and "diverges", "Alice took it" and "Alice".

Words are compared by their stems. The claim must begin with the words of the reference, in any order, and continue
without an alternative, an addition or a negation.
"""

import re
from fractions import Fraction

from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.structure import AnswerPart
from rlinf_algos.rewards.units import NO_THINGS, SCALES

_WORD = re.compile(r"(?<=\\text\{)[^{}]*(?=\})|(?<![A-Za-z])[A-Z](?![A-Za-z])")
_BEGINNING = re.compile(r"(?:\\text\{[^{}]*\}|[A-Z](?![A-Za-z])|[\s,.-])*")
_POSSESSIVE = re.compile(_BEGINNING.pattern + "'")
_WORDS_AND_NUMBERS = re.compile(r"\\text\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?)")
_WITH_NUMBER = re.compile(
    r"(?:\\text\{[^{}]*\}){0,10}\\text\{(?:is|are|was|were|makes|has|have|costs|needs|takes|gets|earns|pays|equals)\}"
    r"(-?[0-9]+(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})(?:\\text\{[^{}]*\}){0,8}"
)
_HARMLESS = frozenset(("is", "are", "was", "in", "for", "with", "of", "to", "at", "exactly"))
_FILLERS = frozenset(
    ("the", "a", "an", "it", "its", "is", "are", "be", "that", "this", "always", "strictly", "only", "exactly", "in",
     "on", "function", "triangle", "series", "number", "numbers", "integer", "line", "lines", "will", "just", "both")
)  # fmt: skip
_OPEN = frozenset(
    ("or", "and", "not", "nor", "but", "neither", "either", "unless", "if", "then", "never", "no", "nothing", "none",
     "except", "maybe", "perhaps", "possibly", "when", "while", "than", "s", "lies", "lied", "loses", "lost", "fails",
     "cannot", "does", "do", "did", "isn", "wasn", "innocent", "wrong", "otherwise", "sometimes")
)  # fmt: skip
"""Words after which a claim states something else."""
_ORDERED = frozenset(("of", "to", "than", "before", "after", "from", "then", "over", "into"))
_ENDINGS = ("ences", "ence", "ency", "ents", "ent", "ing", "es", "ed", "s", "e")
_MIN_STEM = 5
_ARTICLE = re.compile(r"\A[Aa](?=\\text\{(?!is\}|are\}|was\}|and\}|or\}|has\}|then\}))")
"""The letter a as an article, not as a name as in "Plan A"."""
_ANY_WORD = re.compile(r"\\text\{([^{}]*)\}|([A-Za-z]+|[^\s])")
_COMPARATIVES = {
    word: (measure, sign)
    for measure, more, less in (
        ("size", "greater larger bigger higher", "less smaller lower"),
        ("length", "taller longer", "shorter"),
        ("age", "older", "younger"),
        ("weight", "heavier", "lighter"),
        ("speed", "faster", "slower"),
        ("time", "after later", "before earlier"),
        ("heat", "hotter warmer", "colder cooler"),
        ("width", "wider", "narrower"),
        ("height", "above", "below"),
        ("side", "right", "left"),
    )
    for sign, words in ((1, more), (-1, less))
    for word in words.split()
}
"""The dimension of a comparative, and whether its subject has more of it."""
_MAX_WORDS = 6


def says(reference: AnswerPart, claim: AnswerPart) -> bool:
    """Whether a normalised claim means the same as a normalised reference that consists of words only."""
    expected, leading = _stems(reference.text, is_whole=True), _stems(claim.text)
    if not expected or len(expected) > _MAX_WORDS or r"\text{" not in reference.text:
        return False
    if _ORDERED.intersection(expected):
        return leading == expected
    if expected == ["neither"]:
        return leading[:1] == expected
    if expected[-1] == "many":
        return leading == expected
    is_open = _OPEN.intersection(_WORD.findall(claim.text)) - set(_WORD.findall(reference.text))
    if len(leading) == len(expected) and _POSSESSIVE.match(claim.text):
        return False
    parts = [leading, _stems(claim.text.partition(r"\text{is}")[2])]
    return not is_open and any(sorted(part[: len(expected)]) == sorted(expected) for part in parts)


def says_values(reference: AnswerPart, claim: AnswerPart) -> bool:
    """Whether a claim names each thing of `apple:2,pear:3` once, each followed by its value and no other number."""
    values: dict[str, Fraction] = {}
    for part in reference.parts if reference.kind == "list" else ():
        number = rational(part.parts[-1].text) if part.kind == "relation" else None
        if not number or part.marks != ("=",) or not re.fullmatch(r"\\text\{[a-z]+\}", part.parts[0].text):
            return False
        values[_stem(part.parts[0].text[len(r"\text{") : -1])] = number.value
    named: list[tuple[str, Fraction | None]] = []
    for word, digits in _WORDS_AND_NUMBERS.findall(claim.text):
        if word in _OPEN and word != "and":
            return False
        if _stem(word) in values:
            named.append((_stem(word), None))
        elif digits:
            number = rational(digits)
            if not named or named[-1][1] is not None or number is None:
                return False
            named[-1] = (named[-1][0], number.value)
    return len(values) > 1 and len(named) == len(values) and dict(named) == values


def says_number(reference: AnswerPart, claim: AnswerPart) -> bool:
    """Whether a claim in words, such as "there are 5 ways" or "Janet makes 18 dollars a day", has this number and no
    other after its verb."""
    number = rational(reference.text)
    sentence = _WITH_NUMBER.fullmatch(claim.text) if number else None
    if not number or sentence is None or len(claim.text) > 300:
        return False
    words = set(_WORD.findall(claim.text))
    value = rational(sentence[1])
    is_open = words & (_OPEN | (NO_THINGS - _HARMLESS) | SCALES.keys())
    return not is_open and value is not None and value.value == number.value


def _stems(text: str, *, is_whole: bool = False) -> list[str]:
    """The stems of the words at the beginning of a text, without fillers; none if `is_whole` and other text follows."""
    text = _ARTICLE.sub("", text)
    beginning = _BEGINNING.match(text)
    assert beginning is not None, "the pattern also matches an empty text"
    if is_whole and beginning.end() < len(text):
        return []
    words = [word if len(word) == 1 and word.isupper() else word.lower() for word in _WORD.findall(beginning[0])]
    return [_stem(word) for word in words if word not in _FILLERS] or [_stem(word) for word in words]


def turns(reference: str, claim: str) -> bool:
    """Whether two normalised comparisons are equivalent: "Tom is taller than Ann" and "Ann is shorter than Tom"."""
    one, other = _comparison_of(reference), _comparison_of(claim)
    return one is not None and one == other


def _comparison_of(text: str) -> tuple[str, str, str, str] | None:
    """(dimension, verb, the larger, the smaller) of "Tom is taller than Ann"; None for other texts."""
    words = [(a or b).lower() for a, b in _ANY_WORD.findall(text)] if len(text) < 400 else []
    words = [word for word in words if word not in ("the", "to", "on", "an", "of", "than")]
    places = [i for i, word in enumerate(words) if word in _COMPARATIVES]
    if len(places) != 1:
        return None
    place = places[0]
    measure, sign = _COMPARATIVES[words[place]]
    before, after = words[:place], words[place + 1 :]
    if len(before) < 2 or not after or not before[-1].endswith(("s", "d", "are", "were")):
        return None
    first, last = "".join(before[:-1]), "".join(after)
    return (measure, before[-1], first, last) if sign > 0 else (measure, before[-1], last, first)


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _MIN_STEM:
            return word[: -len(ending)]
    return word
