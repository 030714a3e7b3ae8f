r"""Judges a completion by its reference, or returns the questions about formulas that must be answered first.

`final_answer` finds the answer in the completion; the reference is used as a whole. Both are normalised (`notation`),
parsed (`structure`) and compared part by part (`comparison`). This runs under a time limit (answer_side.py), since the
completion determines how long it takes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.chinese import claim, is_in_chinese, says
from rlinf_algos.rewards.choice import stated_letter
from rlinf_algos.rewards.comparison import Comparison, Question
from rlinf_algos.rewards.final_answer import final_answer, reference_answer
from rlinf_algos.rewards.forms import choice_letter, names_of
from rlinf_algos.rewards.notation import normalized

MAX_CHARACTERS = 1000
"""Maximum number of characters of an answer. A longer one is "unparseable": no reference is nearly that long."""
_WORDS = re.compile(r"\\text\{.*|\\emptyset ?", flags=re.DOTALL)
_SENTENCE = re.compile(r"\s*[A-Z][a-z]+ (?:[a-z]+ ){1,9}(?:is|are|has|have)\b")
_SHORT_WORD = re.compile(r"(?!abc)(?=[a-z]?[a-z]?[aeiou])[a-z]{3}|[a-z]{3,}(?: [a-z]{3,})+")
_BARE_WORDS = re.compile(r"[A-Za-z' -]+")
_DECIMAL_COMMA = re.compile(r"\A(\$?[-\u2212]?[0-9]{1,9}),([0-9]{1,2}|[0-9]{4,9}|(?<=\b0,)[0-9]{3})(?![0-9,])")
_NUMBER = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_PEOPLE = re.compile(r"[A-Z][a-z]{2,19} [0-9.]{1,12}(?:(?:,| and|, and) [A-Z][a-z]{2,19} [0-9.]{1,12}){1,9}")
"""Values by owner, without an equals sign: "Tom 14, Ann 9"."""
_REMAINING = re.compile(
    r"(?:\b[Ll]eav(?:es|ing)|\b[Ll]eft with|\b[Oo]nly|\b[Bb]y elimination,?(?: it is| the answer (?:is|must be))?)"
    r"(?: us with)?(?: only)?(?: (?:option|choice|answer))? \(?([A-J])\)?(?: (?:remains|is left|is possible))?\Z"
    r"|(?<!or )(?<!and )(?<![A-J], )(?<!\w)\(?([A-J])\)? is the only (?:one|option|choice|answer) (?:left|remaining)\Z",
)
_LAST_SENTENCE = 200
_RATE = re.compile(r"\A([-\\$]{0,3}[0-9][0-9.,/]{0,30}(?: [a-z]{1,20})?) per [a-z]{1,20}\Z")
"""A rate for a reference that is only a number: "7 eggs per day"."""
_THINGS = re.compile(r"[A-Za-z]{3,20}: ?[0-9.]{1,12}(?:, ?[A-Za-z]{3,20}: ?[0-9.]{1,12}){1,9}")
"""Values by thing: "apple: 2, pear: 3"."""
_LETTER = re.compile(r"(?:\\[a-z]+\{)?\(?([A-Za-z])\)?\}?")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one completion, as far as it is known without comparing formulas."""

    outcome: str
    """"open" if `questions` decide."""
    answer: str | None = None
    detail: str | None = None
    normalised: str = ""
    """The normalised answer."""
    questions: tuple[Question, ...] = ()


def verdict_of(completion: str, reference: str) -> Verdict:
    """Raises: RewardError for a reference without an answer."""
    verdict = _verdict_of(completion, reference)
    if verdict.outcome == "wrong" and _PEOPLE.fullmatch(reference.strip()):
        by_name = _verdict_of(completion, re.sub(r"(?<=[a-z]) (?=[0-9])", ": ", reference))
        return by_name if by_name.outcome == "right" else verdict
    return verdict


def _verdict_of(completion: str, reference: str) -> Verdict:
    expected = expected_answer(reference)
    form, names = _form(reference)
    if form == "chinese":
        answer = claim(completion)
        is_right = answer is not None and says(expected, answer)
        return Verdict("unparseable" if answer is None else "right" if is_right else "wrong", answer)
    answer = _answer(completion, form, names)
    if answer is None:
        return Verdict("unparseable")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(
            "unparseable", detail=f"the answer has {len(answer)} characters; at most {MAX_CHARACTERS} are read"
        )
    try:
        normal = _normalized(answer, expected, is_in_words=form == "words")
        outcome, questions = _compared(expected, normal) if normal else ("unparseable", ())
    except RecursionError:
        return Verdict("memory", answer, "nested too deeply")
    return Verdict(outcome, answer, normalised=normal, questions=questions)


