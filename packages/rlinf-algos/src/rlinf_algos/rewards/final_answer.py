r"""Finds the answer in a worked solution: one small grammar of statements, of which the last one wins.

What comes after the last `</think>` counts; a `<think>` that never ends holds no answer. A statement is one of
- `<answer> ... </answer>`: the last one is looked into, and is the answer itself where it holds no other statement;
- `\boxed{...}`, `\fbox{...}` or `\framebox{...}` whose braces close (of nested ones the outer). Boxes with only a
  comma, "and" or "or" between them are one statement: a list;
- the rest of the line after `####` (GSM8K), unless it is a heading in words, with text below it;
- what follows "answer is", "answer:" or "answer =" to the end of the sentence, or, where nothing is left on that line
  or the line is a heading "Answer", the next line.

A statement in words ("the answer is reasonable") does not replace an earlier one in numbers or formulas. Text without
a statement is read for its conclusion: a last line without words is taken whole; else what follows "is" or "equals" in
it, else its last formula or number, with those that are joined to it by "or", "and" or commas.

A reference (`reference_answer`) is taken whole unless it is boxed, follows `####` or stands in `<answer>`.

Every step takes time linear in the text, whatever the text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", flags=re.DOTALL)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{\s*\}")
_BETWEEN_BOXES = re.compile(r"(?:\\[\])]|[$\s])*(,?\s*\b(?:and|or)\b|[,;])(?:\\[\[(]|[$\s])*")
_OR_AFTER_BOX = re.compile(r"(?:\\[\])]|[$ \t])*,?[ \t]*or\b[ \t]*(?:maybe|perhaps|possibly|even)?[ \t]*([^\n]{1,200})")
_MARKER = re.compile(r"####([^\n]*)")
_HEADING = re.compile(r"\s*(?:[0-9]+[.):]\s+)?[A-Za-z]{3,}")
_PHRASE = re.compile(
    r"\bans(?:wers?)?\b(?:[^\n.:=$\\]|\$[^$\n]{1,40}\$){0,60}?(?:\b(?:is|are)\b|:|=)"
    r"|^[#*_ \t]*(?:final[ \t]+)?answers?[*_ \t]*$",
    flags=re.IGNORECASE | re.MULTILINE,
)
_MARKUP = re.compile(r"[\s*:=]*(?:_(?=\s))?")
_LINE_END = re.compile(r"[ \t*:=]*(?:\n|\Z)")
_DISPLAY = re.compile(r"\$\$(.{1,2000}?)\$\$|\\\[(.{1,2000}?)\\\]", flags=re.DOTALL)
_SENTENCE_END = re.compile(r"(?<![.])[.!?](?=\**(?:\s+(?!Or\b)[A-Z*(]|\s*$))")
_REASON = re.compile(r",?\s+(?:because|since|so|which)\b|,\s+(?:as|where|giving|when)\b")
_FILLER = re.compile(
    r"\A(?:(?:indeed|thus|therefore|then|simply|just|exactly|clearly|equal to|given by"
    r"|now|also)\b[\s:,]*)+",
    flags=re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FORMULA_NAMES = frozenset(
    ("sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "arcsin", "arccos", "arctan", "inf",
     "np", "infinity")
)  # fmt: skip
_EMPTY_WORDS = frozenset(
    ("correct", "right", "wrong", "incorrect", "reasonable", "in", "as", "below", "above", "shown", "helpful", "not")
)
_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]{1,2000})\$\$|(?<!\\)\$(?P<b>(?:[^$\n\\]|\\[^\n]){1,2000})\$"
    r"|\\\((?P<c>[^\n]{1,2000}?)\\\)|\\\[(?P<d>[\s\S]{1,2000}?)\\\]"
)
_ONE_FORMULA = re.compile(r"\$([^$\\]*(?:\\[^$][^$\\]*)*)\$|\\\(((?:(?!\\[()]).)*)\\\)", flags=re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.)\]}])[-\u2212]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?%?")
_JOINT = re.compile(r"\s*(?:,|,?\s*\b(?:or|and)\b)\s*")
_VERB = re.compile(r"\b(?:is|are|equals?|be|was|were)\b[\s:]*")
_TAIL = 4000
"""Characters at the end of a text in which formulas and numbers without a statement are looked for."""
_MAX_STATEMENTS = 20
"""Phrases that are looked at, from the end."""


@dataclass(frozen=True, slots=True)
class _Statement:
    start: int
    text: str
    is_formal: bool
    """Whether it is in numbers or formulas, not in words."""


def final_answer(text: str) -> str | None:
    r"""The answer of a solution by the rules above, stripped of white space; None where there is none.

    Example: final_answer(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"; final_answer("6 * 3 = 18\n#### 18") == "18".
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    text = _EMPTY_BOX.sub("", text)
    inner = _in_answer_tag(text)
    if inner is not None:
        answer = _stated(inner) or _cleaned(inner)
    else:
        answer = _stated(text) or _conclusion(text[-_TAIL:]) or ""
    formula = _ONE_FORMULA.fullmatch(answer)
    answer = (formula[1] or formula[2] or "") if formula else answer
    return answer.strip() or None


def reference_answer(text: str) -> str | None:
    r"""The answer of a dataset's row: what is boxed, follows `####` or stands in `<answer>`, else the whole text.

    Example: reference_answer("x is 3 or 4") == "x is 3 or 4"; reference_answer("3 + 4 = 7\n#### 7") == "7".
    """
    inner = _in_answer_tag(text)
    text = text if inner is None else inner
    statements = sorted([*_boxes(text, with_others=False), *_markers(text)], key=lambda statement: statement.start)
    return (statements[-1].text if statements else text.strip()) or None


def _in_answer_tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if 0 <= start < end else None


def _stated(text: str) -> str | None:
    statements = [*_boxes(text), *_markers(text), *_phrases(text)]
    statements.sort(key=lambda statement: statement.start)
    formal = [statement for statement in statements if statement.is_formal]
    return (formal or statements)[-1].text if statements else None


# -- boxes and markers -----------------------------------------------------------------------------------------------


def _boxes(text: str, *, with_others: bool = True) -> Iterator[_Statement]:
    """The last box that holds something, with those that are joined to it, and what an "or" after it adds."""
    spans = [span for span in _box_spans(text) if text[span[1] : span[2]].strip()]
    if not spans:
        return
    start, inner, end = spans[-1]
    answer = text[inner:end].strip()
    for before in reversed(spans[:-1]):
        between = _BETWEEN_BOXES.fullmatch(text, before[2] + 1, start)
        if between is None:
            break
        joint = " or " if "or" in between[1] else ", "
        start, answer = before[0], text[before[1] : before[2]].strip() + joint + answer
    other = _OR_AFTER_BOX.match(text, spans[-1][2] + 1) if with_others else None
    added = _FILLER.sub("", _cleaned(_sentence(other[1])), count=1) if other else ""
    yield _Statement(start, f"{answer} or {added}" if _is_formal(added) else answer, is_formal=True)


def _box_spans(text: str) -> list[tuple[int, int, int]]:
    """(where it begins, where its content begins, where that ends) of each box that is in no other one."""
    opened: list[tuple[int, int] | None] = []
    """Where the box that each open brace opens begins; None for other braces."""
    spans: list[tuple[int, int, int]] = []
    for token in _BOX_OR_BRACE.finditer(text):
        if token[0][0] == "\\":
            if token[0][-1] == "{" and len(token[0]) > 2:
                opened.append((token.start(), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif opened:
            begin = opened.pop()
            if begin is not None:
                while spans and spans[-1][0] > begin[0]:
                    spans.pop()
                spans.append((*begin, token.start()))
    return spans


def _markers(text: str) -> Iterator[_Statement]:
    for marker in _MARKER.finditer(text):
        answer = _cleaned(marker[1])
        is_formal = not _HEADING.match(answer)
        if answer and (is_formal or not text[marker.end() :].strip()):
            yield _Statement(marker.start(), answer, is_formal)


# -- phrases ---------------------------------------------------------------------------------------------------------


def _phrases(text: str) -> Iterator[_Statement]:
    boxes = _box_spans(text)[-_MAX_STATEMENTS:]
    for phrase in list(_PHRASE.finditer(text))[-_MAX_STATEMENTS:]:
        if any(start < phrase.start() < end for start, _, end in boxes):
            continue  # words of a boxed answer
        answer = _after(text, phrase.end())
        first = _WORD.match(answer)
        if answer and not (first and first[0] in _EMPTY_WORDS):
            yield _Statement(phrase.start(), answer, is_formal=_is_formal(answer))
        elif first and first[0] == "not":
            yield _Statement(phrase.start(), answer, is_formal=True)


def _after(text: str, start: int) -> str:
    """The answer that a phrase announces: on its line, or else on the next one that holds something."""
    is_next_line = _LINE_END.match(text, start) is not None
    markup = _MARKUP.match(text, start)
    start = markup.end() if markup else start
    display = _DISPLAY.match(text, start)
    if display:
        inner = display[1] or display[2]
        return _stated_in_box(inner) or _cleaned(inner)
    end = text.find("\n", start)
    line = text[start : end if end >= 0 else len(text)]
    sentence = _FILLER.sub("", _cleaned(_sentence(line)), count=1).strip()
    if is_next_line and not _is_formal(sentence):
        return _concluded(line) or sentence
    return sentence


def _stated_in_box(text: str) -> str | None:
    return next((box.text for box in _boxes(text)), None)


def _sentence(line: str) -> str:
    """The line up to the end of its first sentence or to the reason that it gives."""
    for pattern in (_SENTENCE_END, _REASON):
        for end in pattern.finditer(line):
            if line.count("$", 0, end.start()) % 2 == 0 or line.count("$") % 2:
                line = line[: end.start()]
                break
    return line


def _cleaned(text: str) -> str:
    """The text without the white space, emphasis and full stop around it."""
    text = text.strip()
    while text:
        shorter = re.sub(r"\*\*(?=\S)([^*]+)\*\*", r"\1", text) if "**" in text else text
        shorter = shorter.strip(" \t\n*`\"'").removesuffix(".").rstrip(",;:")
        if shorter == text:
            break
        text = shorter
    return text


def _is_formal(answer: str) -> bool:
    """Whether it begins like a number or a formula, or is a single letter."""
    word = _WORD.match(answer.lstrip("$({[|-\u2212 "))
    return bool(answer) and (word is None or word[0].lower() in _FORMULA_NAMES)


# -- texts without a statement ---------------------------------------------------------------------------------------


def _conclusion(text: str) -> str | None:
    text = text.strip()
    display = re.search(r"(?:\$\$[^$]{1,2000}\$\$|\\\[(?:(?!\\\[)[\s\S]){1,2000}\\\])[.\s]*\Z", text)
    if display:
        return _cleaned(_DISPLAY.sub(lambda found: found[1] or found[2], display[0]))
    line = text.rpartition("\n")[2]
    if not any(word[0].lower() not in _FORMULA_NAMES for word in _WORD.finditer(_FORMULA.sub("", line))):
        answer = _cleaned(line)
        if answer and ("\n" not in text or re.search(r"[0-9A-Za-z]", answer)):
            return answer
    if "\n" not in text and len(text.split()) <= 4 and not re.search(r"(?<=\w) .*[0-9$\\]", text):
        return _cleaned(text) or None
    return _concluded(line) or _last_of(text)


def _concluded(line: str) -> str | None:
    """What a sentence says after its last "is", where that is a number or a formula; else the last one in it."""
    for verb in reversed(list(_VERB.finditer(line))[-_MAX_STATEMENTS:]):
        answer = _FILLER.sub("", _cleaned(_sentence(line[verb.end() :])), count=1)
        if answer and len(answer) > 1 - answer.isdigit() and _is_formal(answer) and re.search(r"[0-9\\$]", answer):
            return answer
    return _last_of(line)


def _last_of(text: str) -> str | None:
    """The last formula or number, and what a list joins to it."""
    formulas = list(_FORMULA.finditer(text))
    ends = [formula.end() for formula in formulas]
    items = [(found.start(), found.end(), _content(found)) for found in formulas]
    rest = ends[-1] if ends else 0
    numbers = [n for n in _NUMBER.finditer(text) if n.start() >= rest] if rest else list(_NUMBER.finditer(text))
    items += [(number.start(), number.end(), number[0]) for number in numbers]
    if not items:
        return None
    start, _, answer = items[-1]
    for before_start, before_end, content in reversed(items[:-1]):
        joint = _JOINT.fullmatch(text, before_end, start)
        if joint is None:
            break
        start, answer = before_start, f"{content}{' or ' if 'or' in joint[0] else ', '}{answer}"
    return answer.rstrip(",").strip()


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)
