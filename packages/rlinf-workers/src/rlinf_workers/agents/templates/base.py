"""What a session needs of a chat template."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_workers.agents.messages import Message, RequestRefused, ToolCall
from rlinf_workers.agents.records import Author
from rlinf_workers.agents.templates.tokens import TokenText
from rlinf_workers.agents.tool_formats import Reading
from rlinf_workers.agents.tool_formats.base import MalformedCall

Tools = Sequence[Mapping[str, Any]]


class TemplateRefused(ValueError):
    """A chat template that cannot continue a conversation as it would render it; the message says what differs."""


class ToolsRefused(RequestRefused):
    """A request with tools, for a template whose calls cannot be verified; the message says why."""


@dataclass(frozen=True, slots=True)
class AuthoredTokens:
    """Consecutive tokens of one author, none of them the policy's."""

    author: Author
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnText:
    """What the tokens of a turn say."""

    text: str
    """All of it, without the end token."""
    content: str
    """The answer: what is neither thoughts nor a well-formed call."""
    thoughts: str
    calls: tuple[ToolCall, ...]


class ChatTemplate(Protocol):
    """Tokens between the turns of a policy, and the meaning of a turn.

    `JinjaTemplate` is that of a model with a chat template, `PlainTemplate` that of a tiny one without.
    """

    text: TokenText
    ends: frozenset[int]
    """Tokens that end a turn."""
    declared: Mapping[str, str]
    """Where tokens that stay as served differ from a new rendering of the history: rule -> what it is about."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[AuthoredTokens]:
        """Tokens before the first turn. Raises: RequestRefused."""
        ...

    def suffix(
        self, messages: Sequence[Message], tools: Tools, num_served: int, last_id: int | None
    ) -> list[AuthoredTokens]:
        """Tokens between a turn and the next one.

        Args:
            messages: the whole history; the last of the first `num_served` is the turn, at least one follows.
            last_id: the turn's last token. If it does not end a turn, the suffix begins with the token that does.

        Raises: RequestRefused.
        """
        ...

    def read(self, token_ids: Sequence[int], tools: Tools, history: Sequence[int]) -> TurnText:
        """What a turn says.

        Args:
            history: the tokens before it, from which its calls get their ids.
        """
        ...


def numbered_calls(
    reading: Reading, history: Sequence[int], token_ids: Sequence[int], *, single: str = ""
) -> tuple[ToolCall, ...]:
    """Calls with the ids that the policy wrote, or else with ids of 9 letters and digits, which every known template
    accepts.

    Those depend on the tokens alone, so that a replay shows the same ones to the policy.

    Args:
        single: why a turn may have one call only; "": it may have several.
    """
    if not reading.calls:
        return ()
    digest = hashlib.blake2b(array("q", [len(history), *history, *token_ids]).tobytes(), digest_size=16)
    calls: list[ToolCall] = []
    used: set[str] = set()
    for index, call in enumerate(reading.calls):
        one = digest.copy()
        one.update(str(index).encode())
        name = _letters(int.from_bytes(one.digest(), "big"))
        if not isinstance(call, MalformedCall) and call.id and call.id not in used:
            name = call.id
        used.add(name)
        if isinstance(call, MalformedCall):
            calls.append(ToolCall(name, "", call.text, call.problem))
        elif single and index:
            calls.append(ToolCall(name, "", call.arguments, f"a turn may hold one call: {single}"))
        else:
            calls.append(ToolCall(name, call.name, call.arguments))
    return tuple(calls)


def _letters(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    for _ in range(9):
        number, place = divmod(number, len(digits))
        text += digits[place]
    return text
