"""A model's own chat template, continued turn by turn.

The tokens of a turn stay as they were sampled. For what follows, the whole conversation is rendered with a sentinel in
place of the turn's answer; the suffix is the rendered text from the end token after the sentinel on. It is encoded with
that end token in front, so that it gets the tokens that it has in the middle of a text, and the end token is dropped
where the policy has sampled it.

That this equals a rendering of everything is verified when a template is loaded (verification.py); what cannot be
verified is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf_workers.agents.messages import Message, RequestRefused, ToolCall
from rlinf_workers.agents.pictures import MARK, PictureText, without_references
from rlinf_workers.agents.templates.authors import pieces_of
from rlinf_workers.agents.templates.base import (
    AuthoredTokens,
    TemplateRefused,
    Tools,
    ToolsRefused,
    TurnText,
    numbered_calls,
)
from rlinf_workers.agents.templates.rendering import Renderer
from rlinf_workers.agents.templates.tokens import TokenText
from rlinf_workers.agents.tool_formats import Reading, format_of_template
from rlinf_workers.agents.tool_formats.base import MalformedCall

SENTINEL = "Kq7RlinfTurn3vZ"
"""Text that no conversation contains and no template changes."""
LITERAL = "Kq7RlinfLiteral3vZ"
"""Likewise, in place of a placeholder of pictures that is text."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
)
"""How families mark thoughts."""
MARK_TOKENS = 16
"""At the end of a prompt, which may hold the first mark and white space."""


