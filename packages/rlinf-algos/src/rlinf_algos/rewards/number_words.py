"""Converts numbers in English words to digits: "three thousand yen" is "3000 yen", "twenty-five" is "25".

Numbers of several words are converted everywhere, those of one word only if there is no other answer.
"""

import re

_ONE_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
ONES = {word: i for i, word in enumerate(_ONE_WORDS.split())}
_TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * i for i, word in enumerate(_TEN_WORDS.split(), start=2)}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_NUMBER = "|".join((*ONES, *TENS, "hundred", *_LARGE))
_RUN = re.compile(
    rf"\b(?!hundred|thousand|million|billion)(?:{_NUMBER})(?:(?:-| and | )(?:{_NUMBER})){{1,12}}\b", re.IGNORECASE
)
_LONE = re.compile(rf"\b(?:{'|'.join([*list(ONES)[2:], *TENS])})\b(?!-)", re.IGNORECASE)
_COUNTED_AT_END = re.compile(
    r"\b(?:has|have|had|is|are|was|were|gets?|leaves?|needs?|pays?|costs?|only|exactly|just|him|her|them) "
    rf"({_LONE.pattern}) [a-z]+",
    re.IGNORECASE,
)
_LAST_CLAUSE = 300
"""Number of characters of the last clause that are read."""
_PARTS = {"halves": 2, "thirds": 3, "quarters": 4, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7, "eighths": 8,
          "ninths": 9, "tenths": 10}  # fmt: skip
_FRACTION = re.compile(rf"\b({'|'.join(ONES)})[- ]({'|'.join(_PARTS)})\b(?! of\b)", re.IGNORECASE)
_FRACTION_OF = re.compile(_FRACTION.pattern.removesuffix(r"(?! of\b)"), re.IGNORECASE)
_AND_A_HALF = re.compile(rf"\b({'|'.join(ONES)}|[0-9]{{1,9}}) and (?:a|one) half\b", re.IGNORECASE)


_PART_OF = re.compile(r"\b(half|a quarter of|three quarters of) an? ([a-z]{3,9})\b", re.IGNORECASE)
_ONE_AND_A_HALF = re.compile(r"\ban? ([a-z]{3,9}) and a half\b", re.IGNORECASE)
_PART_VALUES = {"half": "0.5", "a quarter of": "0.25", "three quarters of": "0.75"}


_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = re.compile(rf"\b(?:the )?([0-9]{{1,2}})(?:st|nd|rd|th) of ({_MONTHS})\b")
_MIXED = re.compile(r"(?<![0-9,/^}] )(?<![\w.,/^}(\[])([0-9]{1,4}) ([0-9]{1,3})/([0-9]{1,3})(?![0-9/.^]| ?[=+*/])")
_NEGATIVE = re.compile(
    rf"\b(is|was|are|be|equals|to|at|of|gives|get) (?:minus|negative) ([0-9]+|{'|'.join(ONES)})\b", re.IGNORECASE
)
_DOLLARS_AND = re.compile(rf"\b({_LONE.pattern}) dollars? and ([a-z0-9-]+) cents\b", re.IGNORECASE)
_CHANCE = re.compile(rf"\b(?:an? )?([0-9]{{1,9}}|one) (?:in|out of) ([0-9]{{1,9}}|{_LONE.pattern}) (?=chance)")
_BELOW_ZERO = re.compile(r"\b([0-9][0-9.]{0,9} ?(?:degrees|\u00b0)(?: ?(?:Celsius|Fahrenheit|[CF]\b))?) below zero\b")
_TIME_OF_DAY = re.compile(r"([0-9]:[0-9]{2}) (?:(in the morning)|(?:in the (?:afternoon|evening)|at night))\b")
_SINGLE_PART = re.compile(
    rf"\b(?:one|an?) ({'|'.join(part.removesuffix('s') for part in _PARTS if part != 'halves')})\b"
)


def with_numbers(text: str) -> str:
    """The text with numbers of several words as digits, and with signs, fractions and dates in one form:
    `1\\frac{3}{4}` for "1 3/4", -5 for "5 degrees below zero", "March 15" for "the 15th of March"."""
    text = _DATE.sub(r"\2 \1", text) if " of " in text else text
    text = _BELOW_ZERO.sub(lambda words: f"-{words[1]}", text) if "below zero" in text else text
    text = _TIME_OF_DAY.sub(lambda words: f"{words[1]} {'AM' if words[2] else 'PM'}", text) if ":" in text else text
    if "minus " in text or "negative " in text:
        text = _NEGATIVE.sub(lambda words: f"{words[1]} -{ONES.get(words[2].lower(), words[2])}", text)
    if " cents" in text:
        text = _DOLLARS_AND.sub(_dollars_and_cents, text)
    if " chance" in text:
        text = _CHANCE.sub(lambda words: f"{words[1].replace('one', '1')}/{with_lone_numbers(words[2])} ", text)
    text = _MIXED.sub(_mixed, text) if "/" in text else text
    if "half a" in text or "quarter" in text:
        text = _PART_OF.sub(lambda part: f"{_PART_VALUES[part[1].lower()]} {part[2]}s", text)
    if "ths" in text or "rds" in text or "quarters" in text or "halves" in text or " half" in text:
        text = _FRACTION.sub(lambda words: f"{ONES[words[1].lower()]}/{_PARTS[words[2].lower()]}", text)
        text = _ONE_AND_A_HALF.sub(r"1.5 \1s", text)
        text = _AND_A_HALF.sub(lambda words: f"{ONES.get(words[1].lower(), words[1])}.5", text)
    if not ("ty-" in text or "ty " in text or "hundred" in text or "thousand" in text or "illion" in text):
        return text  # every number of several words contains one of these
    return _RUN.sub(lambda run: run[0] if (value := _value(run[0])) is None else str(value), text)


def with_lone_numbers(text: str) -> str:
    """The text with numbers of one word as digits, too, except "one", which is often not a number."""
    text = _SINGLE_PART.sub(lambda words: f"1/{_PARTS[words[1].lower() + 's']}", text)
    text = _FRACTION_OF.sub(lambda words: f"{ONES[words[1].lower()]}/{_PARTS[words[2].lower()]}", text)
    return _LONE.sub(lambda word: str(ONES.get(word[0].lower()) or TENS[word[0].lower()]), text)


def with_final_number(text: str) -> str:
    """The text with a number of one word in its last clause as digits: "she has sixteen dollars left"."""
    *_, last = [None, *_COUNTED_AT_END.finditer(text, max(0, len(text) - _LAST_CLAUSE))]
    if last is None or re.search(r"[0-9]|[.!?]\s", text[last.end() :]):
        return text
    return text[: last.start(1)] + with_lone_numbers(text[last.start(1) :])


def _dollars_and_cents(words: re.Match[str]) -> str:
    cents = _value(words[2]) if "-" in words[2] else with_lone_numbers(words[2])
    return f"{with_lone_numbers(words[1])} dollars and {cents} cents"


def _mixed(number: re.Match[str]) -> str:
    return rf"{number[1]}\frac{{{number[2]}}}{{{number[3]}}}" if int(number[2]) < int(number[3]) else number[0]


def _value(run: str) -> int | None:
    """The value of a sequence of number words; None if they are not one number, as in "two and three"."""
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
            value = ONES.get(word, TENS.get(word, 0))
            limit = 10 if last in TENS.values() and value else 100 if last == 100 else 1000 if last >= 1000 else 0
            if not 0 < value < limit:
                return None
            group, last = group + value, value
    return total + group
