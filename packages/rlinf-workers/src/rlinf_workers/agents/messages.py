"""Messages of a conversation in OpenAI's chat form, read once into records that can be compared.

Every dialect of the server translates into this form. Compared are what a template can show: the text, thoughts, and
calls whose arguments are the same JSON value, however a harness spaces or orders it. Ids of calls are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from rlinf_workers.agents.pictures import MARK, MessagePicture, as_parts, read_part
from rlinf_workers.models.picture_files import PictureError

Role = Literal["system", "user", "assistant", "tool"]
PICTURE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are pictures."""
CONTEXT = 20
"""Characters of each side that a difference quotes."""
_as_json = json.JSONEncoder(sort_keys=True).encode


class RequestRefused(ValueError):
    """A request that cannot be served as it is; the message says which part, and what is allowed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a turn of the policy."""

    id: str
    name: str
    """"" of a malformed call."""
    arguments: str
    """A JSON object, as text; of a malformed call all that the policy wrote."""
    malformed: str = ""
    """Why what the policy wrote is no call, though it begins like one; for the policy and for people."""

    @property
    def values(self) -> Any:
        """The arguments as a JSON value; text that is no JSON stays text."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example: {"role": "tool", "tool_call_id": "ab1", "content": "4"} -> Message("tool", "4", call_id="ab1")
    """

    role: Role
    content: str = ""
    thoughts: str = ""
    """What an assistant thought before it answered (`reasoning_content`)."""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of a tool's result: the call that it answers."""
    name: str = ""
    pictures: tuple[MessagePicture, ...] = ()
    """What the marks in the content stand for (`pictures.MARK`), in their order."""

    def for_template(self, *, arguments_as_text: bool = False, as_lists: bool = False) -> dict[str, Any]:
        """The message as chat templates expect it.

        Args:
            arguments_as_text: calls have their arguments as JSON text, not as an object.
            as_lists: the content is a list of parts, even without pictures.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.pictures or as_lists:
            message["content"] = as_parts(self.content)
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if arguments_as_text else call.values,
                    },
                }
                for call in self.calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Reads messages in OpenAI's chat form. Raises: RequestRefused, which names the message and the field."""
    if not messages:
        raise RequestRefused("messages is empty; give at least one message")
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    if isinstance(message, Message):  # of an earlier request
        return message
    if not isinstance(message, Mapping):
        raise RequestRefused(f"{where} is no object")
    roles: dict[str, Role] = {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
    }
    role = roles.get(str(message.get("role")))
    if role is None:
        raise RequestRefused(f"{where}.role={message.get('role')!r} is not one of {', '.join(roles)}")
    content, pictures = _read_content(message.get("content"), f"{where}.content")
    if pictures and role == "assistant":
        raise RequestRefused(f"{where}.content has a picture, and turns of the assistant are text")
    return Message(
        role,
        content=content,
        thoughts=str(message.get("reasoning_content") or message.get("reasoning") or "") if role == "assistant" else "",
        calls=_read_calls(message.get("tool_calls") or (), f"{where}.tool_calls") if role == "assistant" else (),
        call_id=str(message.get("tool_call_id") or "") if role == "tool" else "",
        name=str(message.get("name") or ""),
        pictures=pictures,
    )


def _read_content(content: Any, where: str) -> tuple[str, tuple[MessagePicture, ...]]:
    """Text with a mark for each picture, and the pictures."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, Sequence):
        raise RequestRefused(f"{where} is neither text nor a list of parts")
    texts: list[str] = []
    pictures: list[MessagePicture] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, Mapping) and kind in PICTURE_PARTS:
            try:
                pictures.append(read_part(part))
            except PictureError as error:
                raise RequestRefused(f"{where}[{index}]: the picture {error}") from error
            texts.append(MARK)
            continue
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise RequestRefused(f"{where}[{index}] is of type {kind!r}; only text and pictures are served")
        texts.append(text)
    return "".join(texts), tuple(pictures)


def _read_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    return tuple(_read_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _read_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{where} is no call of a function with a name")
    arguments = function.get("arguments", "{}")
    return ToolCall(
        str(call.get("id") or ""), function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Reads tools in OpenAI's chat form, `{"type": "function", "function": {"name", "description", "parameters"}}`.

    They stay as they are, since a template may show all of it.

    Raises: RequestRefused.
    """
    declared: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"tools[{index}] is no function with a name; other types of tools are not served")
        declared.append(dict(tool))
    return tuple(declared)


def difference(one: Message, other: Message) -> str:
    """What differs first between two messages; "": nothing that a template shows."""
    if one.role != other.role:
        return f"its role {one.role} became {other.role}"
    for what, before, after in (("content", one.content, other.content), ("thoughts", one.thoughts, other.thoughts)):
        if before != after:
            return text_difference(what, before, after)
    if one.pictures != other.pictures:
        return "a picture became another"
    if len(one.calls) != len(other.calls):
        return f"its {len(one.calls)} calls of tools became {len(other.calls)}"
    for index, (before, after) in enumerate(zip(one.calls, other.calls, strict=True)):
        if before.name != after.name:
            return f"call {index} of {before.name} became one of {after.name}"
        if before.values != after.values:
            return text_difference(f"call {index}: arguments", before.arguments, after.arguments)
    return "" if one.name == other.name else f"its name {one.name!r} became {other.name!r}"


def text_difference(what: str, before: str, after: str) -> str:
    """Where two texts begin to differ.

    Example: ("content", "yes, ab", "yes, ac") -> "content differs at character 6: 'b' became 'c'"
    """
    if not after:
        return f"{what} {before[:CONTEXT]!r} went missing"
    if not before:
        return f"{what} {after[:CONTEXT]!r} was added"
    pairs = enumerate(zip(before, after, strict=False))
    place = next((index for index, (a, b) in pairs if a != b), min(len(before), len(after)))
    old, new = before[place : place + CONTEXT], after[place : place + CONTEXT]
    return f"{what} differs at character {place}: {old!r} became {new!r}"


def history_difference(before: Sequence[Message], after: Sequence[Message]) -> str:
    """What differs first between two histories, with the index and the role of the message; "": nothing."""
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if differs := difference(one, other):
            return f"message {index} ({one.role}): {differs}"
    if len(after) < len(before):
        return f"message {len(after)} ({before[len(after)].role}) is missing"
    if len(after) > len(before):
        return f"message {len(before)} ({after[len(before)].role}) was added"
    return ""


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, thoughts: bool) -> list[bytes]:
    """Digest of the tools and of the messages up to and including each one; equal where `difference` finds none.

    Args:
        thoughts: they count.
    """
    first = hashlib.blake2b(_as_json(tools).encode(), digest_size=16).digest()
    return list(accumulate(messages, partial(digest_with, thoughts=thoughts), initial=first))[1:]


def digest_with(before: bytes, message: Message, *, thoughts: bool) -> bytes:
    """The digest of a history with one message more; the arguments are those of `digests`."""
    calls = [(call.name, call.values) for call in message.calls]
    compared = (message.role, message.content, message.thoughts if thoughts else "", calls, message.name)
    compared += ([one.digest for one in message.pictures],) if message.pictures else ()
    return hashlib.blake2b(before + _as_json(compared).encode(), digest_size=16).digest()
