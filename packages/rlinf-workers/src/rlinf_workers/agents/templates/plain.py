"""The template of tiny models with one token a character: the history is its texts, one after the other.

Text of the user enters as it is, a tool's result as `{RESULT}`, and nothing separates messages. The policy's end token
stays where it was sampled; a turn that ended without one gets it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf_workers.agents.messages import Message, RequestRefused
from rlinf_workers.agents.pictures import MARK, PictureText
from rlinf_workers.agents.records import Author
from rlinf_workers.agents.templates.base import AuthoredTokens, Tools, TurnText, numbered_calls
from rlinf_workers.agents.templates.tokens import TokenText
from rlinf_workers.agents.tool_formats.plain import Plain


class PlainTemplate:
    """See the module.

    Args:
        ends: tokens that end a turn, beside the tokenizer's own.
        picture: how the model's text shows a picture; None: it reads text alone.
    """

    def __init__(self, text: TokenText, *, ends: Sequence[int] = (), picture: PictureText | None = None) -> None:
        self.text, self._picture = text, picture
        self.ends: frozenset[int] = frozenset([*ends, *([] if text.end_id is None else [text.end_id])])
        self.declared: Mapping[str, str] = {}
        self._format = Plain()

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[AuthoredTokens]:
        if messages and messages[-1].role == "assistant":
            raise RequestRefused("the last message is the assistant's; beginning a turn for it is not served")
        return [piece for message in messages if (piece := self._piece(message)).token_ids]

    def suffix(
        self, messages: Sequence[Message], tools: Tools, num_served: int, last_id: int | None
    ) -> list[AuthoredTokens]:
        pieces = self.prompt(messages[num_served:], tools)
        if last_id not in self.ends and self.text.end_id is not None:
            pieces.insert(0, AuthoredTokens("template", (self.text.end_id,)))
        return pieces

    def read(self, token_ids: Sequence[int], tools: Tools, history: Sequence[int]) -> TurnText:
        ended = bool(token_ids) and token_ids[-1] in self.ends
        text = self.text.decode(token_ids[:-1] if ended else token_ids)
        if not tools:
            return TurnText(text, text, "", ())
        reading = self._format.read(text, tools)
        return TurnText(text, reading.content, "", numbered_calls(reading, history, token_ids))

    def _piece(self, message: Message) -> AuthoredTokens:
        author: Author = "tool" if message.role == "tool" else "user"
        text = "{" + message.content + "}" if message.role == "tool" else message.content
        if message.calls:
            text += "".join(f"[{call.name}:{_only_value(call.values)}]" for call in message.calls)
        marked = text if self._picture is None else self._picture.written(text, MARK)
        _, token_ids, _ = self.text.encode_with_pictures(marked, self._picture)
        return AuthoredTokens(author, tuple(token_ids))


def _only_value(values: object) -> str:
    if not isinstance(values, dict) or len(values) != 1:
        raise RequestRefused(
            "without a chat template, a call has one argument; a message of the request has another number"
        )
    return str(next(iter(values.values())))