def decided(expected: str, answer: str, verdicts: Mapping[Question, bool]) -> bool:
    """Whether the answers are the same, given the answers to all questions of a `Verdict`."""
    verdict = Comparison(expected, answer, verdicts=verdicts).run()
    assert verdict is not None, "the first run asks all questions that a later one could"
    return verdict


def _answer(completion: str, form: str, names: str) -> str | None:
    is_choice = form == "choice"
    answer = final_answer(completion, in_words=form == "words", names=tuple(names.split()))
    letter = _LETTER.fullmatch(answer) if is_choice and answer else None
    if letter:
        return letter[1]
    if is_choice and (answer is None or choice_letter(normalized(answer[:MAX_CHARACTERS])) is None):
        answer = stated_letter(completion) or _remaining_letter(completion) or answer
    return answer


def _remaining_letter(completion: str) -> str | None:
    """The letter that the last sentence names as the only one remaining: "That leaves A."."""
    end = completion.replace("*", "").rstrip(" .!\n")[-_LAST_SENTENCE:]
    remaining = _REMAINING.search(end)
    return remaining[1] or remaining[2] if remaining else None


def _normalized(answer: str, expected: str, *, is_in_words: bool) -> str:
    if len(answer) == 1 and expected.isupper():
        answer = answer.upper()
    if "," in answer:
        answer = _with_point(answer, expected)
    if " per " in answer and _NUMBER.fullmatch(expected):
        answer = _RATE.sub(r"\1", answer)
    return normalized(rf"\text{{{answer}}}" if is_in_words and _BARE_WORDS.fullmatch(answer) else answer)


@lru_cache(maxsize=4096)
def _compared(expected: str, answer: str) -> tuple[str, tuple[Question, ...]]:
    """(outcome, questions) for two normalised answers."""
    if expected == answer:
        return "right", ()
    comparison = Comparison(expected, answer, verdicts={})
    is_same = comparison.run()
    if is_same is None:
        return "open", tuple(dict.fromkeys(comparison.open))
    return "right" if is_same else "wrong", ()


@lru_cache(maxsize=4096)
def expected_answer(reference: str) -> str:
    """The normalised answer of a reference. Raises: RewardError if it has none."""
    if is_in_chinese(reference.strip()):
        return reference.strip()
    answer = reference_answer(reference)
    if answer and _SENTENCE.match(answer) and _NUMBER.search(answer):  # "The mean is 0.84."
        answer = final_answer(answer) or answer
    answer = rf"\text{{{answer}}}" if answer and _SHORT_WORD.fullmatch(answer) else answer
    normal = normalized(answer) if answer is not None and len(answer) <= MAX_CHARACTERS else ""
    if not normal:
        raise RewardError(
            f"math_answer: the reference {reference[-80:]!r} has no answer of at most {MAX_CHARACTERS} characters; "
            "fix the dataset row"
        )
    return normal


@lru_cache(maxsize=4096)
def _form(reference: str) -> tuple[str, str]:
    """The form of a reference and the names of its values, for `final_answer`."""
    if is_in_chinese(reference.strip()):
        return "chinese", ""
    expected = expected_answer(reference)
    if _THINGS.fullmatch(reference.strip()):
        return "values", " ".join(re.findall(r"[A-Za-z]+(?=:)", reference))
    if _is_in_words(reference):
        return "words", ""
    if choice_letter(expected) is not None:
        return "choice", ""
    names = names_of(expected)
    return "values" if names else "", " ".join(names)


def _is_in_words(reference: str) -> bool:
    """Whether a reference begins with a word and is not a whole sentence."""
    return _WORDS.fullmatch(expected_answer(reference)) is not None and not _SENTENCE.match(reference)


def _with_point(answer: str, expected: str) -> str:
    """`3,5` as `3.5` if the reference is a decimal: without a space it is neither a list nor a number of thousands."""
    is_decimal = re.fullmatch(r"-?[0-9]*\.[0-9]+.*", expected) is not None
    return _DECIMAL_COMMA.sub(r"\1.\2", answer) if is_decimal else answer
