r"""What a solution concludes that states no answer: reads its last sentences for a number, a formula or a word.

A sentence is cut where it goes on to give a reason, a remark in brackets or what the answer is not. In what is left,
the answer follows the last verb ("the total is 5 cm"), or is the last number or formula, with those that are joined to
it by "or", "and" or commas, and with the unit or the things after it: "8 apples" in "There are 8 apples left.".

The callers cut texts to a few thousand characters.
"""

import re
from collections.abc import Iterator
from itertools import takewhile

from rlinf_algos.rewards.sentences import (
    CLAUSE_END,
    SENTENCE_END,
    claim_of,
    claims_of,
    is_outside,
    leaves_open,
    split,
    without_verification,
)
from rlinf_algos.rewards.units import NO_THINGS, SCALES, is_thing, is_unit

_REASON = re.compile(
    r",?\s(?:because|since|so|which|instead of|rather than|while|whereas)\b"
    r"|,\s[a-z]{3,12}(?:ed|ing) (?:at|by|for|from|if|in|when)\b"
    r"|,\s(?:saving|paying|using|spending|having|taking|starting|assuming|including|rounding|counting|ignoring)\s"
    r"|,\s[0-9.]+ (?:[a-z]+ )?(?:more|fewer|less) than\b"
    r"|(?<=[0-9$}]),\swith\s(?!.*\btotal)"
    r"|,\s(?:as|where|giving|when|making|leaving|each [a-z]+ing)\b"
    r"|,\s(?:or )?(?:approximately|about|roughly|i\.e\.)|(?:(?<=[0-9}])|(?<=[0-9}]\$)),\sor \$?[0-9.]+ ?\\?%"
    r"|[,;]\s[^\s,]{1,20}\s(?:does|do|is|are)(?: not|n't)\b"
    r"|\s\((?=[^()]{1,40}\s(?:rejected|extraneous|discarded|invalid)\b)"
    r"|[,;]\s(?:and |but )?(?:the )?(?:[a-z]+ ){0,3}\S{1,20} (?:is|are) (?:rejected|extraneous|discarded|invalid)\b"
    r"|[,;(]\s?(?:and |but )?not\b|\s(?:and|but) not\b|\s\((?!(?:mod|or)\b)(?=[A-Za-z]{3,})"
    r"|,\s(?:the|an?|its|his|her|their)\s(?![^.]*(?:\b(?:is|are|be|equals?|was|were|has|have|gets?|gives?)\b|=|\s[a-z]+s\s[$\\\u20ac\u00a3\u00a5]{0,2}[0-9]))"
)
_THEREFORE = re.compile(
    r"(?:\A|[,;]?\s)(?:so|thus|hence|therefore|i\.e\.|which (?:makes|gives|yields|leaves"
    r"|(?:means|implies)(?: that)?"
    r"|(?:is|equals|comes to)(?=:? [$\\\u20ac\u00a3\u00a5]{0,2}[0-9][^ ]{0,20}(?: [a-z]+)?\.?\Z))"
    r"|but only|that is(?=,)|in other words|equivalently|or in [a-z]{3,12} (?:notation|form)"
    r"),?\s(?!that\b)",
    flags=re.IGNORECASE,
)
_LEAVING = re.compile(
    r",\s(?:(?:leaving|giving|making)"
    r"(?:\s(?:him|her|them|us|it|a|the|total|of|with|profit|gain|loss|change|savings|balance)){0,4}|for a total of)"
    r"\s(?=[\\$\u20ac\u00a3\u00a5-]{0,3}[0-9])"
)
_IN_TOTAL = re.compile(r",\s(?=[\\$0-9][^,]{0,40}\s(?:in total|in all|altogether)[.!]?\Z)")
_BEST = re.compile(
    r"(?:\A|\s)((?:plan |option |store |company )?)([A-J])(?: is|'s) (?:the )?"
    r"(?:better|best|cheaper|cheapest|correct|right)(?: [a-z]+)?(?: (?:by|for|for the|in) .{1,30})?\Z",
    flags=re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?<!not both )(?<!neither )\b((?:[A-J]|[IV]{1,3})(?:(?:, (?:and )?| and | & )(?:[A-J]|[IV]{1,3})\b){1,5})"
    r"(?: only)? (?:are|hold|must be)(?: (?:both|all|the))?(?: (?:correct|true|right|valid|answers?))?\Z"
)
_CONTRACTED = re.compile(r"\b([A-Za-z]{2,5})(?:(?<=[Ii]t|at|re)'s|'(?:re|ll be))\b")
_LEADING_REASON = re.compile(r"\A(?:since|because|as)\s[^,=]{1,80},\s(?=\S)", flags=re.IGNORECASE)
_AT_A_POINT = re.compile(r"\s(?:(?:at|when|where|for)\s\$?[a-z]\$?\s?=|when divided by)\s?[^\s=]{1,20}\Z")
_OF_VALUE = re.compile(r"\A(?:an?|the)(?: [a-z]+){1,3} of (?=[-$\\0-9])")
_ALSO = re.compile(r"(?<=[0-9]\s)([A-Za-z]+)\s\((?:[0-9.,]+\s[A-Za-z]+|\\?[$\u20ac\u00a3\u00a5][0-9.,]+)\)\Z")
"""The same quantity in another unit: "3 days (72 hours)"."""
_SUM = re.compile(r"[a-z]{3}\s*=\s*(\\?[$\u20ac\u00a3]?-?[0-9][^=$]*)\Z")
_ASIDE_AS = re.compile(r",\sas\s[^,.]{1,80},(?=\s[a-z])")
_DEFINITE = frozenset(
    ("the", "his", "her", "their", "its", "our", "my", "these", "those", "all", "both", "original", "initial", "other",
     "than", "from", "among", "reach")
)  # fmt: skip
"""Words before a number that was there before: "15 of the 40 students"."""
_DURING = frozenset(("over", "within", "after", "for", "during"))
_ADJUNCT_WORDS = frozenset(
    ("for", "over", "in", "with", "from", "of", "after", "within", "during", "on", "at", "every", "among", "by", "to",
     "and", "or", "plus", "minus", "times", "between")
)  # fmt: skip
_ADJUNCT = re.compile(r",?\s(?:for|over|in|with|from|after|within|during|on|at|every|among|across|until)\s")
_NEW_QUANTITY = re.compile(
    r"(?:\A|(?:(?:total|sum|profit|loss|average|amount|cost|price|distance|speed|salary|income) of|([^\s,;]+)) )"
    r"\\?[$\u20ac\u00a3\u00a5]?[0-9][0-9.,/]*%?(?: [A-Za-z-]+){0,3}\Z"
)
_OTHER_QUANTITY = re.compile(r"[0-9][^\s]*\s[a-z]|[$\u20ac\u00a3\u00a5][0-9]")
_RESULT = re.compile(
    r"\b(?:to|total|totals|altogether|makes?|left|remain[a-z]*|equals?|is|are|was|were|has|have|had|costs?|pays?|gets?"
    r"|[a-z]+ing|and|each for)\b|[=,;]"
)
_RESULTS = frozenset(
    ("get", "obtain", "make", "be", "give", "have", "yield", "find", "become", "equal", "form", "total")
)
"""Verbs after "to" whose number is the result; that of others is a purpose, as in "4 hours to solve 5 problems"."""
_NEGATED = re.compile(r"(?:\b(?:not|never|cannot|can't|neither|nor)|n't)\s+(?:be\s+)?\Z", flags=re.IGNORECASE)
_APPROXIMATELY = re.compile(
    r"\A(?:approximately|about|roughly|nearly|around|almost|close)\s(?:equal\s)?(?:to\s)?(?=[-\u2212\\$0-9])"
)
_THAT = re.compile(
    r"\b(?:is|be|concludes?|conclusion|means?|implies|shows?|see|know|find|follows|deduce) that (?=\S)"
    r"|\b(?:[Tt]his|which|[Tt]hat) (?:means|implies|shows) (?=[A-Z])"
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
_JOINT = re.compile(r"\s?(?:,|,?\s?\b(?:or|and)\b)\s?")
_VERB = re.compile(
    r"\b(?:is|are|equals?|be|was|were|becomes?|remains?|gives?|get|costs?|pays?|paid"
    r"|(?:simplifies|comes|amounts|evaluates|works out|adds up|reduces) to)\b(?! not\b)[\s:]*"
)
_PREDICATE = re.compile(
    r"\b(?:is|are|be|was|were|equals?|becomes?|has|have|falls? on|called|named|chooses?|wins?|get|must|takes place on"
    r"|(?:belongs?|goes|go) to|represents?|describes?|(?:lies?|lands?) (?:in|on)|opens?|costs?)\b\s*"
)
_COMPARATIVE = re.compile(
    r"(?:the )?((?:more|less|fewer|most|least|better|worse|best)(?: [a-z]+)?|[a-z]{2,}(?:er|est))"
    r"(?= (?:than|deal|value|choice|option|one|buy|in|of)\b|[,.]|\Z)"
)
_WHOLE = re.compile(
    r"\b(?:does|do) not exist\b|\bcannot be determined\b|\bno (?:[a-z]+ )?solutions?\b|\binfinitely many\b(?: [a-z]+)?"
    r"|\binfinite(?: number of)? solutions\b"
    r"|\bempty set\b|\bsolution set is empty\b",
    flags=re.IGNORECASE,
)
_ENDS_WITH_FORMULA = re.compile(r"\b(?:is|are|be):? (\$[^$]{1,2000}\$)[.!]?\Z")
_CUT = frozenset(
    ("for", "when", "where", "after", "with", "in", "by", "from", "on", "because", "since", "as", "so", "which", "that",
     "at", "to", "of", "before", "until", "while", "if", "during", "each", "per", "altogether",
     "up", "down", "above", "below", "along", "across", "into")
)  # fmt: skip
_UNIT_WORDS = frozenset(("square", "cubic", "sq", "cu", "per", "squared", "cubed"))
_DISCARDED = re.compile(
    r"(?:\b[A-Za-z] ?= ?)?[^\s,;()]{1,40} \((?:rejected|extraneous|discarded|invalid|impossible)\),? (?:or|and) "
)
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
_MORE_THAN = re.compile(r"(?:more|fewer|less)(?:(?: [a-z]+){0,6} than\b[^0-9$]*| [a-z]+|)\Z")
_WAYS_TO = re.compile(r"(?<=ways) (?:to|of|in which)\b.*", flags=re.DOTALL)
_SHARE_OF = re.compile(
    r"\b(?:half|an? (?:third|quarter|fifth|tenth)|[0-9.]+ ?\\?%) of \\?\$?[0-9][^\s,]*(?: [a-z]+)?, "
    r"(?:or|namely|i\.e\.),? (?=[\\$0-9])"
)
"""A share whose value follows: "half of 80, or 40"."""
_IS_SHARE_OF = re.compile(r"(\S+(?: [a-z]+)?) is (?:half|twice|double|a third|one third|a quarter)(?: of)? ")
_IN_WAYS = re.compile(r"\bin (?=[$0-9][^,]{0,60} ways?\b)")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w\}?)?) ?[=:] ?([^\n=:]{1,100})")
_BULLET = re.compile(r"\A(?:[-+*\u2022]|\(?[0-9]{1,2}[.)]) ")
_ROW = re.compile(r"[\[(|]((?: ?-?[0-9.]+(?:/[0-9]+)?){1,9}) ?[\])|]")
_ROWS = re.compile(
    r"\\begin\{(align\*?|aligned|gather\*?|gathered|eqnarray\*?|split)\}(.{1,2000}?)\\end\{\1\}[.\s]{0,9}\Z", re.DOTALL
)
_ROUNDED = re.compile(r"\$[^$=]*[^$= ][^$=]+\\approx([^$=]*)\$")
"""A clause of its own, whose subject is rounded."""
_DERIVATION = re.compile(r"[A-Za-z0-9)}] ?(?:\^|[-+*/] ?[A-Za-z0-9])[^=<>,$]{0,40}=(?!.*(?:=|,))")
_DERIVED = re.compile(r"(?<![<>!\\:=])=(?!=)")
_QUANTITY = re.compile(r"\\?[$\u20ac\u00a3\u00a5]?[-\u2212]?[0-9][0-9.,/]{0,30}[%\u00b0]? (?:[A-Za-z]{1,20} ){0,3}")
_NAMED = r"(?!(?:The|It|This|That|These|Those|He|She|We|They|There|Its|Our|Both|All|No|An?)\b)[A-Z][a-z]+"
_NAMED_VALUE = re.compile(r"\b([b-hj-z]) (?:is|equals) (?=[-\u2212]?[0-9\\$(])")
_IS_IT = re.compile(r"(?<=[)$]),? is (?:the )?(?:correct |right )?(?:one|answer|choice|option|correct|right)\Z")
_ASIDE = re.compile(r";\s(?!it\b|so\b|thus\b|hence\b|therefore\b).*", flags=re.DOTALL)
_SAID_OF = frozenset(("is", "are", "was", "were", "works"))
_NOT_SAID = re.compile(
    r"\s(?:not|no|wrong|incorrect|too|less|more|greater|smaller|at|impossible|extraneous|rejected|invalid|[-\\$0-9])"
)
_OUT_OF = re.compile(r"(?<=[0-9A-Za-z])\s(?:out of|left|more than the)\b")
_MATH_BRACKETS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"))
_OF_THE = re.compile(
    r"\b(?:of|from|in|among|for|than) (?:the|his|her|their|its|these|those|all)(?: [a-z]+)? [\\$]{0,2}[0-9][^\s,]*"
)
_FEW_WORDS = 7
_AMOUNT = r"\\?[$\u20ac\u00a3\u00a5]?[0-9][0-9.,]{0,12}"
_MAX_LOOKS = 20
_EXACT = re.compile(r"(?=[^\u2248]*[0-9])(?=[^\u2248]*[\u03c0\u221a/])[^\u2248A-Za-z=,$\\]{1,40}(?= ?\u2248 ?[0-9])")
_ROUNDED_UNITS = re.compile(r"\A(\$[^$]{1,200}\\approx[^$]{1,60}\$) [a-z]{1,15}\Z")
_EACH_THEIR = re.compile(
    rf"[^,]{{1,60}}? (?:is|are|was|has|have|gets|costs|weighs|needs|earns) ({_AMOUNT})(?: [a-z]+){{0,2}}"
    r",? (?:and|while) (?:(?:his|her|their|the other|an?) [a-z]+(?: [a-z]+)?|[A-Z][a-z]+)"
    rf" (?:is|are|was|has|have|gets|costs|weighs|needs|earns) ({_AMOUNT})(?: [a-z]+){{0,2}}\Z"
)
"""Two clauses with a value each, for two people or things."""