class JinjaTemplate:
    """See the module.

    Args:
        source: the template.
        options: variables of the template, such as `enable_thinking`.
        ends: tokens that end a turn, beside the template's and the tokenizer's.
        picture: how the model's text shows a picture; None: it reads text alone.

    Raises: TemplateRefused if not even a plain conversation can be continued as the template renders it.

    Attributes:
        refused: feature of conversations -> what differs, or what the template says. See verification.py.
        thought_marks: before and after thoughts, if the template shows them as a part of a turn.
        declared: rules of the family under which tokens as served differ from a new rendering. `thoughts`: the template
            drops those of earlier turns, and the policy keeps seeing what it thought. `tools`: it shows the tools
            before the last message of the user only, and the policy sees them wherever they were rendered. `merge`: a
            tokenizer would merge the end of what opens a turn with its first characters, which a policy cannot.
    """

    def __init__(
        self,
        text: TokenText,
        source: str,
        *,
        options: Mapping[str, Any] | None = None,
        ends: Sequence[int] = (),
        picture: PictureText | None = None,
    ) -> None:
        from rlinf_workers.agents.templates.verification import verify

        self.text, self.source, self._picture = text, source, picture
        self.renderer = Renderer(source, {**text.special, **(options or {})})
        self.format = format_of_template(source)
        self.thought_marks = next((marks for marks in THOUGHTS if marks[0] in source and marks[1] in source), None)
        self.arguments_as_text = False
        self.as_lists = self._drops_strings()
        self.end_texts = self._find_ends()
        ids = [text.id_of(end) for end in self.end_texts]
        self.ends: frozenset[int] = frozenset([*ends, *(one for one in ids if one is not None)])
        self.declared: Mapping[str, str] = {}
        self.refused: dict[str, str] = {}
        verify(self)

    def _drops_strings(self) -> bool:
        """Whether the template shows contents that are lists of parts alone, as those of some vision-language models
        do."""
        turn = [Message("user", SENTINEL)]
        try:
            return self._picture is not None and SENTINEL not in self.renderer.render(turn, (), opens_turn=True)
        except RequestRefused:
            return True

    def _find_ends(self) -> tuple[str, ...]:
        """Texts of the tokens that end a turn."""
        turn = [Message("user", "q"), Message("assistant", SENTINEL), Message("user", "r")]
        try:
            rendered = self.renderer.render(turn, (), opens_turn=True, as_lists=self.as_lists)
        except RequestRefused as refusal:
            raise TemplateRefused(f"a conversation of two questions: {refusal}") from refusal
        _, sentinel, after = rendered.partition(SENTINEL)
        if not sentinel or SENTINEL in after:
            raise TemplateRefused("the template does not show each answer of the assistant once")
        end = self.text.first_added(after)
        if not end:
            raise TemplateRefused(
                f"after an answer the template has {after[:20]!r}, which does not begin with a token that is added to "
                "the tokenizer, so that nobody can tell where a turn ends"
            )
        others = (self.text.special.get("eos_token", ""), *(self.format.ends if self.format else ()))
        return (end, *(one for one in others if one in self.text.added and one != end))

    # -- tokens between turns --------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[AuthoredTokens]:
        self._check(messages, tools)
        rendered = self._render(messages, tools)
        return pieces_of(*self.text.encode_with_pictures(rendered, self._picture), self._as_shown(messages))

    def suffix(
        self, messages: Sequence[Message], tools: Tools, num_served: int, last_id: int | None
    ) -> list[AuthoredTokens]:
        self._check(messages, tools)
        rendered = self.suffix_text(messages, tools, num_served)
        following = self._as_shown(messages[num_served:])
        pieces = pieces_of(*self.text.encode_with_pictures(rendered, self._picture), following)
        first = pieces[0]
        if last_id in self.ends and first.token_ids[0] == last_id:
            pieces[0] = replace(first, token_ids=first.token_ids[1:])
        return [piece for piece in pieces if piece.token_ids]

    def suffix_text(self, messages: Sequence[Message], tools: Tools, num_served: int) -> str:
        """From the token that ends the turn to what opens the next one."""
        marked = [*messages[: num_served - 1], self._with_sentinel(messages[num_served - 1]), *messages[num_served:]]
        rendered = self._render(marked, tools)
        _, sentinel, after = rendered.rpartition(SENTINEL)
        end = self.text.positions(after, self.end_texts)
        if not sentinel or end is None:
            raise RequestRefused(
                f"message {num_served - 1} (assistant): the template leaves it out, or does not end it, where "
                f"{', '.join(one.role for one in messages[num_served:])} follow"
            )
        return after[end.start() :]

    def _with_sentinel(self, turn: Message) -> Message:
        """The turn with the sentinel in what the template shows last of it."""
        if not turn.calls:
            return replace(turn, content=SENTINEL)
        last = turn.calls[-1]
        values = last.values if isinstance(last.values, dict) else {}
        marked = ToolCall(last.id, last.name, json.dumps({**values, SENTINEL.lower(): SENTINEL}))
        return replace(turn, calls=(*turn.calls[:-1], marked))

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text of a conversation, with a mark for each picture. Placeholders that are text stay as they are."""
        if self._picture is None:
            return self.rendered(messages, tools)
        placeholder = self._picture.placeholder
        rendered = self.rendered([_with_text(one, placeholder, LITERAL) for one in messages], tools)
        rendered = rendered.replace(placeholder, MARK).replace(LITERAL, placeholder)
        num_shown, num_pictures = rendered.count(MARK), sum(len(one.pictures) for one in messages)
        if num_shown != num_pictures:
            raise RequestRefused(
                f"the chat template shows {num_shown} of the {num_pictures} pictures of these messages"
            )
        return rendered

    def rendered(self, messages: Sequence[Message], tools: Tools, *, opens_turn: bool = True) -> str:
        """A rendering of messages in the forms that the template takes. Raises: RequestRefused."""
        forms = {"arguments_as_text": self.arguments_as_text, "as_lists": self.as_lists}
        return self.renderer.render(messages, tools, opens_turn=opens_turn, **forms)

    def _as_shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with what the template writes for pictures in their contents."""
        picture = self._picture
        if picture is None or not any(one.pictures for one in messages):
            return messages
        return [replace(one, content=picture.written(one.content, picture.placeholder)) for one in messages]

    def _check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises: RequestRefused for what could not be verified."""
        from rlinf_workers.agents.templates.verification import features_of

        if messages[-1].role == "assistant":
            raise RequestRefused("the last message is the assistant's; beginning a turn for it is not served")
        if tools and self.format is None:
            raise ToolsRefused(
                "tools: the chat template has the marks of no known format of calls (hermes, tagged, llama3, mistral, "
                "glm, deepseek); chat without tools is served"
            )
        for feature in features_of(messages, tools):
            if feature in self.refused:
                kind = ToolsRefused if tools else RequestRefused
                raise kind(f"{feature}: this chat template cannot be continued exactly: {self.refused[feature]}")

    # -- meaning of a turn -----------------------------------------------------------------------------------------

    def read(self, token_ids: Sequence[int], tools: Tools, history: Sequence[int]) -> TurnText:
        ended = bool(token_ids) and token_ids[-1] in self.ends
        text = self.text.decode(token_ids[:-1] if ended else token_ids)
        thoughts, answer = "", text
        if self.thought_marks:
            opened = (
                self.text.decode(without_references(history[-MARK_TOKENS:])).rstrip().endswith(self.thought_marks[0])
            )
            thoughts, answer = split_thoughts(text, self.thought_marks, opened=opened)
        reading = self.format.read(answer, tools) if tools and self.format else Reading(answer)
        apart = self.refused.get("text beside calls", "")
        if apart and reading.calls and reading.content.strip():
            problem = f"a turn may hold text or a call, not both: {apart}"
            reading = Reading(answer, (MalformedCall(answer, problem),))
        single = self.refused.get("parallel calls", "")
        return TurnText(text, reading.content, thoughts, numbered_calls(reading, history, token_ids, single=single))


def _with_text(message: Message, text: str, other: str) -> Message:
    """The message with another text in place of one."""
    if not any(text in one for one in (message.content, message.thoughts, *(call.arguments for call in message.calls))):
        return message
    calls = tuple(replace(call, arguments=call.arguments.replace(text, other)) for call in message.calls)
    return replace(
        message,
        content=message.content.replace(text, other),
        thoughts=message.thoughts.replace(text, other),
        calls=calls,
    )


def split_thoughts(text: str, marks: tuple[str, str], *, opened: bool) -> tuple[str, str]:
    """Thoughts and answer of a turn.

    Args:
        marks: before and after thoughts.
        opened: the thoughts were begun before the turn.
    """
    begin = text.lstrip()
    if not opened and not begin.startswith(marks[0]):
        return "", text
    thoughts, _, answer = begin.removeprefix(marks[0]).partition(marks[1])
    return thoughts.strip("\n"), answer.lstrip("\n")
