r"""Reads the boxes of a text: `\boxed{...}`, `\fbox{...}`, `\framebox{...}`, and boxes without braces.

In LaTeX, an argument without braces is one token. Here it is a whole number or a command with its arguments, since
MATH has `\boxed 2` and models write `\boxed\frac{1}{2}`. Reads any text in one pass.
"""

import re
from dataclasses import dataclass

_TOKEN = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*|\\.|[{}]", flags=re.DOTALL)
_BARE = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+\s?")


@dataclass(frozen=True, slots=True)
class BoxSpan:
    """The position of a box in its text."""

    start: int
    inner: int
    """Start of its content."""
    inner_end: int
    end: int

    def content(self, text: str) -> str:
        return text[self.inner : self.inner_end].strip()


def boxes(text: str) -> list[BoxSpan]:
    """The outermost boxes that are not empty, in order. A box without a closing brace does not count."""
    openings, closings = [], {}
    tokens = list(_TOKEN.finditer(text))
    for token in tokens:
        if token[0] == "{":
            openings.append(token.start())
        elif token[0] == "}" and openings:
            closings[openings.pop()] = token.start()
    outermost: list[BoxSpan] = []
    for token in tokens:
        if len(token[0]) < 5 or (outermost and token.start() < outermost[-1].end):
            continue
        box = _box(text, token, closings)
        if box is not None and box.content(text):
            outermost.append(box)
    return outermost


def last_boxed(text: str) -> str | None:
    r"""The content of the last box; a box that encloses all of it is removed.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"; last_boxed(r"so $\boxed 2$") == "2"
    """
    outermost = boxes(text)
    return unwrapped(outermost[-1].content(text)) if outermost else None


def unwrapped(content: str) -> str:
    r"""`\boxed{9}` as 9; removes up to four nested boxes."""
    for _ in range(4):
        inner = boxes(content) if content.startswith("\\") else []
        if len(inner) != 1 or inner[0].start > 0 or inner[0].end < len(content):
            break
        content = inner[0].content(content)
    return content


def _box(text: str, token: re.Match[str], closings: dict[int, int]) -> BoxSpan | None:
    start, place = token.start(), token.end()
    if text.startswith("{", place):
        return BoxSpan(start, place + 1, closings[place], closings[place] + 1) if place in closings else None
    bare = _BARE.match(text, place)
    if bare:
        return BoxSpan(start, place, bare.end(), bare.end())
    command = _COMMAND.match(text, place)
    end = command.end() if command else place
    while end in closings:
        end = closings[end] + 1
    return BoxSpan(start, place, end, end)