def statement(line: str) -> str:
    """The answer at the beginning of a line: its first sentence, without reasons, fillers and, after a quantity, the
    circumstances: "45 minutes" of "45 minutes for the whole way"."""
    text = without_filler(cleaned(_sentence(_REJECTED.sub("", line.strip()))))
    for word in words_of(text):
        if word[0] in _CUT and _QUANTITY.fullmatch(text, 0, word.start()):
            is_counted = word[0] in ("per", "each", "in", "of") or re.search(r"[0-9$\\]", text[word.start() :])
            return text if is_counted else text[: word.start()].strip()
    return text


def without_filler(text: str) -> str:
    return _APPROXIMATELY.sub("", _FILLER.sub("", text, count=1).strip())


def cleaned(text: str) -> str:
    """The text without the white space, emphasis and full stop around it."""
    text = text.strip()
    for opening, closing in _MATH_BRACKETS:
        if text.endswith(closing) and text.count(opening) < 1 + (opening == closing):
            text = text.removesuffix(closing)
    for _ in range(_MAX_LOOKS):
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
    """The plain words of a text: not those of formulas, nor names of functions, nor products such as `xy`."""
    formulas = [(formula.start(), formula.end()) for formula in _FORMULA.finditer(text)]
    formulas += [(found.start(), found.end()) for found in re.finditer(r"\\[A-Za-z]+\{[^{}]*\}", text)]
    for word in _WORD.finditer(text):
        name = word[0].lower()
        is_product = _is_product(name) and not is_unit(word[0])
        is_word = name not in _FORMULA_NAMES and not is_product and not word[0].isupper()
        if is_word and not any(start <= word.start() < end for start, end in formulas):
            yield word


