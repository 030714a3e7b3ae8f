r"""Converts completions to one plain notation, so that one grammar finds the answer in all of them.

`plain_text` maps wide characters and Chinese punctuation to ASCII, the Chinese words that state answers to English, and
amounts such as `$5` to `\$5`. It drops HTML tags, code fences and bold type. Runs of blanks become one, so that
patterns that skip white space take bounded time. Every step takes time linear in the text.
"""

import re

from rlinf_algos.rewards.arrays import pmatrix
from rlinf_algos.rewards.chinese import WIDE, in_english, is_chinese
from rlinf_algos.rewards.number_words import with_numbers

_HEADED = re.compile("\u3010([^\u3010\u3011\n]{1,12})\u3011:? ?")
_STRUCK = re.compile(
    r"~~(?=\S)[^~\n]{1,300}~~|<(s|del|strike)>[^<\n]{1,300}</\1>|\\(?:sout|st)\{[^{}\n]{1,300}\}", flags=re.IGNORECASE
)
"""Struck-out text, which counts as withdrawn."""
_ANSWER_TAGS = re.compile(r"<(/?)(?:final[_ ]?answer|final|result)>|\[(/?)answer\]", flags=re.IGNORECASE)
_AGAIN = re.compile(r"(?<=[0-9])(\.[0-9]{0,10}?)([0-9]{1,6}?)\2{2,}(?:\.\.\.|\u2026|\\[lc]?dots(?![a-z]))")
_QUOTED = re.compile(r"^> ", flags=re.MULTILINE)
_RUPEES = re.compile(r"\bRs\.? ?(?=[0-9])")
_SUBSCRIPTS = re.compile("[\u2080-\u2089]{1,9}")
_SPACED = re.compile("(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3}){1,5}(?= ?[\u20ac\u00a3\u20b9])")
_TAGS = re.compile(
    r"</?(?:b|i|u|strong|em|p|br|hr|div|span|center|font|code|pre|mark|h[1-6]|ul|ol|li)(?: [^<>\n]{0,100})?/?>",
    flags=re.IGNORECASE,
)
_SCRIPTS = re.compile(r"<su([pb])>([^<>\n]{1,20})</su\1>")
_HTML_FRACTION = re.compile(
    r"<sup>([0-9A-Za-z]{1,9})</sup>(?:&frasl;|[/\u2044])<sub>([0-9A-Za-z]{1,9})</sub>", flags=re.IGNORECASE
)
_CHARACTERS = {"nbsp": " ", "lt": "<", "gt": ">", "amp": "&", "minus": "-", "times": "\u00d7", "pi": "\u03c0",
               "frasl": "\u2044", "radic": "\u221a", "le": "\u2264", "ge": "\u2265", "ne": "\u2260", "deg": "\u00b0",
               "infin": "\u221e", "middot": "\u00b7", "sdot": "\u22c5", "divide": "\u00f7", "plusmn": "\u00b1",
               "asymp": "\u2248", "cup": "\u222a", "cap": "\u2229", "isin": "\u2208", "theta": "\u03b8",
               "alpha": "\u03b1",
               "beta": "\u03b2", "sup2": "\u00b2", "sup3": "\u00b3", "frac12": "\u00bd", "frac14": "\u00bc",
               "frac34": "\u00be", "ndash": "\u2013", "euro": "\u20ac", "pound": "\u00a3",
               "empty": "\u2205"}  # fmt: skip
