"""Numbers in English words as digits: "three thousand yen" is "3000 yen", "twenty-five" is "25".

Only numbers of several words are read: "one" and "two" are often no number, and a lone word has its value elsewhere.
"""

import re

_WORDS_TO_NINETEEN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_UNITS = {word: i for i, word in enumerate(_WORDS_TO_NINETEEN.split())}
_TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: 10 * i for i, word in enumerate(_TEN_WORDS.split(), start=2)}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_NUMBER = "|".join((*_UNITS, *_TENS, "hundred", *_LARGE))
_RUN = re.compile(
    rf"\b(?!hundred|thousand|million|billion)(?:{_NUMBER})(?:(?:-| and | )(?:{_NUMBER})){{1,12}}\b", re.IGNORECASE
)
_MARKS = ("hundred", "thousand", "illion", "ty-", "ty ")
"""One of these is in every number of several words."""


def with_numbers(text: str) -> str:
    """The text with digits in place of numbers of several words."""
    if not any(word in text for word in _MARKS):
        return text
    return _RUN.sub(lambda run: run[0] if (value := _value(run[0])) is None else str(value), text)


def _value(run: str) -> int | None:
    """The number that a run of words is; None for words that follow each other otherwise, as in "two and three"."""
    total, group, last = 0, 0, 10**12
    for joint, word in re.findall(r"(-| and | |)([a-z]+)", run.lower()):
        if joint == " and " and last not in (100, *_LARGE.values()):
            return None
        if word in _LARGE:
            if not group or (total and total % (1000 * _LARGE[word])):
                return None
            total, group, last = total + group * _LARGE[word], 0, _LARGE[word]
        elif word == "hundred":
            if not 0 < group < 10:
                return None
            group, last = 100 * group, 100
        else:
            value = _UNITS.get(word, _TENS.get(word, 0))
            limit = 10 if last in _TENS.values() and value else 100 if last == 100 else 1000 if last >= 1000 else 0
            if not 0 < value < limit:
                return None
            group, last = group + value, value
    return total + group