def _is_product(name: str) -> bool:
    """Whether letters are a product, such as `xy` or `zyx`, and no word."""
    if len(name) == 2:
        return name not in _SHORT_WORDS
    is_without_vowels = re.search(r"[aeiou]", name) is None and name not in _WORDS_WITHOUT_VOWELS
    return len(name) == 3 and len(set(name)) == 3 and (is_without_vowels or name == "abc")


def is_formal(answer: str) -> bool:
    """Whether it begins like a number or a formula, or is a single letter."""
    text = answer.lstrip("$({[|-\u2212+ ")
    word = re.match(r"[A-Za-z]{2,}", text)
    if word is None or not answer:
        return bool(answer)
    is_product = re.fullmatch(r"(?!by)[abcxyz]{2}|lwh|abc|[xyz]{3}", word[0]) is not None
    return is_product or word[0].lower() in _FORMULA_NAMES or _is_name(text)


def _is_name(text: str) -> bool:
    """Whether it begins with the name of a quantity, as `AB = 5` does, or a currency's."""
    return re.match(r"[A-Z]{2,4}(?: ?=|\s?[0-9]|\Z)|[a-z]{2}(?: ?[=+*/^<>])", text) is not None


def measured(text: str) -> str:
    """A text that begins with a number or formula without the words after it that only describe it.

    Example: measured("8 apples left in the basket") == "8 apples"; "5 or more" and "2 less than 7" stay whole.
    """
    if not is_formal(text):
        return text
    text = _WAYS_TO.sub("", text) if " ways " in text else text
    text = _ALSO.sub(r"\1", text) if text.endswith(")") else text
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
        elif (name in NO_THINGS and name not in _CUT) or re.match(r"(?:to|of) [0-9$]", text[word.start() :]):
            return text
        else:
            return _without_description(text, word, is_counted=not end)
    return text