_ENTITIES = re.compile(f"&({'|'.join(_CHARACTERS)});")
_FENCE = re.compile(r"^```[\w+-]{0,20}$", flags=re.MULTILINE)
_EMPHASIS = re.compile(r"(?<![0-9A-Za-z)\]}])\*\*|\*\*(?![0-9A-Za-z(\\-])|`|(?<!\w)__(?=\w)|(?<=\w)__(?!\w)")
_COMPARED = re.compile(
    r"(?:\$\\mathbb\{R\}\$|\b(?:all|any|every) (?:numbers?|values?(?: of \$?x\$?)?)) (?:(?:that|which) are )?"
    r"(greater than or equal to|less than or equal to|at least|at most|greater than|less than) (?=[-$\\0-9])"
)
_BOUND = re.compile(
    r"\b(?:(?:all|any|every) ([a-z])|([b-hj-z])(?: is| must be| has to be)?) "
    r"(greater than or equal to|less than or equal to|at least|at most|greater than|less than) (?=[-$\\0-9])"
)
_SECOND_BOUND = re.compile(
    r"\b([a-z]) (\\[gl]e|[<>]) ([^\s,]{1,20}) (?:but|and)(?: is)? "
    r"(at least|at most|greater than|less than) (?=[-$\\0-9])"
)
_PARAMETER = re.compile(
    r",? (?:where|for|with) \$?([a-z])\$? (?:is|being) (?:an?|any) (?:arbitrary )?(integer|real number)\b"
)
_BELOW_ZERO = re.compile(
    r"(?<![0-9.,-])([0-9]{1,9}(?:\.[0-9]{1,9})?\$?(?:\^\{?\\circ\}?|\\degree)?\$?[ ~]?(?:\\text\{ ?)?"
    r"(?:degrees?|\u00b0 ?[CF]?|[CF]\b)?[$}]{0,2}(?: (?:Celsius|Fahrenheit))?) below zero\b"
)
_CALCULATED = re.compile(r"<<[^<>\n]{1,80}>>")
_TOMBSTONE = re.compile(r"(?:\$?\\(?:blacksquare|square|qed)\$?|QED)[.\s]{0,9}\Z")
_COMPARISONS = {"greater than or equal to": r"\ge", "at least": r"\ge", "less than or equal to": r"\le",
                "at most": r"\le", "greater than": ">", "less than": "<"}  # fmt: skip
_ROWS = re.compile(
    r"\b(?:the |a )?matrix (?:with|whose) (?:the )?(?:rows |(?:first|top) row (?:is )?)"
    r"(\([^()\n]{1,60}\)(?:,? (?:and )?(?:[a-z]{5,6} row (?:is )?)?\([^()\n]{1,60}\)){1,5})"
)
_BOUNDARY = r"\$?[-\u2212]?(?:[0-9][0-9./]*[0-9]|[0-9]|\\?[a-z]+(?:\{[^{}]{1,9}\}){0,2})\$?"
_INTERVAL = re.compile(
    rf"\b(?P<kind>closed|open) interval (?:from|between) (?P<low1>{_BOUNDARY}) (?:to|and) (?P<high1>{_BOUNDARY})"
    rf"(?: inclusive)?|(?:(?<=numbers )|(?<=values )|(?<=reals )|(?<=[a-z] is )|(?<=[a-z]\$ is )|(?<=lies )"
    rf"|(?<=must be ))(?P<strictly>strictly )?(?:from|between) (?P<low2>{_BOUNDARY}) (?:to|and) "
    rf"(?P<high2>{_BOUNDARY}),?"
    r"(?(strictly)| \(?inclusive(?:ly)?\)?)",
    flags=re.IGNORECASE,
)
_SYMBOLS = re.compile("[\u220e\u25a0\u25a1\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")
_REALS = re.compile(
    r"(?<!for )\b(?:all|any|every) (?:the )?((?:non-?)?(?:posi|nega)tive )?real(?: numbers?| values?|s\b)?"
    r"(?: \$?x\$?)?(?![a-z])",
    flags=re.IGNORECASE,
)
_SIGNS = {"positive": ">", "negative": "<", "nonnegative": r"\ge", "nonpositive": r"\le"}
_PROSE = re.compile(r"(?<![\\A-Za-z{])(?!sqrt|sin|cos|tan|log|text|frac|exp)[A-Za-z]{3,}|[-+=/,(\s]\Z")


