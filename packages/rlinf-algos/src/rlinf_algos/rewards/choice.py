r"""Reads the letter chosen in a multiple-choice question, as in GPQA and MMLU; the last one that is *stated* counts.

Bold type, LaTeX and wide characters are removed from the text after the last `</think>`. Then these state a letter:
- a box, also `\boxed{\text{(B) 4 m}}`, a pair of `<answer>` tags, a line after `####`;
- "the answer is B", "Answer: (B)", "the correct option is therefore B", on one line or with the letter below;
- "option B is correct", "only B is right", "I choose B", "so it is B", "the answer is 4 m (option B)";
- the first or last line, if it is the letter alone or with the text of its choice, and not part of a list of choices.

"This matches option B" counts only if nothing else states a letter. A mention ("option A is wrong") states nothing, nor
does a question, an assumption ("if the answer were A") or a doubt ("I do not think that the answer is A"). Two letters
at once ("A or B") state no single answer. A small letter counts in brackets, in a box or at the end of a line. Letters
beyond the number of choices do not count.

Unlike simple-evals, which takes the first "Answer: X", this takes the last statement.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from rlinf_algos.errors import RewardError
from rlinf_algos.ranges import check_range
from rlinf_algos.rewards.base import RewardResult

MAX_CHOICES = 26
MAX_NESTED = 4
"""Maximum depth of nested LaTeX commands that are unwrapped."""
MAX_LOOK = 300
"""Number of characters around a statement that are searched for words that retract it."""

_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathbb|boldsymbol|bm|rm|bf)\s*\{([^{}]*)\}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|<answer>([^<]{0,500})</answer>")
_MARKUP = re.compile(r"\*+|__+|`+\w*|\$+|\\[()\[\]]|\\[,;!]|\\displaystyle\b")

_LETTER = (
    r"(?P<open>[(\[{<\"'\u201c\u2018]{0,3})(?P<letter>[A-Za-z])(?P<close>[)\]}>\"'\u201d\u2019]{0,3})"
    r"(?!\w|['\u2019-]\w|\.\d|\s*[=<>+*^\u2248\u2260\u2264\u2265])"
)
_NAMED = r"(?i:(?:the\s+)?(?:answer|option|choice|letter|alternative|one)\s*:?\s+)?"
_ADVERBS = (
    r"(?i:(?:therefore|thus|hence|then|clearly|indeed|likely|most|actually|definitely|simply|obviously|now|just),?\s+)*"
)
_NOT_BUT = r"(?i:not\s+\(?[A-Z]\)?,?\s+but\s+(?:rather\s+)?)?"
_ANSWER = r"(?i:\b(?:answer|option|choice|letter|alternative|pick|one)s?\b|\u7b54\u6848)"
_OF = r"(?i:\s+(?:to|of|for|from|among|amongst|in|here|choice|option|letter|that|which)\b[^.:\n]{0,60}?)?"
_IS = (
    r"(?:(?i:\s+(?:is|was|be|would\s+be|must\s+be|should\s+be|has\s+to\s+be)\b|\s*\u662f)\s*:?\s*"
    r"|\s*(?::|=+>?|[-\u2013\u2014\u2192]+>?)\s*|[ \t]*\n\s*|\s+(?=[(\[]?[A-Z][)\]]?[.!]?\s*$))"
)
_STRONG = (
    _ANSWER + _OF + _IS + _ADVERBS + _NOT_BUT + _NAMED + _LETTER,
    r"(?i:\b(?:answer|choice|option)\s+is)\s[^.\n()]{1,80}\((?i:option|choice|answer)?\s*"
    + r"(?P<letter>[A-Z])\)(?=[.!\s]*$)",
    r"(?i:\banswer\s+is)\s[^.\n\"]{1,60},\s*(?P<open>[(\"])(?P<letter>[A-Z])(?P<close>[)\"])",
    r"\b(?i:(?:option|choice|answer|alternative)\s+)?(?<![\w'])"
    + _LETTER
    + r"\s+(?i:is\s+(?:therefore\s+|thus\s+|clearly\s+)?(?:the\s+)?(?:only\s+)?(?:correct|right|best|answer)\b)",
    r"(?i:\b(?:I|we)(?:\s+would|\s+will|'d|'ll|\s+should)?(?:\s+therefore|\s+thus)?\s+"
    r"(?:choose|pick|select|answer|go\s+(?:with|for))|^\s*(?:choose|pick|select))\s*:?\s+" + _NAMED + _LETTER,
    r"(?i:\b(?:so|thus|therefore|hence|but|no|wait|think|believe|say)\b,?\s+(?:that\s+)?it(?:\s+is|'s|\s+must\s+be|"
    r"\s+has\s+to\s+be|\s+should\s+be)\s+)" + _NAMED + _LETTER + r"(?=\s*(?:[.,;!]|$))",
    r"(?:^|(?<=[.!]\s))(?i:so|thus|therefore|hence),?\s+" + _NAMED + _LETTER + r"(?=(?:\s+it\s+is)?[.!]?\s*$)",
    r"####\s*" + _NAMED + _LETTER,
)
_WEAK = (
    r"(?i:\b(?:correspond(?:s|ing)\s+to|match(?:es|ing)|equals|leads\s+to|points\s+to|agrees\s+with)\s+"
    r"(?:(?:the\s+)?(?:option|choice|answer)\s+)?)" + _LETTER,
)
_STATEMENTS = tuple((re.compile(pattern, flags=re.MULTILINE), True) for pattern in _STRONG) + tuple(
    (re.compile(pattern, flags=re.MULTILINE), False) for pattern in _WEAK
)
_IN_A_BOX = re.compile(r"\s*" + _NAMED + _LETTER + r"(?:\s*$|\s*[.):,\u2013-]|\s+[A-Za-z0-9\\(]|\s*[&/])")
_LINE = re.compile(r"^[\s>#-]*" + _NAMED + _LETTER + r"(?:[.:)]*\s*$|(?:(?<=[)\]])|[.:])\s+\S)")
_MORE = re.compile(
    r"\s*(?:(?:or|and|&|/)\s*(?:(?i:option|choice)\s+)?[(\[\"']*[A-Z](?![\w'])|,\s*[(\[\"']*[A-Z][)\]\"']*\s*(?:[,.;/&]|and\b|or\b|$))"
    r"(?!\s+(?:is|are|was|has|have|can|cannot|can't|could|does|do|would|isn't|fails?|gives?|says?)\b)"
)
_SAYS_ON = re.compile(r"\s+(?!(?:because|since|as|and|or|for|with|is|due|by|from|over|not|but|if)\b)[a-z]")
_NO_STATEMENT = re.compile(
    r"\b(?:if|whether|suppose|supposing|assum\w+|unless|although|though|while|neither|either|nor)\b"
    r"|(?:n't|\bnot|\bnever|\bcannot)\s+(?:\w+\s+)?(?:think|believe|say|mean|true|claim|imply)\b(?!.*\bbut\b)"
    r"|\b(?:wrong|incorrect|false|tempting|bad|worst|distracting|eliminated|other|remaining)\s*$"
    r"|(?<![\w'])[(]?[A-Z][)]?,?\s*(?:or|and|nor|,)\s*$",
    flags=re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statement:
    start: int
    letter: str | None
    """The letter that the statement names; None if it names several."""
    is_strong: bool


class MultipleChoice:
    """`multiple_choice` for questions with a known number of choices.

    Args:
        num_choices: number of valid letters, from A on.
    """

    def __init__(self, *, num_choices: int = MAX_CHOICES) -> None:
        check_range("num_choices", num_choices, low=2, high=MAX_CHOICES, why="the choices are letters")
        self._num_choices = num_choices

    def __call__(self, completion: str, reference: str) -> RewardResult:
        """Like `multiple_choice`, with this number of choices."""
        expected = stated_letter(reference.strip(), self._num_choices)
        if expected is None:
            last = chr(ord("A") + self._num_choices - 1)
            raise RewardError(
                f"multiple_choice: the reference {reference[-80:]!r} is not a letter from A to {last}; fix the row"
            )
        letter = stated_letter(completion, self._num_choices)
        if letter is None:
            return RewardResult(value=0.0, outcome="unparseable")
        is_right = letter == expected
        return RewardResult(value=float(is_right), outcome="right" if is_right else "wrong", answer=letter)


_ANY_NUMBER = MultipleChoice()


def multiple_choice(completion: str, reference: str) -> RewardResult:
    """1.0 if the last stated letter is that of the reference.

    Args:
        completion: any text; if it states no letter, the outcome is "unparseable".
        reference: a letter, bare or in any form that `stated_letter` reads.

    Raises:
        RewardError: the reference states no letter.
    """
    return _ANY_NUMBER(completion, reference)


def stated_letter(text: str, num_choices: int = MAX_CHOICES) -> str | None:
    """The last letter stated as the answer, as a capital; None if no choice is stated.

    Example: stated_letter("First I took A. The answer is (C), for option D is too large.") == "C".
    """
    plain = _plain(text.rpartition("</think>")[2])
    letters = {chr(ord("A") + i) for i in range(num_choices)}
    statements = [
        one for one in (*_statements(plain), *_on_edge_lines(plain)) if one.letter is None or one.letter in letters
    ]
    best = [one for one in statements if one.is_strong] or statements
    return max(best, key=lambda one: one.start).letter if best else None


def _plain(text: str) -> str:
    r"""The text without bold type and LaTeX. A box becomes a line `Answer: content`.

    Example: _plain(r"so **it** is \boxed{\text{B}}") == "so it is \nAnswer: B\n"
    """
    if (
        not text.isascii()
    ):  # normalization sorts combining marks pair by pair, which takes quadratic time for a long run
        text = "".join(letter for letter in text if not unicodedata.combining(letter))
    text = unicodedata.normalize("NFKC", text)
    for _ in range(MAX_NESTED):
        text = _COMMAND.sub(r"\1", text)
    # Short runs of white space keep every pattern's time in proportion to the text's length.
    return re.sub(
        r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", re.sub(r"[^\S\n]+", " ", _MARKUP.sub("", _BOX.sub(_boxed, text))))
    )


def _boxed(box: re.Match[str]) -> str:
    """A box becomes a statement only if it contains a letter."""
    content = _MARKUP.sub("", box[1] or box[2] or "").strip()
    match = _IN_A_BOX.match(content)
    if match is None:
        return content
    end = match.end("close")
    several = _MORE.match(content, end)
    return f"\nAnswer: {match['letter'].upper()}{several[0] if several else ''}\n"


def _statements(text: str) -> Iterator[_Statement]:
    """Statements in words."""
    for pattern, is_strong in _STATEMENTS:
        for match in pattern.finditer(text):
            if _is_letter(match, text) and not _is_taken_back(match, text) and not _is_listed(match, text):
                several = _MORE.match(text, match.end())
                letter = None if several else match["letter"].upper()
                yield _Statement(start=match.start("letter"), letter=letter, is_strong=is_strong)


def _is_listed(match: re.Match[str], text: str) -> bool:
    """Whether the letter is an item in a list of choices: the next line begins with the next letter."""
    following = chr(ord(match["letter"]) + 1)
    rest = text[match.end("letter") : match.end("letter") + MAX_LOOK]
    return re.match(rf"[.:)\]][^\n]*\n\s*[(\[]?{re.escape(following)}[.:)\]]", rest) is not None


def _on_edge_lines(text: str) -> Iterator[_Statement]:
    """The first and the last line, if it begins with a letter and the line beside it does not."""
    lines = [(match.start(), match[0]) for match in re.finditer(r"^.*\S.*$", text, flags=re.MULTILINE)]
    for index, neighbour in ((0, 1), (-1, -2)) if lines else ():
        start, line = lines[index]
        match = _LINE.match(line)
        is_listed = len(lines) > 1 and _LINE.match(lines[neighbour][1])
        if match and not is_listed and _is_letter(match, line) and not _MORE.match(line, match.end("close")):
            yield _Statement(start=start + match.start("letter"), letter=match["letter"].upper(), is_strong=True)


def _is_letter(match: re.Match[str], text: str) -> bool:
    """Whether the match is a letter and not a word: `a` and `A` may be articles, `I` a pronoun."""
    named = match.groupdict()
    is_bracketed = bool(named.get("open") and named.get("close")) or "open" not in named
    rest = text[match.end("letter") : match.end("letter") + MAX_LOOK]
    if match["letter"].islower():
        return is_bracketed or re.match(r"[.,;!)]?\s*(?:\n|$)", rest) is not None
    return is_bracketed or match["letter"] not in "AI" or _SAYS_ON.match(rest) is None


def _is_taken_back(match: re.Match[str], text: str) -> bool:
    """Whether the match is in a question, an assumption, a doubt or a condition."""
    sentence = re.split(r"[.!?\n]", text[max(0, match.start() - MAX_LOOK) : match.start()])[-1]
    after = re.match(r"[^.!?\n]*[.!?\n]?", text[match.end() : match.end() + MAX_LOOK])
    assert after is not None, "the pattern also matches an empty text"
    is_unreal = re.search(r"\b(?:would|could|might)\b", match[0])
    is_condition = is_unreal and re.search(r"\b(?:if|had|were)\b", sentence + " " + after[0], flags=re.IGNORECASE)
    clause = re.split(r"[,;:]", sentence)[-1]
    return bool(_NO_STATEMENT.search(clause) or after[0].endswith("?") or is_condition)