def _is_measure(word: re.Match[str], text: str) -> bool:
    """Whether a word after a number is part of its unit; "in" is one only at the end."""
    name = word[0].lower()
    if name == "in":
        return word.end() >= len(text.rstrip(" .,;"))
    return is_unit(word[0]) or name in _UNIT_WORDS or name in SCALES or name == "percent"


def _without_description(text: str, word: re.Match[str], *, is_counted: bool) -> str:
    """The text up to a word, with the things that are counted there; whole where a number after it may matter."""
    rest = text[word.start() :]
    names = re.findall(r"[a-z]+", rest.lower())[:3] if word[0] not in _CUT and is_counted else []
    for i in range(len(names)):
        if is_thing(names[: i + 1]):
            things = re.match(r"\W*".join(names[: i + 1]) + r"(?: per [a-z]+)?", rest, flags=re.IGNORECASE)
            if things and re.match(r" (?:or|to) [^,.]{0,15}[0-9]", rest[things.end() :]):
                return text
            return text[: word.start()] + (things[0] if things else "")
    if word[0] not in _CUT and re.search(r"[0-9$\\=]", _OF_THE.sub("", rest)):
        return text
    return text[: word.start()].rstrip(" ,;:(-\u2013\u2014") or text


# -- the end of a text -----------------------------------------------------------------------------------------------


