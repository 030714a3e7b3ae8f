r"""Selects the sentences at the end of a solution that may state a conclusion.

A sentence that verifies the answer, remarks, repeats the question or mentions a mistake is skipped, so that the one
before it counts. A sentence that leaves the answer open ("it could be 8 or 9", "what is the number of pears?") ends the
search: the solution has no conclusion.
"""

import re
from itertools import pairwise

SENTENCE_END = re.compile(
    r"(?<![.])[.!?](?=\**(?:\s+(?!Or\b)[A-Z*($\\\u4e00-\u9fff]|\s*$))"
    r"|(?<=[a-z0-9$%)])(?<!\A[0-9])(?<!approx)(?<!vs)[.!?](?=\s+[0-9]+(?:\s[a-z]|\.?\Z))"
)
REJECTED = "rejected|extraneous|discarded|invalid"
CLAUSE_END = re.compile(SENTENCE_END.pattern + r"|;(?=\s[a-z]{2})")
_CLOSERS = re.compile(
    r"\A\W*(?:this (?:makes|is (?:correct|right|consistent|the)|confirms|matches|agrees)|check|verif|let me know|i hope"
    r"|hope this|note that|if you|feel free|please|great|good"
    r"|(?:substituting|plugging|putting|inserting) (?:it|this|that|them|these|the values?|[a-z] ?= ?[^ ]{1,12})?"
    r" ?(?:back|into the original))",
    flags=re.IGNORECASE,
)
_REMARK = re.compile(
    r"\((?=[^()]*[A-Za-z]{3})[^()]*\)[.!]?|\([^()]{1,200}[.!]\)|(?:About|Approximately|Roughly) .{1,60}"
    rf"|[^.]{{1,60}} (?:is|are) (?:{REJECTED})[.!]?"
)
"""A remark in brackets, a rounded value after the exact one, or a rejected value."""
_NO_CLAIM = re.compile(
    r"\b(?:mistakes?|misconception|tempting|trap|scratch)\b|\botherwise\b"
    r"|\b(?:students|people|many|some|one|you|we)\s(?:(?:might|may|would|often|first|wrongly|mistakenly)\s)*"
    r"(?:answer|say|think|thought|guess|believe)\b"
    r"|\b(?:do|does|did)(?: not|n't) (?:work|satisfy|hold|fit|solve)|\bif\b[^.]*\bwere\b|\b(?:rule|ruled) out\b"
    r"|\b(?:he|she|[a-z]+) (?:thinks|says|claims|believes|guesses)\b"
    r"|\b(?:impossible|would be wrong|(?:could|might|may)(?: also)? be)\b|\A(?:maybe|perhaps|possibly)\b"
    r"|\b(?:need|want|have|asks?|asked|going) (?:us )?to (?:find|determine|know|figure out)\b"
    r"(?!.*(?:=|\bis [-$\\]{0,2}[0-9]))"
    rf"|\((?:{REJECTED}|impossible)\)\W*\Z",
    flags=re.IGNORECASE,
)
"""Patterns of sentences that are not conclusions."""
_OPEN = re.compile(
    r"\banswer (?:could|might|may)(?: also| well)? be\b|\b(?:I am|I'm) not (?:\w+ )?(?:sure|certain)\b"
    r"|\bI (?:do not|don't|can't|cannot) (?:know|tell|decide|say)\b|\b(?:either|any) of (?:the two|them|these|both)\b"
    r"|\A\W*(?:alternatively|or),? (?:it|the \w+|this|that) (?:could|might|may)(?: also)? be\b"
    r"|\A\W*let(?:'s| us) (?:denote|call|name|consider)\b"
    r"|\A\W*first,? (?:we|let|there|note|I)\b|\A\W*so far\b|\bit depends\b"
    r"|\bdepend(?:s|ing) on (?:how|whether|if|what)\b"
    r"|\b(?:I'd|I would) (?:guess|estimate)\b|\bmy (?:best )?guess\b"
    r"|\A\W*(?:(?:let's|let us) (?:assume|suppose|say|try)|suppose|assume)\b|:\Z"
    r"|\A\W*(?:next|then|now),? (?:we|I|let us|let's) (?:need|have to|must|subtract|add|multiply|divide|calculate"
    r"|compute|find|determine)\b[^0-9=]*\Z"
    r"|\bneed (?:more|further) information\b|\A\W*(?:(?:wait|hmm),? )?(?:maybe|perhaps|possibly)\b(?=.*[0-9])"
    r"|\A\W*(?:(?:so|now|next|then),? )?(?:we|I) (?:need|want|have) to (?:find|determine|know|figure out)\b[^0-9=]*\Z",
    flags=re.IGNORECASE,
)
_OFFER = re.compile(
    r"\b(?:would you|do you|does (?:this|that|it)|did (?:this|that)|can I|shall I|should I|any (?:other )?questions"
    r"|need (?:any )?(?:more )?help|is there any|anything else|make sense)\b|\A\W*right\b",
    flags=re.IGNORECASE,
)
_BUT = re.compile(r"(?:,|;|\s[-\u2013\u2014])\s?but\s")
_VERIFIES = re.compile(
    r"(?:(?<=\A)|(?<=[.!?;\n]\s)|(?<=[.!?;\n]))[ *#_(]{0,9}(?:"
    r"(?:(?:let(?: me|'s| us)|we can|you can|we|I will|I'll|i can|now,?|to|and) ){1,2}(?:also )?"
    r"(?:double[- ]?check|check|verify|confirm)\b"
    r"(?! (?:all|each|every|which|whether|if|how|the (?:options|choices|cases|candidates|possib)))"
    r"|as a (?:quick |sanity |final )?check\b"
    r"|(?:check|verification|verify|checking|proof|double[- ]check)(?: the answer| our answer| this)?"
    r" ?[*_]{0,3}(?::|\n|[*_]{2}))",
    flags=re.IGNORECASE,
)
_NOTE = re.compile(r"(?:(?<=\n)|(?<=[.!] ))[*_(]{0,3}(?:note|remark|n\.b\.|comment)[*_]{0,3}[.:]", flags=re.IGNORECASE)
_EXPLANATION = re.compile(
    r"(?:(?<=\n)|(?<=[.] ))[*_#( ]{0,4}(?:explanation|reason|reasoning|justification|here(?:'s| is) (?:why|how))"
    r"[*_]{0,3}:",
    flags=re.IGNORECASE,
)
_ANSWER_FIRST = re.compile(r"[*_# ]{0,4}[-$\\\u2212]{0,3}[0-9][^\n=]{0,40}\n?", flags=re.IGNORECASE)
"""A text that begins with the bare answer, "42 seats"."""
_CORRECTS = re.compile(r"\b(?:wrong|incorrect|mistakes?|error|actually|instead|answer)\b", flags=re.IGNORECASE)
_CONCLUDES = re.compile(
    r"\b(?:so|therefore|thus|hence|final(?:ly)?|answer|in conclusion|in summary)\b[^.\n]{0,120}[0-9$\\]", re.IGNORECASE
)
_FAILS = re.compile(
    r"\b(?:not|wrong|incorrect|mistakes?|error|instead|actually|fails?|but|however|wait|oops|hmm)\b|n't\b"
    r"|\u2260|\\ne\b|\\neq\b|\u2717|\u2718|\u274c",
    flags=re.IGNORECASE,
)


