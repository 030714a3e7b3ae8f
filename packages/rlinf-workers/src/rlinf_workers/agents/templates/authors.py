"""Who wrote which part of a rendered text, as far as it can be seen.

The content of a message is found where the template shows it, as it is, stripped, or as JSON. What stands between is
the template's. Where a result of a tool is shown in another form, all that stands between its neighbours is the tool's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlinf_workers.agents.messages import Message
from rlinf_workers.agents.records import Author
from rlinf_workers.agents.templates.base import AuthoredTokens


def author_of(message: Message) -> Author:
    """Who wrote a message of a request; that of another assistant counts as the user's."""
    return "tool" if message.role == "tool" else "user"


def pieces_of(
    text: str, token_ids: Sequence[int], starts: Sequence[int], messages: Sequence[Message], begin: int = 0
) -> list[AuthoredTokens]:
    """Tokens by author.

    Args:
        text: a rendering that shows the messages in order.
        starts: the character at which each token begins.
        begin: the first message is not looked for before this character.
    """
    spans = _spans(text, messages, begin)
    pieces: list[tuple[Author, list[int]]] = []
    position = 0
    for token, start in zip(token_ids, starts, strict=True):
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        is_inside = position < len(spans) and spans[position][0] <= start
        author: Author = spans[position][2] if is_inside else "template"
        if pieces and pieces[-1][0] == author:
            pieces[-1][1].append(token)
        else:
            pieces.append((author, [token]))
    return [AuthoredTokens(author, tuple(ids)) for author, ids in pieces]


def _spans(text: str, messages: Sequence[Message], begin: int) -> list[tuple[int, int, Author]]:
    """(first character, end, author) of each message that is seen, in order."""
    spans: list[tuple[int, int, Author]] = []
    unseen: Author | None = None
    for message in messages:
        span = _find(text, message.content, begin)
        if span is None:
            unseen = "tool" if message.role == "tool" else unseen
            continue
        if unseen:
            spans.append((begin, span[0], unseen))
            unseen = None
        spans.append((*span, author_of(message)))
        begin = span[1]
    if unseen:
        spans.append((begin, len(text), unseen))
    return [span for span in spans if span[0] < span[1]]


def _find(text: str, content: str, begin: int) -> tuple[int, int] | None:
    forms = (content, content.strip(), json.dumps(content, ensure_ascii=False), json.dumps(content))
    for form in forms:
        place = text.find(form, begin) if form else begin
        if place >= 0:
            return place, place + len(form)
    return None