def conclusion(text: str, *, in_words: bool = False) -> str | None:
    text = without_verification(text.strip())
    text = re.sub(r"(?:\n[^\n0-9=$\\]{1,200}){1,3}\Z", "", text) if r"\end{" in text else text
    display = re.search(r"(?:\$\$([^$]{1,2000})\$\$|\\\[((?:(?!\\\[)[\s\S]){1,2000})\\\])[.\s]{0,9}\Z", text)
    text = cleaned(display[1] or display[2]) if display else text
    rows = _ROWS.search(text)
    if rows:
        lines = [line.replace("&", "").strip(" .,;") for line in rows[2].split("\\\\") if line.strip(" &.,;\n")]
        return _system(lines[-_MAX_LOOKS:]) or (lines[-1] if lines else None)
    if display:
        return text
    lines = [line for line in text.split("\n") if line.strip()][-_MAX_LOOKS:]
    system = _system(lines)
    if system:
        return system
    for line in reversed(lines):
        for sentence in split(line, SENTENCE_END)[:-4:-1]:
            if leaves_open(sentence):
                return None
            if _holds_value(sentence):
                break
        claims = [one for one in claims_of(line, in_words=in_words) if not one.endswith("?")]
        parts = [claim_of(one, in_words=in_words) for one in claims]
        for sentence in reversed([part for part in parts if part][-_MAX_LOOKS:]):
            answer = predicate(sentence) if in_words else _alone(sentence) or _chosen(sentence) or concluded(sentence)
            if answer:
                return answer
        if in_words and any(parts):
            return cleaned(line)
    is_short = len(lines) == 1 and len(text.split()) <= 4 and claim_of(text, in_words=in_words) is not None
    return cleaned(lines[-1]) if is_short else None


def last_sentence(text: str) -> str:
    """The last sentence of a text that holds a digit."""
    line = next((line for line in reversed(text.split("\n")) if re.search(r"[0-9]", line)), "")
    return next((one for one in reversed(split(line, CLAUSE_END)) if re.search(r"[0-9]", one)), "")