def without_verification(text: str) -> str:
    """The text up to the verification of its answer, unless that draws a conclusion or fails; also up to a note."""
    note = _first_after_value(_NOTE, text)
    explanation = _EXPLANATION.search(text)
    if (
        note is None
        and explanation
        and (
            _CONCLUDES.search(text[max(0, explanation.start() - 200) : explanation.start()])
            or _ANSWER_FIRST.fullmatch(text[: explanation.start()].strip())
        )
    ):
        note = explanation.start()
    if note is not None and not _CORRECTS.search(text, note):
        text = text[:note].rstrip()
    start = _first_after_value(_VERIFIES, text)
    if start is None:
        return text
    check = text[start:]
    holds = re.sub(
        r"\b(?:so|thus|hence|therefore)\b[^.\n]{0,80}(?:=|equal|agree|match|check|correct|hold|true)", "", check
    )
    return text if _FAILS.search(check) or _CONCLUDES.search(holds) else text[:start].rstrip()


def _first_after_value(pattern: re.Pattern[str], text: str) -> int | None:
    """The position of the first match after a number or a formula."""
    value = re.search(r"[0-9$\\]", text)
    return next((match.start() for match in pattern.finditer(text) if value and value.end() <= match.start()), None)


def leaves_open(sentence: str) -> bool:
    """Whether a sentence says that the answer may be different, or asks for it."""
    if sentence.endswith("?"):
        return _OFFER.search(sentence) is None and len(sentence) > 1
    return _OPEN.search(sentence) is not None


def claims_of(line: str, *, in_words: bool) -> list[str]:
    """The sentences of a line without closing words and remarks."""
    sentences = [one for one in split(line, SENTENCE_END if in_words else CLAUSE_END) if not _CLOSERS.match(one)]
    return [one for one in sentences if not _REMARK.fullmatch(one)] or sentences


def claim_of(sentence: str, *, in_words: bool) -> str | None:
    """The part of a sentence that may be a conclusion; None if there is none."""
    if not _NO_CLAIM.search(sentence) or (in_words and "impossible" in sentence):
        return sentence
    *_, part = _BUT.split(sentence)
    return None if part == sentence or _NO_CLAIM.search(part) else part


def split(line: str, pattern: re.Pattern[str]) -> list[str]:
    ends = [end.end() for end in pattern.finditer(line) if is_outside(line, end.start())]
    pieces = [line[start:end] for start, end in pairwise([0, *ends, len(line)])]
    return [piece.strip() for piece in pieces if piece.strip()]


def is_outside(line: str, place: int) -> bool:
    """Whether a position in a line is outside formulas."""
    num_before = len(re.findall(r"(?<!\\)\$", line[:place]))
    return num_before % 2 == 0 or len(re.findall(r"(?<!\\)\$", line)) % 2 == 1
