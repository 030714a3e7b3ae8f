r"""Where the answer stands in a worked solution.

What comes after the last `</think>` counts, or everything where there is none. In it, the first of these that is there:
1. the content of the last `<answer> ... </answer>`, looked into by the rules below;
2. the last `\boxed{...}` or `\fbox{...}` whose braces close (of nested ones the outer);
3. what follows the last `####` on its line (GSM8K);
4. what follows the last "answer is", "answer:" or "answer =" on its line, up to the end of the sentence, or the first
   formula between dollar signs in it;
5. the whole text, where it is one line of at most 80 characters;
6. the last formula (`$...$`, `\(...\)`, `\[...\]`), or the last number if that comes later.

Every step takes time linear in the text, whatever the text.
"""

import re

_SHORT = 80
"""Characters of a completion that can be an answer without words around it."""
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", flags=re.DOTALL)
_PHRASE = re.compile(
    r"\banswer\b[^\n.:=$\\]{0,60}?(?:\bis\b|:|=)(?:\*\*)?[ \t]?(?:[:=](?:\*\*)?[ \t]?)?([^\n]+)", flags=re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z])")
_FORMULA = re.compile(
    r"(?<!\\)\$\$?((?:[^$\n\\]|\\[^\n]){1,2000})\$|\\\(([^\n]{1,2000}?)\\\)|\\\[([\s\S]{1,2000}?)\\\]"
)
_NUMBER = re.compile(r"(?<![\w.)\]}])[-\u2212]?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?%?")
_TAIL = 4000
"""Characters at the end of a text in which formulas and numbers are looked for."""


def final_answer(text: str) -> str | None:
    r"""The answer of a solution by the rules above, stripped of white space; None where there is none.

    Example: final_answer(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"; final_answer("6 * 3 = 18\n#### 18") == "18".
    """
    text = text.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if 0 <= start < end:
        text = text[start + len("<answer>") : end]
    found = _last_box(text)
    if found is None:
        found = _after_marker(text)
    if found is None:
        found = _after_phrase(text[-_TAIL:])
    if found is None:
        found = text if len(text.strip()) <= _SHORT and "\n" not in text.strip() else _last_formula(text[-_TAIL:])
    return found.strip() or None if found else None


def _last_box(text: str) -> str | None:
    opened: list[int | None] = []
    """For each open brace, where the box that it opens begins; None for other braces."""
    found = None
    for token in _BOX_OR_BRACE.finditer(text):
        if token[0][0] == "\\":
            if token[0][-1] == "{" and len(token[0]) > 2:
                opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif opened:
            start = opened.pop()
            if start is not None:
                found = (start, token.start())
    return text[found[0] : found[1]] if found else None


def _after_marker(text: str) -> str | None:
    for part in reversed(text.split("####")[1:]):
        line = part.split("\n", 1)[0].strip()
        if line:
            return line
    return None


def _after_phrase(text: str) -> str | None:
    phrase = None
    for phrase in _PHRASE.finditer(text):  # noqa: B007 - the last one counts
        pass
    if phrase is None:
        return None
    line = phrase[1]
    formula = _FORMULA.search(line)
    if formula and not line[: formula.start()].strip(" :*"):
        return _content(formula)
    return _SENTENCE_END.split(line, maxsplit=1)[0]


def _last_formula(text: str) -> str | None:
    formula, number = None, None
    for formula in _FORMULA.finditer(text):  # noqa: B007 - the last one counts
        pass
    for number in _NUMBER.finditer(text):  # noqa: B007
        pass
    if formula and (number is None or number.start() < formula.end()):
        return _content(formula)
    return number[0] if number else None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)