def _chosen(sentence: str) -> str | None:
    """The letters of statements or choices that are right: "A, C" of "A and C are both correct"."""
    chosen = _CHOSEN.search(cleaned(sentence))
    best = _BEST.search(_consequence(sentence))
    if best:
        return best[2]
    return re.sub(r",? and |, | & ", ", ", chosen[1]) if chosen else None


def _system(lines: list[str]) -> str | None:
    """The last lines, where at least two in a row assign a value to a name and hold no words, or are rows of a matrix.
    The values of one name are a list where they are listed, and else a derivation."""
    assigned, are_listed = [], True
    for line in reversed(lines):
        assignment = _ASSIGNMENT.fullmatch(cleaned(_BULLET.sub("", line).replace("$", "")))
        if not assignment or next(words_of(assignment[0]), None):
            break
        assigned.append((assignment[1], f"{assignment[1]} = {assignment[2]}"))
        are_listed = are_listed and _BULLET.match(line) is not None
    if len(assigned) > 1 and (are_listed or len(assigned) == len(dict(assigned))):
        return ", ".join(line for _, line in reversed(assigned))
    rows = [_ROW.fullmatch(line.strip()) for line in lines]
    matrix = list(takewhile(bool, reversed(rows)))
    cells = r" \\ ".join(row[1].strip().replace(" ", " & ") for row in reversed(matrix) if row)
    return rf"\begin{{pmatrix}} {cells} \end{{pmatrix}}" if len(matrix) > 1 else None


def _sentence(line: str) -> str:
    """The line up to the end of its first sentence or to the reason that it gives."""
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


def _consequence(sentence: str) -> str:
    """What a sentence says after its last "so" or "therefore", without reasons and remarks."""
    sentence = _CONTRACTED.sub(r"\1 is", sentence) if "'" in sentence else sentence
    sentence = _LEADING_REASON.sub("", sentence)
    sentence = _ASIDE_AS.sub(",", sentence) if ", as " in sentence else sentence
    ways = _IN_WAYS.search(sentence) if " way" in sentence else None
    sentence = sentence[ways.end() :] if ways else sentence
    ends = [found.end() for found in _THEREFORE.finditer(sentence) if is_outside(sentence, found.start())]
    leaving = (_LEAVING.search(sentence) or _IN_TOTAL.search(sentence)) if not ends else None
    if leaving:
        ends = [leaving.end()]
    sentence = sentence[ends[-1] :] if ends else sentence
    lead = _LEADING_ADJUNCT.match(sentence)
    if lead and _holds_value(lead[0]) and _holds_value(sentence[lead.end() :]) and is_outside(sentence, lead.end()):
        sentence = sentence[lead.end() :]
    share = _SHARE_OF.search(sentence) if " of " in sentence else None
    sentence = cleaned(_sentence(sentence[share.end() :] if share else sentence))
    sentence = _IS_IT.sub("", sentence) if " is " in sentence else sentence
    time = next((found for found in _BEFORE.finditer(sentence) if _holds_value(sentence[: found.start()])), None)
    return sentence[: time.start()] if time else sentence


def _alone(sentence: str) -> str | None:
    """A sentence without words, or a short label with its answer."""
    sentence = _consequence(sentence)
    label = re.match(r"(?:[A-Za-z]+ ){0,3}[A-Za-z]{2,}: ?(?=\S)", sentence)
    sentence = sentence[label.end() :] if label else sentence
    has_content = re.search(r"[0-9A-Za-z]", sentence)
    return sentence if has_content and next(words_of(sentence), None) is None else None


def concluded(sentence: str) -> str | None:
    """What a sentence says after its last verb, where that is a number or a formula; else the last one in it."""
    sentence = _NAMED_VALUE.sub(r"\1 = ", _consequence(sentence))
    share = _IS_SHARE_OF.match(sentence)
    if share and _holds_value(share[1]) and is_formal(share[1]):
        return measured(share[1])
    both = _EACH_THEIR.match(sentence)
    if both:
        return f"{both[1]}, {both[2]}"
    point, total = _AT_A_POINT.search(sentence), _SUM.search(sentence)
    if point and _holds_value(sentence[: point.start()]) and is_outside(sentence, point.start()):
        sentence = sentence[: point.start()]
    elif total and next(words_of(sentence[: total.start() + 1]), None) and is_outside(sentence, total.start()):
        return measured(cleaned(total[1]))
    for verb in reversed(list(_VERB.finditer(sentence))[-_MAX_LOOKS:]):
        if _NEGATED.search(sentence, 0, verb.start()):
            return None
        rest = _without_adjunct(sentence[verb.end() :], is_predicate=True)
        answer = _last_side(measured(statement(_OF_VALUE.sub("", rest))))
        is_value = _holds_value(answer) or re.fullmatch(r"\(?[A-HJ-Z]\)?|[a-z]{2,3}", answer)
        if is_value and is_formal(answer):
            return answer
    return _last_of(_without_adjunct(sentence))


