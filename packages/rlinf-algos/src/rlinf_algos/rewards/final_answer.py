r"""Finds the answer in a worked solution with a small grammar of statements; the last statement counts.

Only the text after the last `</think>` is read; a `<think>` that never ends contains no answer. The text is first
converted to plain notation (`plain_text`). A statement is one of
- `<answer> ... </answer>`: the last one is searched, and is itself the answer if it contains no other statement;
- a box (`boxes`). Boxes with only a comma, "and" or "or", and a name such as `x=`, between them are one list;
- the rest of the line after `####` (GSM8K), unless it is a heading in words with text below it;
- what follows "answer is", "answer:", "answer =", "correct option is" or "choose", up to the end of the sentence. If
  nothing follows on that line, or the line is a heading "Answer", the next line.

A statement in words ("the answer is reasonable") does not replace an earlier one in numbers or formulas, unless the
expected answer is in words. Text without a statement is searched for its conclusion (`conclusion`).

If a later sentence withdraws the statement ("Edit: ...", "I made a mistake", "that's wrong"), what is stated or
concluded after that sentence counts. Struck-out text does not count (`plain_text`).

A reference (`reference_answer`) is used as a whole unless it is boxed, follows `####` or is in `<answer>`.

Only searches for single tokens cover the whole text; everything else reads at most `MAX_STATEMENTS` pieces of at most
`MAX_LENGTH` characters. So the time is linear in the length of any text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_algos.rewards.assignments import assigned, listed
from rlinf_algos.rewards.boxes import BoxSpan, boxes, unwrapped
from rlinf_algos.rewards.chinese import without_asides
from rlinf_algos.rewards.clauses import statement
from rlinf_algos.rewards.conclusion import concluded, conclusion, last_sentence
from rlinf_algos.rewards.number_words import with_final_number, with_lone_numbers
from rlinf_algos.rewards.plain_text import plain_text
from rlinf_algos.rewards.predicates import predicate
from rlinf_algos.rewards.quantities import cleaned, is_formal, without_filler, words_of
from rlinf_algos.rewards.units import is_unit

_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s?\{\s?\}")
_NAME = r"(?:(?:[A-Za-z](?:_\{?[0-9A-Za-z]\}?)?|\([a-z](?:, ?[a-z]){1,3}\)) ?=|\\[()\[\]]|[$\s])*"
_BETWEEN_BOXES = re.compile(rf"(?:\\[\])]|[$\s])*(,?\s*\b(?:and|or)\b|\\text\{{ ?(?:and|or) ?\}}|[,;]){_NAME}")
_OR_AFTER_BOX = re.compile(r"(?:\\[\])]|[$ ])*,? ?or\b ?(?:maybe|perhaps|possibly|even)? ?([^\n]{1,200})")
_UNIT_AFTER_BOX = re.compile(
    r"(?:\\[\])]|\$)?(?:\\[,;: ]|~)?[ \n]?\(?(?:\\(?:text|mathrm)\{ ?)?(?:whole |full )?"
    r"((?:square |cubic )?([A-Za-z]{1,15})\b(?:\^[23]|/[a-z]{1,6}\b| per [a-z]{1,10}\b)?)"
    r"(?=\}|\)|[ ]?[.,;]|\s*\Z|\s?\n| [a-z])"
)
_PLAIN = re.compile(r"-?[0-9][0-9.,/]*|-?\\d?frac\{[0-9]+\}\{[0-9]+\}")
_PHRASE = re.compile(
    r"\bans(?:wers?)?\b(?! (?:choices|options)\b)(?:[^\n.:=$\\]|\$[^$\n]{1,40}\$){0,60}?"
    r"(?:\b(?:is|are)\b|:|=>?|->|\u2192)"
    r"|\bcorrect (?:option|choice|letter|statement)s?\b[^\n.:=]{0,40}?(?:\b(?:is|are)\b|:|=)"
    r"|\b(?:choose|select)\b:?(?=[ (]{0,3}(?-i:[A-Z]{1,4})\b)|\b(?:option|choice)\b:?(?= \(?[A-J]\)?[.!]?$)"
    r"|^[#*_ ]{0,20}(?:final )?answers?[*_ ]{0,20}$",
    flags=re.IGNORECASE | re.MULTILINE,
)
_QUESTION = re.compile(r"[^.!?\n]{1,80}\?")
_LABEL = re.compile(r"\\text(?:bf)?\{ ?((?:[Tt]he |[Ff]inal )*[Aa]nswer(?: is)?:?) ?\}")
_HEADING = re.compile(r"\s?(?:[0-9]+[.):]\s)?[A-Za-z]{3,}")
_MARKUP = re.compile(r"[\s*:=]*(?:_(?=\s))?")
_LINE_END = re.compile(r"[ *:=]*(?:\n|\Z)")
_DISPLAY = re.compile(r"\$\$(.{1,2000}?)\$\$|\\\[(.{1,2000}?)\\\]", flags=re.DOTALL)
_EMPTY_WORDS = frozenset(
    ("correct", "right", "wrong", "incorrect", "reasonable", "in", "as", "below", "above", "shown", "helpful", "not")
)
_ONE_FORMULA = re.compile(r"\$([^$\\]*(?:\\[^$][^$\\]*)*)\$|\\\(((?:(?!\\[()]).)*)\\\)", flags=re.DOTALL)
_SENTENCE = re.compile(r"(?:The|It|This|That|Its|that) [a-z]")
_TEXT = re.compile(r"\\text(?:bf|rm|it)?\{([^{}]*)\}")
_SEVERAL = re.compile(r",|\b(?:and|or)\b|&|\\pm")
_NEXT_KEY = re.compile(r',\s?"\w{1,20}" ?:')
_KEY = re.compile(r'"([A-Za-z](?:_?[0-9])?)" ?: ?')
_SHORT_VALUE = r"[-$\\]{0,3}[0-9][^\s,]{0,15}(?: [a-z]{1,12})?"
_WITHDRAWN = re.compile(
    r"(?:^|(?<=[.!?] ))\W{0,9}(?:edit|correction|corrected|erratum|update)\b ?:"
    r"|(?:^|(?<=[.!?] ))\W{0,9}(?:wait|actually|hold on|oops|hmm)\b"
    r"(?=[^\n]{0,200}\b(?:is|are|should be|it's|so|gives)\b[^\n]{0,30}[0-9])"
    r"(?![^\n]{0,300}\b(?:check\w*|correct|right|still|same|confirm\w*|yes|fine|match\w*|verif\w*)\b)"
    rf"|\b(?:it|answer|result|total|value|this|that|we|I)(?:'s| is| was| do| did| does)?(?: not|n't)"
    rf"(?: be| get| have| equal)? {_SHORT_VALUE}(?: but (?:rather )?|, ?(?:but|it's|it is|it should be|rather) )"
    r"(?=[-$\\]{0,3}[0-9])|\b(?:it|answer|result) should (?:actually |instead |really )?be (?=[-$\\]{0,3}[0-9])"
    r"|(?<=[}$]) is (?:wrong|incorrect|not (?:correct|right))\b"
    r"|\bI meant (?=[-$\\]{0,3}[0-9])"
    r"|\b(?:(?<!if )(?:I|we) (?:misread|miscalculated|misunderstood|forgot|overlooked"
    r"|miscounted|made an? (?:[a-z]+ )?(?:mistake|error|slip))"
    r"|scratch that|never ?mind|I take that back|on second thoughts?"
    r"|that(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct)))\b",
    flags=re.IGNORECASE | re.MULTILINE,
)
_FOR_NATURALS = re.compile(
    r"\A(\$?[a-zA-Z]_\{?n\}? ?=.{1,200}?\$?)(?:\\[ ,;]|\\q?quad|[\s,$])*"
    r"\(\s?\$?n ?\\in ?\\math(?:bf|bb) ?\{? ?N ?\}?(?:[\^_]\{?[*+]\}?)?\$?\s?\)\$?\Z"
)
"""The term of a sequence with the domain of its index, `a_n=2n\\ (n\\in\\mathbb{N}^*)`."""
_ANGLE_NAME = re.compile(r"\bm ?(?:\u2220|\\angle\b) ?([A-Z]{1,3}) ?=")
_OTHER_THINGS = re.compile(r"\A[0-9][0-9.,]{0,9} ([a-z]{3,20}) or [0-9][0-9.,]{0,9} ([a-z]{3,20})\Z")
"""A hedge between two things, "12 hens or 8 cows"."""
_ALSO_POSSIBLE = re.compile(
    r"\b(?:it|answer|this|that|result) (?:could|might|may)(?: also| well| equally)+ be [-$\\]{0,3}[0-9]"
    r"|[0-9]\$? (?:is|would be) (?:also|equally) (?:possible|plausible)"
)
_OPINION = re.compile(r"\b(?:thinks?|says|said|claims?|claimed|believes?|guess(?:es)?)(?: that)?(?: the)? \Z")
MAX_STATEMENTS = 20
"""Maximum number of statements of each kind that are examined, from the end."""
MAX_LENGTH = 2000
"""Number of characters of a line, or of the end of a text, that are read. No answer is that long."""
_TAIL = 4000
"""Number of characters at the end of a text that are searched for the conclusion."""


@dataclass(frozen=True, slots=True)
class _Statement:
    start: int
    text: str
    is_formal: bool
    """Whether the answer is in numbers or formulas, not in words."""


def final_answer(text: str, *, in_words: bool = False, names: Sequence[str] = ()) -> str | None:
    r"""The answer of a solution by the rules above, stripped of white space; None if there is none.

    Args:
        in_words: the expected answer is in words, such as "odd" or "no solution".
        names: the names of the expected values if there are several; "-" for each without a name.

    Example: final_answer(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"; final_answer("6 * 3 = 18\n#### 18") == "18".
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    text = text if names else without_asides(text)
    text = _EMPTY_BOX.sub("", plain_text(text))
    text = _LABEL.sub(r"\1 ", text) if r"nswer" in text and r"\text" in text else text
    inner = _in_answer_tag(text)
    if inner is not None:
        answer = _stated(inner, in_words) or cleaned(inner[: MAX_LENGTH + 1])
    else:
        boxed = boxes(text)
        last = _last_statement(text, in_words, boxed)
        if last and _ALSO_POSSIBLE.search(text, last.start, last.start + MAX_LENGTH):
            return None
        answer = last and (_corrected(text[last.start :], in_words) or last.text)
        answer = answer or _concluded(text[-_TAIL:], in_words) or ""
        is_by_thing = any(len(name) > 2 and name.isalpha() for name in names)
        if names and not boxed and (is_by_thing or ":" in answer or " is " in answer or not _SEVERAL.search(answer)):
            rest = text[last.start :] if last else text
            answer = assigned(rest, names) or (not last and listed(last_sentence(text[-_TAIL:]), len(names))) or answer
    answer = _ANGLE_NAME.sub(r"\1 =", answer).replace(" and then ", " and ") if names else answer
    things = _OTHER_THINGS.search(answer)
    if things and things[1].rstrip("s") != things[2].rstrip("s"):
        return None
    if in_words:
        whole = _TEXT.fullmatch(answer)
        answer = whole[1].strip() if whole else answer
        answer = (predicate(answer.removeprefix("that ")) if _SENTENCE.match(answer) else None) or answer
    answer = _FOR_NATURALS.sub(r"\1", answer) if r"\in" in answer else answer
    formula = _ONE_FORMULA.fullmatch(answer)
    answer = (formula[1] or formula[2] or "") if formula else answer
    if answer.startswith('{"'):
        answer = _KEY.sub(r"\1=", answer).strip("{} ")
    return answer.strip() or None


def stated_answer(text: str) -> str | None:
    """Like `final_answer` for a text in plain notation, but reads statements only, no conclusions and no markers."""
    return _stated(text, in_words=False, with_markers=False)


def reference_answer(text: str) -> str | None:
    r"""The answer in a dataset row: what is boxed, follows `####` or is in `<answer>`, otherwise the whole text.

    Example: reference_answer("x is 3 or 4") == "x is 3 or 4"; reference_answer("3 + 4 = 7\n#### 7") == "7".
    """
    text = plain_text(text)
    inner = _in_answer_tag(text)
    text = text if inner is None else inner
    statements = sorted([*_boxed(text, with_others=False), *_markers(text)], key=lambda statement: statement.start)
    return (statements[-1].text if statements else text.strip()) or None


def _in_answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if 0 <= start < end else None


def _concluded(text: str, in_words: bool) -> str | None:
    """The conclusion of a text; if it is in words but should not be, number words are read as digits."""
    text = text[_withdrawal_end(text) :].lstrip(".!,:; ")
    text = text if in_words else with_final_number(text)
    answer = conclusion(text, in_words=in_words)
    if in_words or (answer and is_formal(answer)):
        return answer
    in_digits = with_lone_numbers(text)
    return (conclusion(in_digits) if in_digits != text else None) or answer


def _corrected(text: str, in_words: bool) -> str | None:
    """The answer that a correction after the last statement gives; None if nothing is corrected."""
    last = _withdrawal_end(text)
    if not last:
        return None
    rest = text[last:].lstrip(".!,:; ")
    answer = _stated(rest, in_words) or conclusion(rest[-_TAIL:], in_words=in_words)
    return answer if answer and (in_words or is_formal(answer)) else None


def _withdrawal_end(text: str) -> int:
    return max((withdrawal.end() for withdrawal in _WITHDRAWN.finditer(text)), default=0)


def _stated(text: str, in_words: bool, *, with_markers: bool = True) -> str | None:
    last = _last_statement(text, in_words, boxes(text), with_markers=with_markers)
    return last.text if last else None


def _last_statement(text: str, in_words: bool, boxed: list[BoxSpan], *, with_markers: bool = True) -> _Statement | None:
    statements = [
        *_boxed(text, boxed),
        *_phrases(text, boxed, in_words=in_words),
        *(_markers(text) if with_markers else ()),
    ]
    statements.sort(key=lambda statement: statement.start)
    formal = [statement for statement in statements if statement.is_formal]
    return (statements if in_words else formal or statements)[-1] if statements else None


# -- boxes and markers -----------------------------------------------------------------------------------------------


def _boxed(text: str, boxed: list[BoxSpan] | None = None, *, with_others: bool = True) -> Iterator[_Statement]:
    """The last box, the boxes that are joined to it, and the alternative after a following "or"."""
    last_ones = (boxes(text) if boxed is None else boxed)[-MAX_STATEMENTS:]
    if not last_ones:
        return
    last = last_ones[-1]
    start, answer = last.start, unwrapped(last.content(text))
    unit = _UNIT_AFTER_BOX.match(text, last.end) if _PLAIN.fullmatch(answer) else None
    if unit and is_unit(unit[2]) and unit[2] != "in":
        answer = f"{answer} {unit[1]}"
    for box in reversed(last_ones[:-1]):
        between = _BETWEEN_BOXES.fullmatch(text, box.end, min(start, box.end + 100))
        if between is None or box.end + 100 < start:
            break
        joint = " or " if "or" in between[1] else ", "
        start, answer = box.start, f"{unwrapped(box.content(text))[:MAX_LENGTH]}{joint}{answer}"
    other = _OR_AFTER_BOX.match(text, last.end) if with_others else None
    added = statement(other[1]) if other else ""
    yield _Statement(start, f"{answer} or {added}" if is_formal(added) else answer, is_formal=True)


def _markers(text: str) -> Iterator[_Statement]:
    end = len(text)
    for _ in range(MAX_STATEMENTS):
        start = text.rfind("####", 0, end)
        if start < 0:
            return
        line = text[start + 4 : start + 4 + MAX_LENGTH].partition("\n")[0]
        answer = cleaned(line)
        is_answer = not _HEADING.match(answer)
        if answer and (is_answer or len(text.rstrip()) <= start + 4 + len(line)):
            yield _Statement(start, answer, is_answer)
        end = start


# -- phrases ---------------------------------------------------------------------------------------------------------


def _phrases(text: str, boxed: list[BoxSpan], *, in_words: bool) -> Iterator[_Statement]:
    for phrase in list(_PHRASE.finditer(text))[-MAX_STATEMENTS:]:
        if _QUESTION.match(text, phrase.end()) or _OPINION.search(text[max(0, phrase.start() - 30) : phrase.start()]):
            continue
        if any(box.start < phrase.start() < box.end for box in boxed[-MAX_STATEMENTS:]):
            continue  # words of a boxed answer
        answer = _after(text, phrase.end())
        if phrase[0].endswith(":") and not in_words and not is_formal(answer):
            answer = concluded(answer) or answer  # a whole sentence
        first = next(words_of(answer), None)
        if answer and not (first and first.start() == 0 and first[0] in _EMPTY_WORDS):
            yield _Statement(phrase.start(), answer, is_formal=is_formal(answer))
        elif first and first[0] == "not":
            yield _Statement(phrase.start(), answer, is_formal=True)


def _after(text: str, start: int) -> str:
    """The answer that a phrase announces: on the same line, or on the next one that is not empty."""
    is_next_line = _LINE_END.match(text, start) is not None
    markup = _MARKUP.match(text, start)
    start = markup.end() if markup else start
    display = _DISPLAY.match(text, start)
    if display:
        inner = display[1] or display[2]
        return next((box.text for box in _boxed(inner)), None) or cleaned(inner)
    line = text[start : start + MAX_LENGTH].partition("\n")[0]
    line = _NEXT_KEY.split(line)[0] if '":' in line else line
    answer = statement(line)
    if is_next_line and not is_formal(answer):
        return concluded(line) or answer
    return answer or without_filler(line)
