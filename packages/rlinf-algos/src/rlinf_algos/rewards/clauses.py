r"""Finds the clause of a sentence that states its conclusion.

What follows the last "so" or "therefore" counts, without circumstances before it ("After 4 hours, ...") and without
reasons, remarks and restatements in other words.
"""

import re

from rlinf_algos.rewards.quantities import CUT, MAX_LOOKS, cleaned, holds_value, without_filler, words_of
from rlinf_algos.rewards.sentences import REJECTED, SENTENCE_END, is_outside

_LOSS = r"[^.]{0,40}\b(?:loss|debt|deficit) of"
"""A negative amount in other words: "-$200, i.e. a loss of $200"."""
_REASON = re.compile(
    rf",?\s(?:that is, (?={_LOSS})|because|since|so|which|instead of|rather than|while"
    r"|whereas)\b"
    r"|,\s[a-z]{3,12}(?:ed|ing) (?:at|by|for|from|if|in|when)\b"
    r"|,\s(?:saving|paying|using|spending|having|taking|starting|assuming|including|rounding|counting|ignoring)\s"
    r"|,\s[0-9.]+ (?:[a-z]+ )?(?:more|fewer|less) than\b"
    r"|(?<=[0-9$}]),\swith\s(?!.*\btotal)"
    r"|,\s(?:as|where|giving|when|making|leaving|each [a-z]+ing)\b"
    r"|,\s(?:or )?(?:approximately|about|roughly|i\.e\.)|(?:(?<=[0-9}])|(?<=[0-9}]\$)),\sor \$?[0-9.]+ ?\\?%"
    r"|[,;]\s[^\s,]{1,20}\s(?:does|do|is|are)(?: not|n't)\b"
    rf"|\s\((?=[^()]{{1,40}}\s(?:{REJECTED})\b)"
    rf"|[,;]\s(?:and |but )?(?:the )?(?:[a-z]+ ){{0,3}}\S{{1,20}} (?:is|are) (?:{REJECTED})\b"
    r"|[,;(]\s?(?:and |but )?not\b|\s(?:and|but) not\b|\s\((?!(?:mod|or)\b)(?=[A-Za-z]{3,})"
    r"|,\s(?:the|an?|its|his|her|their)\s(?![^.]*(?:\b(?:is|are|be|equals?|was|were|has|have|gets?|gives?)\b|=|\s[a-z]+s\s[$\\\u20ac\u00a3\u00a5]{0,2}[0-9]))"
)
_THEREFORE = re.compile(
    rf"(?:\A|[,;]?\s)(?:so|thus|hence|therefore|i\.e\.(?! [0-9.]+ ?\\?% of|,? {_LOSS})"
    r"|which (?:makes|gives|yields|leaves"
    r"|(?:means|implies)(?: that)?"
    r"|(?:is|equals)(?= [0-9][-0-9+*/ .\u00d7]{0,40}= ?[0-9])"
    r"|(?:is|equals|comes to)(?=:? [$\\\u20ac\u00a3\u00a5]{0,2}[0-9][^ ]{0,20}(?: (?!of\b)[a-z]+){0,3}\.?\Z))"
    rf"|but only|that is(?=,)(?!, {_LOSS})"
    r"|in other words|equivalently|or,? in [a-z]{3,12} (?:notation|form)"
    r"),?\s(?!that\b)",
    flags=re.IGNORECASE,
)
_LEAVING = re.compile(
    r",\s(?:(?:leaving|giving|making)"
    r"(?:\s(?:him|her|them|us|it|a|the|total|of|with|profit|gain|loss|change|savings|balance)){0,4}|for a total of)"
    r"\s(?=[\\$\u20ac\u00a3\u00a5-]{0,3}[0-9])"
)
_IN_TOTAL = re.compile(r",\s(?=[\\$0-9][^,]{0,40}\s(?:in total|in all|altogether)[.!]?\Z)")
_CONTRACTED = re.compile(r"\b([A-Za-z]{2,5})(?:(?<=[Ii]t|at|re)'s|'(?:re|ll be))\b")
_LEADING_REASON = re.compile(
    r"\A(?:since|because|as)\s(?:[^,=]{1,80},\s(?=\S)|[^,]{1,80},\s(?=\$?[a-z] ?= ?[^,=]{1,30}\Z))", flags=re.IGNORECASE
)
_ASIDE_AS = re.compile(r",\sas\s[^,.]{1,80},(?=\s[a-z])")
DEFINITE = frozenset(
    ("the", "his", "her", "their", "its", "our", "my", "these", "those", "all", "both", "original", "initial", "other",
     "than", "from", "among", "reach")
)  # fmt: skip
"""Words before a number that the question gave: "15 of the 40 students"."""
_ADJUNCT_WORDS = frozenset(
    ("for", "over", "in", "with", "from", "of", "after", "within", "during", "on", "at", "every", "among", "by", "to",
     "and", "or", "plus", "minus", "times", "between")
)  # fmt: skip
_ADJUNCT = re.compile(
    r",?\s(?:for|over|in|with|from|after|within|during|on|at|every|among|across|until)\s|(?<=s)\sof\s(?=[0-9])"
)
_NEW_QUANTITY = re.compile(
    r"(?:\A|(?:(?:total|sum|profit|loss|average|amount|cost|price|distance|speed|salary|income) of|([^\s,;]+)) )"
    r"\\?[$\u20ac\u00a3\u00a5]?[0-9][0-9.,/]*%?(?: [A-Za-z-]+){0,3}\Z"
)
_OTHER_QUANTITY = re.compile(r"[0-9][^\s]*\s[a-z]|[$\u20ac\u00a3\u00a5][0-9]")
_RESULT = re.compile(
    r"\b(?:to|total|totals|altogether|makes?|left|remain[a-z]*|equals?|is|are|was|were|has|have|had|costs?|pays?|gets?"
    r"|[a-z]+ing|and|each for)\b|[=,;]"
)
_DISCARDED = re.compile(rf"(?:\b[A-Za-z] ?= ?)?[^\s,;()]{{1,40}} \((?:{REJECTED}|impossible)\),? (?:or|and) ")
_REMARK = re.compile(
    r" \((?!(?:mod|or)\b)(?=[A-Za-z]{2,}[ ,)]|[^()\n]{0,60}[a-z'\u2019]{3,} [a-z]{2,})"
    r"[^()\n]{2,200}\)(?![A-Za-z0-9^_])"
    r"|(?<=[a-z]{3}) \(\\?[$\u20ac\u00a3\u00a5][0-9.,]{1,12}\)(?= [a-z]|,)"
)
_REJECTED = re.compile(r"\A(?:not|neither) .{1,80}?,? (?:but|is|it is|it's) (?=\S)")
_LEADING_ADJUNCT = re.compile(
    r"\A(?:and |but |then |now,? )?(?:after|in|with|by|for|over|at|on|from|when|if|once|during|within|given|using"
    r"|out of|rounding|adding|dividing|multiplying|subtracting|of)\s[^,]{1,80},\s(?=.*[a-z]{3}|.*=)",
    flags=re.IGNORECASE,
)
_OR_IN_UNITS = re.compile(
    r"(?<=[0-9] )(seconds|minutes|hours|days|weeks|months|years|cents|cm|mm|feet|inches|meters|grams|ml), or [0-9.]+ "
    r"(seconds?|minutes?|hours?|days?|weeks?|months?|years?|dollars?|m|cm|km|feet|foot|yards?|kg|liters?)\b"
)
"""The same quantity in larger units: "160 minutes, or 2 hours and 40 minutes"."""
_BEFORE = re.compile(
    r"(?:(?<!,)(?<!\band)\s(?:after|before)\s|,\s(?:after|before)\s(?=[a-z]+ing\b))(?!.*\b(?:is|was|will be)\b)"
)
_PROPERTY = re.compile(
    r"[^,0-9$]{1,40} (?:is|are) (?:invertible|positive|negative|prime|even|odd|possible|correct|right|true|convergent"
    r"|divergent|continuous|right-angled|equilateral|isosceles|unique|solvable|acute|obtuse|parallel|perpendicular|similar|congruent)\W*\Z"
)
"""A consequence of the value that the sentence stated before: "det A = -2, so A is invertible"."""
_SHARE_OF = re.compile(
    r"\b(?:half|an? (?:third|quarter|fifth|tenth)|[0-9.]+ ?\\?%) of \\?\$?[0-9][^\s,]*(?: [a-z]+)?, "
    r"(?:or|namely|i\.e\.),? (?=[\\$0-9])"
)
"""A share whose value follows: "half of 80, or 40"."""
_IN_WAYS = re.compile(r"\bin (?=[$0-9][^,]{0,60} ways?\b)|\b(?:enough|sufficient) for (?=[0-9])")
_BY_FROM_TO = re.compile(r"(?<= by )(\S{1,20}?),? from \S{1,20} to \S{1,20}\Z")
_QUANTITY = re.compile(r"\\?[$\u20ac\u00a3\u00a5]?[-\u2212]?[0-9][0-9.,/]{0,30}[%\u00b0]? (?:[A-Za-z]{1,20} ){0,3}")
_IS_IT = re.compile(r"(?<=[)$]),? is (?:the )?(?:correct |right )?(?:one|answer|choice|option|correct|right)\Z")