def _without_adjunct(sentence: str, *, is_predicate: bool = False) -> str:
    """The sentence up to the first preposition after a new value, where no result follows: "he needs 7 sacks" of "he
    needs 7 sacks for 20 cows"."""
    for adjunct in list(_ADJUNCT.finditer(sentence))[:_MAX_LOOKS]:
        quantity = _NEW_QUANTITY.search(sentence, max(0, adjunct.start() - 80), adjunct.start())
        rest = sentence[adjunct.end() :]
        if not quantity or not _OTHER_QUANTITY.search(rest) or not is_outside(sentence, adjunct.start()):
            continue
        before = (quantity[1] or "").lower()
        is_subject = not before and not is_predicate and len(rest.split()) > 2
        if not is_subject and before not in _ADJUNCT_WORDS and before not in _DEFINITE and not _RESULT.search(rest):
            return sentence[: adjunct.start()]
    return sentence


def _last_side(answer: str) -> str:
    """The result of a calculation, `30` of `2(10 + 5) = 2(15) = 30`, and the exact value of a rounded one."""
    answer = _ROUNDED_UNITS.sub(r"\1", answer) if "approx" in answer else answer
    exact = _EXACT.match(answer)
    answer = answer[: exact.end()] if exact else answer
    sides = answer.strip("$").split("=")
    if len(sides) < 2 or "," in answer or re.search(r"[<>!:]\Z|\\\Z", sides[0]) or answer.count("$") > 2:
        return answer
    if (
        next(words_of("=".join(sides[:-1])), None)
        or r"\begin" in answer
        or any(re.search(r"[^A-Za-z ]\s[A-Za-z]\s?\Z", one) for one in sides)
    ):
        return answer
    is_calculation = len(sides) > 2 or not re.search(r"[A-Za-z]", sides[0])
    return sides[-1].strip() if is_calculation and _holds_value(sides[-1]) else answer


def _holds_value(text: str) -> bool:
    return re.search(r"[0-9\\$]", text) is not None and len(text) > 1 - text.isdigit()


def _last_of(sentence: str) -> str | None:
    """The last number or formula between words, what a list joins to it, and its unit."""
    pieces: list[tuple[str, bool]] = []
    place = 0
    for word in words_of(sentence):
        pieces += [(sentence[place : word.start()], False), (word[0], True)]
        place = word.end()
    pieces.append((sentence[place:], False))
    places = [i for i in reversed(range(0, len(pieces), 2)) if _holds_value(pieces[i][0].strip(" .,;:"))]
    last = next((i for i in places if not _is_definite(pieces, i)), places[0] if places else None)
    if (
        last is None
        or (last and pieces[last - 1][0] in ("than", "not", "exceeds"))
        or pieces[max(last - 1, 0)][0] == "Not"
    ):
        return None
    first = i = last
    while i >= 2 and (pieces[i - 1][0] in ("or", "and", "except") or _is_joining_unit(pieces[i - 1][0])):
        i -= 2
        if _holds_value(pieces[i][0].strip(" .,;:")):
            if _DERIVATION.search(pieces[i][0]):
                break
            if is_unit(pieces[i + 1][0]) and pieces[i + 2][0].startswith(","):
                break
            first = i
        elif pieces[i][0].strip():
            break
    tail = "".join(piece for piece, _ in pieces[first:])
    if last != places[0]:
        tail = re.split(r"\s(?:out|left|more|from|among|of|to)\b", tail)[0]
    if first == last and last > 0:
        *_, value = _DERIVED.split(tail) if "," not in tail else [tail]
        tail = value if _holds_value(value.strip(" .,;:")) and "$" not in value.replace("\\$", "") else tail
    tail = re.split(r"(?<=\$): (?=\$)", tail)[-1]
    rounded = _ROUNDED.fullmatch(cleaned(tail)) if last > 0 and pieces[last][0].startswith(", ") else None
    tail = rounded[1] if rounded else tail
    return (
        measured(
            cleaned(re.sub(r"\A(?:[a-zA-Z] (?![-=<>+*/^]|\\[gln]e\b|\\in\b)|[\s.,;:=)\u2013\u2014!?]|- )+", "", tail))
        )
        or None
    )


