"""Anthropic's messages: POST v1/messages.

A block of thoughts is signed with an empty text, and is read back without a look at its signature. Source of the
fields: Anthropic's API reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_workers.agents.dialects import base
from rlinf_workers.agents.dialects.base import DialectRequest, event, pieces
from rlinf_workers.agents.messages import Message, RequestRefused
from rlinf_workers.agents.pictures import part_of_url
from rlinf_workers.agents.sessions import AssistantTurn

USED = ("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences")


class MessagesDialect:
    """See the module."""

    path = "messages"

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> DialectRequest:
        fields = base.common(body, USED)
        choice = (body.get("tool_choice") or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            fields["ignored"] += ("tool_choice",)
        messages: list[dict[str, Any]] = []
        if system := _text(body.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        for index, message in enumerate(base.records(body, "messages")):
            messages += _chat_messages(message, f"messages[{index}]")
        return DialectRequest(
            messages=messages,
            tools=[]
            if choice == "none"
            else [_tool(one, index) for index, one in enumerate(base.records(body, "tools"))],
            max_tokens=base.number(body, "max_tokens"),
            stop=base.strings(body, "stop_sequences"),
            **fields,
        )

    def answer(self, request: DialectRequest, turns: Sequence[AssistantTurn], answer_id: str) -> dict[str, Any]:
        (turn,) = turns
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _blocks(turn),
            "stop_reason": "stop_sequence"
            if turn.stop and turn.finish_reason == "stop"
            else reasons[turn.finish_reason],
            "stop_sequence": turn.stop or None,
            "usage": {"input_tokens": turn.num_prompt_tokens, "output_tokens": len(turn.token_ids)},
            **base.token_fields(request, turn),
        }

    def events(self, request: DialectRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        usage = {**answer["usage"], "output_tokens": 0}
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for index, block in enumerate(answer["content"]):
            yield _event("content_block_start", index=index, content_block={**block, **_EMPTY[block["type"]]})
            for delta in _deltas(block):
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield _event("message_delta", delta=ended, usage={"output_tokens": answer["usage"]["output_tokens"]})
        yield _event("message_stop")

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code or None}}


_EMPTY: dict[str, dict[str, Any]] = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _blocks(turn: AssistantTurn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values}
        for call in turn.tool_calls
        if not call.malformed
    ]


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    match block["type"]:
        case "text":
            yield from ({"type": "text_delta", "text": piece} for piece in pieces(block["text"]))
        case "thinking":
            yield from ({"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"]))
            yield {"type": "signature_delta", "signature": ""}
        case _:
            written = json.dumps(block["input"], ensure_ascii=False)
            yield from ({"type": "input_json_delta", "partial_json": piece} for piece in pieces(written))


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise RequestRefused(
            f"tools[{index}] is of type {tool.get('type')!r}; only tools with an input_schema are served"
        )
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool.get("name"), **described, "parameters": tool["input_schema"]}}


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message of Anthropic's form, as one or more of OpenAI's: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant") or not isinstance(blocks, list):
        raise RequestRefused(f"{where} has role {role!r} or content that is neither text nor blocks")
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                parts.append({"type": "text", "text": str(block.get("text", ""))})
            case "image":
                parts.append(_picture(block, f"{where}.content[{index}]"))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "tool_use":
                function = {
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input", {}), ensure_ascii=False),
                }
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                result = _result(block.get("content"), f"{where}.content[{index}].content")
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            case kind:
                raise RequestRefused(f"{where}.content[{index}] is of type {kind!r}, which is not served")
    if role == "assistant":
        thought = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return [{"role": "assistant", "content": parts, "tool_calls": calls, **thought}]
    return results + ([{"role": "user", "content": parts}] if parts or not results else [])


def _picture(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block of type image as a part of OpenAI's form."""
    match block.get("source"):
        case {"type": "base64", "data": str(encoded), **others}:
            return part_of_url(f"data:{others.get('media_type') or 'image/png'};base64,{encoded}")
        case {"type": "url", "url": str(url)}:
            return part_of_url(url)
    raise RequestRefused(f"{where}.source is neither base64 nor a url")


def _result(content: Any, where: str) -> Any:
    """What a tool resulted in: a text, or parts of text and pictures."""
    if not isinstance(content, list) or not any(_is_picture(block) for block in content):
        return _text(content, where)
    return [
        _picture(block, f"{where}[{index}]") if _is_picture(block) else block for index, block in enumerate(content)
    ]


def _is_picture(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _text(content: Any, where: str) -> str:
    """A text, or the text of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    if not all(isinstance(text, str) for text in texts):
        raise RequestRefused(f"{where} has blocks that are no text, which are not served")
    return "".join(str(text) for text in texts)