def statement(line: str) -> str:
    """The answer at the beginning of a line: its first sentence, without reasons, fillers and circumstances after a
    quantity: "45 minutes" for "45 minutes for the whole way"."""
    text = without_filler(cleaned(up_to_reason(_REJECTED.sub("", line.strip()))))
    for word in words_of(text):
        if word[0] in CUT and _QUANTITY.fullmatch(text, 0, word.start()):
            is_counted = word[0] in ("per", "each", "in", "of") or re.search(r"[0-9$\\]", text[word.start() :])
            return text if is_counted else text[: word.start()].strip()
    return text


def up_to_reason(line: str) -> str:
    """The line up to the end of its first sentence or to the reason in it."""
    if "(" in line:
        line = _DISCARDED.sub("", line)
        line = _REMARK.sub(lambda remark: "" if is_outside(line, remark.start()) else remark[0], line)
    same = _OR_IN_UNITS.search(line)
    if same and same[1].rstrip("s") != same[2].rstrip("s"):
        line = line[: same.end(1)]
    for pattern in (SENTENCE_END, _REASON):
        for end in pattern.finditer(line):
            if end.start() > 0 and is_outside(line, end.start()):
                line = line[: end.start()]
                break
    return line


def main_clause(sentence: str, *, in_words: bool = False) -> str:
    """The part of a sentence after its last "so" or "therefore", without reasons and remarks."""
    sentence = _CONTRACTED.sub(r"\1 is", sentence) if "'" in sentence else sentence
    sentence = _LEADING_REASON.sub("", sentence)
    sentence = _ASIDE_AS.sub(",", sentence) if ", as " in sentence else sentence
    ways = _IN_WAYS.search(sentence) if " way" in sentence or " for " in sentence else None
    sentence = sentence[ways.end() :] if ways else sentence
    ends = [match.end() for match in _THEREFORE.finditer(sentence) if is_outside(sentence, match.start())]
    if ends and _PROPERTY.match(sentence, ends[-1]) and holds_value(sentence[: ends[-1]]) and not in_words:
        ends.pop()
    leaving = (_LEAVING.search(sentence) or _IN_TOTAL.search(sentence)) if not ends else None
    if leaving:
        ends = [leaving.end()]
    sentence = sentence[ends[-1] :] if ends else sentence
    lead = _LEADING_ADJUNCT.match(sentence)
    if lead and holds_value(lead[0]) and holds_value(sentence[lead.end() :]) and is_outside(sentence, lead.end()):
        sentence = sentence[lead.end() :]
    sentence = _BY_FROM_TO.sub(r"\1", sentence.rstrip(".")) if " by " in sentence else sentence
    share = _SHARE_OF.search(sentence) if " of " in sentence else None
    sentence = cleaned(up_to_reason(sentence[share.end() :] if share else sentence))
    sentence = _IS_IT.sub("", sentence) if " is " in sentence else sentence
    time = next((match for match in _BEFORE.finditer(sentence) if holds_value(sentence[: match.start()])), None)
    return sentence[: time.start()] if time else sentence


def without_adjunct(sentence: str, *, is_predicate: bool = False) -> str:
    """The sentence up to the first preposition after a new value, unless a result follows: "he needs 7 sacks" for "he
    needs 7 sacks for 20 cows"."""
    for adjunct in list(_ADJUNCT.finditer(sentence))[:MAX_LOOKS]:
        quantity = _NEW_QUANTITY.search(sentence, max(0, adjunct.start() - 80), adjunct.start())
        rest = sentence[adjunct.end() :]
        if not quantity or not _OTHER_QUANTITY.search(rest) or not is_outside(sentence, adjunct.start()):
            continue
        before = (quantity[1] or "").lower()
        is_subject = not before and not is_predicate and len(rest.split()) > 2
        if not is_subject and before not in _ADJUNCT_WORDS and before not in DEFINITE and not _RESULT.search(rest):
            return sentence[: adjunct.start()]
    return sentence