def _is_time(pieces: list[tuple[str, bool]]) -> bool:
    return bool(pieces) and re.fullmatch(r"(?:second|minute|hour|day|week|month|year)s?", pieces[0][0]) is not None


def _is_joining_unit(word: str) -> bool:
    return is_unit(word) and word != "in"


def _is_definite(pieces: list[tuple[str, bool]], i: int) -> bool:
    """Whether the number at the beginning of a piece is one that was there before, as in "5 out of 20"."""
    before = [word.lower() for word, _ in pieces[max(0, i - 3) : i : 2][::-1]]
    is_direct = re.match(r"\s[\\$\u20ac\u00a3\u00a5]{0,2}[0-9]", pieces[i][0]) is not None
    if not is_direct or not before:
        return False
    if before[0] == "her" and before[1:2] and before[1].endswith("s"):
        return False  # it takes her 15 minutes
    is_duration = before[0] in _DURING and re.match(r"\s[0-9.]+\s*\Z", pieces[i][0]) and _is_time(pieces[i + 1 : i + 2])
    is_purpose = before[1:2] == ["to"] and before[0] not in _RESULTS
    return before[0] in _DEFINITE or before[:2] == ["of", "out"] or is_purpose or bool(is_duration)


def predicate(sentence: str) -> str | None:
    """What a sentence says in words: yes or no, or what follows its verb."""
    sentence = _consequence(_ASIDE.sub("", sentence))
    clauses = [that.end() for that in _THAT.finditer(sentence) if not _NEGATED.search(sentence, 0, that.start())]
    sentence = sentence[clauses[-1] :] if clauses else sentence
    formula = _ENDS_WITH_FORMULA.search(sentence)
    if formula:
        return formula[1]
    whole = _WHOLE.search(sentence)
    if whole:
        return whole[0]
    reply = re.match(r"(?:yes|no|true|false)(?=,|\Z)", sentence, flags=re.IGNORECASE)
    if reply:
        return reply[0]
    verbs = [verb for verb in _PREDICATE.finditer(sentence) if verb.end() < len(sentence)]
    if not verbs:
        ending = re.search(r"\bthe [a-z]+ ([a-z]{4,}s)\Z", sentence)
        if ending and len(sentence.split()) > len(ending[0].split()):
            return ending[1]
        name = re.match(
            _NAMED
            + r"(?= (?!or\b|and\b|nor\b|(?:did|does|is|was) not|[a-z]+n't|cannot\b|could|lo[sz]t|loses|lie[sd])[a-z]+)",
            sentence,
        )
        return (
            name[0]
            if name and (len(sentence.split()) < _FEW_WORDS or clauses)
            else re.sub(r"\A(?:the|this|our|its) [a-z]+ (?!of\b)(?=[a-z])", "", sentence, flags=re.IGNORECASE) or None
        )
    subject = sentence[: verbs[0].start()].strip()
    if subject.lower() in ("both", "neither", "none"):
        return subject
    best = _BEST.search(sentence)
    noun = (
        re.search(r"(?:plan|option|store|company|offer|deal)\b", sentence[best.end(2) :])
        if best and not best[1]
        else None
    )
    if best:
        return f"{noun[0] + ' ' if noun else best[1]}{best[2]}"
    comparative = _COMPARATIVE.match(sentence, verbs[-1].end())
    if comparative and len(verbs) == 1:
        return f"{subject} is {comparative[1]}"  # the answer is who, or what they are
    clause = re.split(r", (?:and|but|while)\b", sentence[verbs[-1].end() :])[0]
    if re.fullmatch(_NAMED, subject) and clause.startswith("the "):
        return subject
    clause = re.split(r" (?:who|that|which) ", clause)[0]
    clause = re.sub(
        r"\A(?:(?!not\b|never\b)[a-z]+ )?(?:on|in|at|to) (?:an? |the )?(?=[A-Z])", "", without_filler(cleaned(clause))
    )
    return re.sub(r"\A(?:an?|the) (?=\w)|(?<=\w) (?:function|number|integer)\Z", "", clause) or None
