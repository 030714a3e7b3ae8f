r"""Answers with a free parameter: `\{2n : n\in\mathbb{Z}\}`, `x=\frac{\pi}{4}+k\pi, k\in\mathbb{Z}`, `(t, 2t-1)`.

The name of the parameter does not matter: it is made the same before two families are compared. Over the integers,
negating the parameter or shifting it by up to 2 gives the same family: `2k+1` is `2k-1`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlinf_algos.rewards.structure import BUILT, AnswerPart, name_of, read

_DOMAIN = re.compile(r"([A-Za-z])\\in ?\\mathbb\{([ZNQR])\}")
_LETTER = re.compile(r"(?<![A-Za-z\\{])[a-z](?![a-z}])")
_ARTICLES = re.compile(r"\A(?:\\text\{(?:the|set|of|all|every)\})+")
_IN_WORDS = re.compile(
    r"\\text\{(?P<parity>odd|even)\}\\text\{(?:integer|number)s?\}|\\text\{multiples\}\\text\{of\}(?P<multiple>[1-9][0-9]{0,3})"
    r"|(?P<every>\\text\{integers\})|(?:\\text\{positive\})?\\text\{(?:divisors|factors)\}\\text\{of\}(?P<divided>[1-9][0-9]{0,3})"
    r"|\\text\{primes?\}(?:\\text\{numbers?\})?(?:\\text\{(?:that|which)\}\\text\{are\})?"
    r"(?:\\text\{(?:below|under)\}|\\text\{(?:less|smaller)\}\\text\{than\})(?P<primes>[1-9][0-9]{0,2})"
)
_SHIFTS = (0, 1, -1, 2, -2)


@dataclass(frozen=True, slots=True)
class Family:
    """Example: `x=2k, k\\in\\mathbb{Z}` is Family(member `2k`, "k", "Z")."""

    member: AnswerPart
    parameter: str
    domain: str | None
    """Z, N, Q or R; None if it is not stated."""

    def with_parameter(self, name: str) -> AnswerPart:
        """The member with another name for the parameter."""
        pattern = rf"(?<![A-Za-z\\]){self.parameter}(?![A-Za-z_])|(?<=\\pi )?(?<=\\pi){self.parameter}\b"
        return read(re.sub(pattern, name, self.member.text))


def family_of(answer: AnswerPart) -> Family | None:
    """The family that an answer describes, if it states the domain of the parameter; None for others."""
    built = BUILT.fullmatch(answer.text) if answer.kind == "set" else None
    if built:
        parts = [read(built[1]), *_parts(read(built[2]))]
    elif answer.kind == "list":
        parts = list(answer.parts)
    else:
        return None
    domains = [domain for part in parts if (domain := _DOMAIN.fullmatch(part.text))]
    if len(domains) != 1:
        return None
    rest = [part for part in parts if not _DOMAIN.fullmatch(part.text)]
    if built and len(rest) == 2 and rest[1].kind == "relation" and rest[1].parts[0].text == rest[0].text:
        rest = rest[1:]
    member = _member(rest)
    parameter, domain = domains[0].groups()
    return Family(member, parameter, domain) if member and parameter in _letters(member) else None


def set_in_words(text: str) -> AnswerPart | None:
    r"""`\text{all}\text{odd}\text{integers}` as `\{2k+1|k\in\mathbb{Z}\}`, "the primes below 10" as a set; None for
    others."""
    words = _IN_WORDS.fullmatch(_ARTICLES.sub("", text))
    if words is None:
        return None
    if words["divided"]:
        n = int(words["divided"])
        return read(rf"\{{{','.join(str(k) for k in range(1, n + 1) if n % k == 0)}\}}")
    if words["every"]:
        return read(r"\mathbb{Z}")
    if words["primes"]:
        return read(rf"\{{{','.join(map(str, _primes_below(int(words['primes']))))}\}}")
    parity, multiple = words["parity"], words["multiple"]
    member = {"odd": "2k+1", "even": "2k"}[parity] if parity else f"{multiple}k"
    return read(rf"\{{{member}|k\in\mathbb{{Z}}\}}")


def _primes_below(end: int) -> list[int]:
    return [n for n in range(2, end) if all(n % factor for factor in range(2, math.isqrt(n) + 1))]


def shifted(family: Family) -> Iterator[AnswerPart]:
    """The member of a family over the integers with its parameter t replaced by t + c and by c - t, for small c."""
    yield family.with_parameter("t")
    for shift in _SHIFTS:
        for sign in "+-":
            if (sign, shift) != ("+", 0):
                yield family.with_parameter(f"({sign if sign == '-' else ''}t{shift:+d})")


def same_family(family: Family, answer: AnswerPart) -> Family | None:
    """An answer without a domain as a family like `family`, if it has exactly one letter; None for others."""
    member = _member(list(answer.parts) if answer.kind == "list" else [answer])
    letters = _letters(member) if member else set()
    return Family(member, letters.pop(), None) if member and len(letters) == 1 else None


def _parts(answer: AnswerPart) -> list[AnswerPart]:
    return list(answer.parts) if answer.kind == "list" else [answer]


def _member(parts: list[AnswerPart]) -> AnswerPart | None:
    """The value without its name: `2k` for `x=2k`, `(t,2t)` for `x=t,y=2t`."""
    values = [
        part.parts[1] if part.kind == "relation" and part.marks == ("=",) and name_of(part.parts[0]) else part
        for part in parts
    ]
    if any(value.kind not in ("formula", "tuple", "matrix", "quantity") for value in values) or not values:
        return None
    return values[0] if len(values) == 1 else read(f"({','.join(value.text for value in values)})")


def _letters(member: AnswerPart) -> set[str]:
    return set(_LETTER.findall(re.sub(r"\\(?:text|begin|end)\{[^{}]*\}|\\[A-Za-z]+ ?", " ", member.text))) - {"e", "i"}
