r"""Reads answers at the beginning of a text: where a number or formula with its unit ends and a description begins."""

import re
from collections.abc import Iterator

from rlinf_algos.rewards.sentences import is_outside
from rlinf_algos.rewards.units import NO_THINGS, SCALES, is_thing, is_unit

_ALSO = re.compile(
    r"(?<=[0-9]\s)([A-Za-z]+)\s\((?:[0-9.,]+\s[A-Za-z]+|\\?[$\u20ac\u00a3\u00a5][0-9.,]+)\)"
    r"(?: in total| in all| altogether)?\Z"
)
"""The same quantity in another unit: "3 days (72 hours)"."""
_APPROXIMATELY = re.compile(
    r"\A(?:approximately|about|roughly|nearly|around|almost|close)\s(?:equal\s)?(?:to\s)?(?=[-\u2212\\$0-9])"
)
_FILLER = re.compile(
    r"\A(?:(?:indeed|thus|therefore|then|simply|just|exactly|clearly|equal to|given by|hence|so|finally"
    r"|now|also|only|either|still|always|option|choice)\b[\s:,]*)+",
    flags=re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\\A-Za-z_{^])[A-Za-z]{2,}(?!\w*[(_^])|(?<![\\A-Za-z_{^])[A-Za-z]{4,}")
_FORMULA_NAMES = frozenset(
    ("sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "arcsin", "arccos", "arctan", "inf",
     "np", "infinity", "min", "max", "gcd", "lcm", "det", "sinh", "cosh", "tanh")
)  # fmt: skip
_SHORT_WORDS = frozenset(
    ("of", "in", "to", "is", "it", "we", "so", "as", "at", "by", "on", "or", "if", "an", "he", "no", "up", "be", "us")
)
_WORDS_WITHOUT_VOWELS = frozenset(("why", "try", "dry", "sky", "fly", "cry", "shy", "spy", "nth", "mth", "kth", "hrs"))
_FORMULA = re.compile(
    r"\$\$[^$]{1,2000}\$\$|(?<!\\)\$(?:[^$\n\\]|\\[^\n]){1,2000}?\$|\\\([^\n]{1,2000}?\\\)|\\\[[^\n]{1,2000}?\\\]"
)
CUT = frozenset(
    ("for", "when", "where", "after", "with", "in", "by", "from", "on", "because", "since", "as", "so", "which", "that",
     "at", "to", "of", "before", "until", "while", "if", "during", "each", "per", "altogether",
     "up", "down", "above", "below", "along", "across", "into")
)  # fmt: skip
_UNIT_WORDS = frozenset(("square", "cubic", "sq", "cu", "per", "squared", "cubed"))
_MORE_THAN = re.compile(r"(?:more|fewer|less)(?:(?: [a-z]+){0,6} than\b[^0-9$]*| [a-z]+(?: to [a-z]+)?|)\Z")
_WAYS_TO = re.compile(r"(?<=ways) (?:to|of|in which)\b.*", flags=re.DOTALL)
_SAID_OF = frozenset(("is", "are", "was", "were", "works"))
_NOT_SAID = re.compile(
    r"\s(?:not|no|wrong|incorrect|too|less|more|greater|smaller|at|impossible|extraneous|rejected|invalid|[-\\$0-9])"
)
_OUT_OF = re.compile(r"(?<=[0-9A-Za-z])\s(?:out of|left|more than the)\b")
_MATH_BRACKETS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"))
_OF_THE = re.compile(
    r"\b(?:of|from|in|among|for|than) (?:the|his|her|their|its|these|those|all)(?: [a-z]+)? [\\$]{0,2}[0-9][^\s,]*"
)
MAX_LOOKS = 20


def without_filler(text: str) -> str:
    return _APPROXIMATELY.sub("", _FILLER.sub("", text, count=1).strip())


def cleaned(text: str) -> str:
    """The text without the white space, emphasis and full stop around it."""
    text = text.strip()
    for opening, closing in _MATH_BRACKETS:
        if text.endswith(closing) and text.count(opening) < 1 + (opening == closing):
            text = text.removesuffix(closing)
    for _ in range(MAX_LOOKS):
        shorter = (
            text.strip(" \t\n*`" if "\u00b0" in text or "circ" in text else " \t\n*`\"'")
            .removesuffix(".")
            .strip(",;")
            .rstrip(":")
        )
        shorter = shorter.removesuffix("}") if shorter.count("}") > shorter.count("{") else shorter
        if shorter == text:
            break
        text = shorter
    return text


def words_of(text: str) -> Iterator[re.Match[str]]:
    """The plain words of a text, without those in formulas, names of functions, and products such as `xy`."""
    formulas = [(formula.start(), formula.end()) for formula in _FORMULA.finditer(text)]
    formulas += [(match.start(), match.end()) for match in re.finditer(r"\\[A-Za-z]+\{[^{}]*\}", text)]
    for word in _WORD.finditer(text):
        name = word[0].lower()
        is_product = _is_product(name) and not is_unit(word[0])
        is_word = name not in _FORMULA_NAMES and not is_product and not word[0].isupper()
        if is_word and not any(start <= word.start() < end for start, end in formulas):
            yield word


def _is_product(name: str) -> bool:
    """Whether the letters are a product, such as `xy` or `zyx`, and not a word."""
    if len(name) == 2:
        return name not in _SHORT_WORDS
    is_without_vowels = re.search(r"[aeiou]", name) is None and name not in _WORDS_WITHOUT_VOWELS
    return len(name) == 3 and len(set(name)) == 3 and (is_without_vowels or name == "abc")


def is_formal(answer: str) -> bool:
    """Whether the answer begins like a number or a formula, or is a single letter."""
    text = answer.lstrip("$({[|-\u2212+ ")
    word = re.match(r"[A-Za-z]{2,}", text)
    if word is None or not answer:
        return bool(answer)
    is_product = re.fullmatch(r"(?!by)[abcxyz]{2}|lwh|abc|[xyz]{3}", word[0]) is not None
    return is_product or word[0].lower() in _FORMULA_NAMES or _is_name(text)


def _is_name(text: str) -> bool:
    """Whether the text begins with the name of a quantity, as in `AB = 5`, or of a currency."""
    return re.match(r"[A-Z]{2,4}(?: ?=|\s?[0-9]|\Z)|[a-z]{2}(?: ?[=+*/^<>])", text) is not None


def measured(text: str) -> str:
    """The number or formula at the beginning of a text, without the words after it that only describe it.

    Example: measured("8 apples left in the basket") == "8 apples"; "5 or more" and "2 less than 7" stay whole.
    """
    if not is_formal(text):
        return text
    text = _WAYS_TO.sub("", text) if " ways " in text else text
    text = _ALSO.sub(r"\1", text) if ")" in text[-14:] else text
    cut, end = _OUT_OF.search(text), 0
    text = text[: cut.start()] if cut and is_outside(text, cut.start()) else text
    for word in words_of(text):
        name = word[0].lower()
        if not re.search(r"[0-9A-Za-z$\\)\]}]", text[: word.start()]):
            return text
        if _is_measure(word, text) or (name in ("or", "and") and is_formal(text[word.end() :].strip())):
            end = word.end()
        elif (name in _SAID_OF and not _NOT_SAID.match(text, word.end())) or _MORE_THAN.match(text, word.start()):
            return text[: word.start()].strip()
        elif (name in NO_THINGS and name not in CUT) or re.match(r"(?:to|of) [0-9$]", text[word.start() :]):
            return text
        else:
            return _without_description(text, word, is_counted=not end)
    return text


def _is_measure(word: re.Match[str], text: str) -> bool:
    """Whether a word after a number is part of its unit; "in" is a unit only at the end."""
    name = word[0].lower()
    if name == "in":
        return word.end() >= len(text.rstrip(" .,;"))
    return is_unit(word[0]) or name in _UNIT_WORDS or name in SCALES or name == "percent"


def _without_description(text: str, word: re.Match[str], *, is_counted: bool) -> str:
    """The text up to a word, including the things counted there; unchanged if a number after it may matter."""
    rest = text[word.start() :]
    names = re.findall(r"[a-z]+", rest.lower())[:3] if word[0] not in CUT and is_counted else []
    for i in range(len(names)):
        if is_thing(names[: i + 1]):
            things = re.match(r"\W*".join(names[: i + 1]) + r"(?: per [a-z]+)?", rest, flags=re.IGNORECASE)
            if things and re.match(r" (?:or|to) [^,.]{0,15}[0-9]", rest[things.end() :]):
                return text
            more = re.match(r",? and (?=[\\$0-9])", rest[things.end() :]) if things else None
            if things and more:
                return f"{text[: word.start()]}{things[0]} and {measured(rest[things.end() + more.end() :])}"
            return text[: word.start()] + (things[0] if things else "")
    if word[0] not in CUT and re.search(r"[0-9$\\=]", _OF_THE.sub("", rest)):
        return text
    return text[: word.start()].rstrip(" ,;:(-\u2013\u2014") or text


def holds_value(text: str) -> bool:
    return re.search(r"[0-9\\$]", text) is not None and len(text) > 1 - text.isdigit()
