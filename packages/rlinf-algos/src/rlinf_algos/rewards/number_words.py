"""Numbers in English words as digits: "three thousand yen" is "3000 yen", "twenty-five" is "25".

Numbers of several words are read everywhere, those of one word only where nothing else is an answer.
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
_LONE = re.compile(rf"\b(?:{'|'.join([*list(_UNITS)[2:], *_TENS])})\b(?!-)", re.IGNORECASE)
_PARTS = {"halves": 2, "thirds": 3, "quarters": 4, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8,
          "ninths": 9, "tenths": 10}  # fmt: skip
_FRACTION = re.compile(rf"\b({'|'.join(_UNITS)})[- ]({'|'.join(_PARTS)})\b(?! of\b)", re.IGNORECASE)
_AND_A_HALF = re.compile(rf"\b({'|'.join(_UNITS)}|[0-9]{{1,9}}) and (?:a|one) half\b", re.IGNORECASE)


_PART_OF = re.compile(r"\b(half|a quarter of|three quarters of) an? ([a-z]{3,9})\b", re.IGNORECASE)
_ONE_AND_A_HALF = re.compile(r"\ban? ([a-z]{3,9}) and a half\b", re.IGNORECASE)
_PART_VALUES = {"half": "0.5", "a quarter of": "0.25", "three quarters of": "0.75"}


def with_numbers(text: str) -> str:
    """The text with digits in place of numbers of several words."""
    if "half a" in text or "quarter" in text:
        text = _PART_OF.sub(lambda part: f"{_PART_VALUES[part[1].lower()]} {part[2]}s", text)
    if "ths" in text or "rds" in text or "quarters" in text or "halves" in text or " half" in text:
        text = _FRACTION.sub(lambda words: f"{_UNITS[words[1].lower()]}/{_PARTS[words[2].lower()]}", text)
        text = _ONE_AND_A_HALF.sub(r"1.5 \1s", text)
        text = _AND_A_HALF.sub(lambda words: f"{_UNITS.get(words[1].lower(), words[1])}.5", text)
    if not ("ty-" in text or "ty " in text or "hundred" in text or "thousand" in text or "illion" in text):
        return text  # one of these is in every number of several words
    return _RUN.sub(lambda run: run[0] if (value := _value(run[0])) is None else str(value), text)


def with_lone_numbers(text: str) -> str:
    """The text with digits also in place of numbers of one word, without "one", which is often no number."""
    return _LONE.sub(lambda word: str(_UNITS.get(word[0].lower()) or _TENS[word[0].lower()]), text)


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