def plain_text(text: str) -> str:
    r"""The text in plain notation.

    Example: plain_text("所以答案是５。") == "so answer is 5."; plain_text("it costs $5 or <b>$7</b>") has `\$5 or \$7`.
    """
    text = re.sub("(?<=[0-9])[\u2009\u202f\u00a0](?=[0-9]{3}(?![0-9]))", r"\\,", text.translate(WIDE))
    if not text.isascii():
        text = _HEADED.sub(r"\1: ", text).replace("\u3010", "(").replace("\u3011", ")")
        text = _SUBSCRIPTS.sub(lambda digits: "_{" + "".join(chr(ord(one) - 0x2050) for one in digits[0]) + "}", text)
        text = _SPACED.sub(lambda number: number[0].replace(" ", ""), text)
    text = _RUPEES.sub("INR ", text).replace("/-", "") if "Rs" in text else text
    text = _QUOTED.sub("", text) if "\n> " in text else text
    text = (
        _ANSWER_TAGS.sub(lambda tag: f"<{tag[1] or tag[2] or ''}answer>", text)
        if "</" in text or "[/" in text
        else text
    )
    text = _AGAIN.sub(r"\1\\overline{\2}", text) if "..." in text or "\u2026" in text or "dots" in text else text
    text = _STRUCK.sub(" ", text) if "~~" in text or "</" in text or r"\s" in text else text
    text = text.replace(" as well as ", " and ")
    if " integer" in text or " real number" in text:
        text = _PARAMETER.sub(
            lambda words: rf", ${words[1]} \in \mathbb{{{words[2][0].upper().replace('I', 'Z')}}}$", text
        )
    text = _BELOW_ZERO.sub(r"-\1", text) if "below zero" in text else text
    text = re.sub("\u96f6\u4e0b(?=[ $]{0,2}[0-9])", "-", text) if "\u96f6\u4e0b" in text else text
    text = _CALCULATED.sub("", text) if "<<" in text else text
    text = _TOMBSTONE.sub("", text)
    text = _HTML_FRACTION.sub(r" \\frac{\1}{\2}", text) if "</s" in text else text
    text = _SCRIPTS.sub(lambda tag: f"{'^' if tag[1] == 'p' else '_'}{{{tag[2]}}}", text) if "<su" in text else text
    text = _ENTITIES.sub(lambda entity: _CHARACTERS[entity[1]], text)
    text = re.sub(
        r"\\(begin|end)\{(?:equation|displaymath|multline)\*?\}",
        lambda place: r"\[" if place[1] == "begin" else r"\]",
        text,
    )
    text = re.sub(r"\b(sq|cu)\. (?=[a-z])", r"\1 ", text)
    text = _EMPHASIS.sub("", _SYMBOLS.sub("", _FENCE.sub("", _TAGS.sub(" ", text))))
    text = re.sub(r"\$\\mathbb\{R\}\$ \$(?=\\[gl]e|[<>\u2264\u2265])", "$x ", _REALS.sub(_reals, text))
    text = text.replace("$\\mathbb{R}$ that are ", "$\\mathbb{R}$ ").replace("$ not equal to ", "$ except ")
    text = text.replace(r"\text{$\mathbb{R}$", r"$\mathbb{R}$\text{").replace(r"\text{}", "")
    if "nclusive" in text or "interval " in text or "strictly between" in text:
        text = _INTERVAL.sub(_interval, text)
    if "at least" in text or "at most" in text or " than " in text:
        text = _COMPARED.sub(lambda words: f"x {_COMPARISONS[words[1]]} ", text)
        text = _BOUND.sub(lambda words: f"{words[1] or words[2]} {_COMPARISONS[words[3]]} ", text)
        text = _SECOND_BOUND.sub(
            lambda words: f"{words[1]} {words[2]} {words[3]} and {words[1]} {_COMPARISONS[words[4]]} ", text
        )
    text = _ROWS.sub(_matrix, text) if "matrix wi" in text or "matrix wh" in text else text
    text = with_numbers(text)
    if is_chinese(text):
        text = in_english(text)
    if "$" in text:
        text = "\n".join(map(_with_amounts, text.split("\n")))
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def _reals(words: re.Match[str]) -> str:
    """`x \\ge 0` for all nonnegative real numbers."""
    if not words[1]:
        return r"$\mathbb{R}$"
    kind = words[1].strip().lower().replace("-", "")
    return f"$x {_SIGNS[kind]} 0$"


def _interval(words: re.Match[str]) -> str:
    """`[2, 7]` for "between 2 and 7 inclusive"."""
    low, high = (bound.strip("$") for bound in (words["low1"] or words["low2"], words["high1"] or words["high2"]))
    is_open = words["strictly"] or (words["kind"] or "").lower() == "open"
    return f"$({low}, {high})$" if is_open else f"$[{low}, {high}]$"


def _matrix(rows: re.Match[str]) -> str:
    return pmatrix(row.replace(",", "&") for row in re.findall(r"\(([^()]*)\)", rows[1]))


def _with_amounts(line: str) -> str:
    r"""The line with `\$` for each `$` that precedes an amount of money and does not delimit a formula."""
    parts = re.split(r"(?<!\\)\$", line)
    pieces, i = [parts[0]], 1
    while i < len(parts):
        is_last = i == len(parts) - 1
        is_amount = re.match(r" ?[0-9.]", parts[i]) is not None
        if is_amount and (is_last or (_PROSE.search(parts[i]) and re.match(r"[0-9]|\.[0-9]", parts[i + 1]))):
            pieces.append("\\$" + parts[i])
            i += 1
        else:
            pieces.append("$" + parts[i] if is_last else f"${parts[i]}${parts[i + 1]}")
            i += 2
    return "".join(pieces)
