"""OpenAI's responses: POST v1/responses.

A turn becomes items: its thoughts, its text, its calls. Consecutive items of the assistant in a request are one turn.
`previous_response_id` continues an answer of the same session. Source of the fields: OpenAI's API reference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_workers.agents.dialects import base
from rlinf_workers.agents.dialects.base import DialectRequest, event, pieces
from rlinf_workers.agents.messages import Message, RequestRefused
from rlinf_workers.agents.sessions import AssistantTurn

USED = ("input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id", "stop")


class ResponsesDialect:
    """See the module."""

    path = "responses"

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> DialectRequest:
        fields = base.common(body, USED)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            fields["ignored"] += ("tool_choice",)
        return DialectRequest(
            messages=_conversation(body, earlier),
            tools=[]
            if choice == "none"
            else [_tool(one, index) for index, one in enumerate(base.records(body, "tools"))],
            max_tokens=base.number(body, "max_output_tokens"),
            stop=base.strings(body, "stop"),
            **fields,
        )

    def answer(self, request: DialectRequest, turns: Sequence[AssistantTurn], answer_id: str) -> dict[str, Any]:
        (turn,) = turns
        is_cut = turn.finish_reason == "length"
        num_output = len(turn.token_ids)
        return {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": request.model,
            "output": _items(turn, answer_id, "incomplete" if is_cut else "completed"),
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "instructions": None,
            "metadata": {},
            "usage": {
                "input_tokens": turn.num_prompt_tokens,
                "output_tokens": num_output,
                "total_tokens": turn.num_prompt_tokens + num_output,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
            **base.token_fields(request, turn),
        }

    def events(self, request: DialectRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        steps: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(answer["output"]):
            steps += _item_events(item, index)
        steps.append({"type": f"response.{answer['status']}", "response": dict(answer)})
        for number, step in enumerate(steps):
            yield event({**step, "sequence_number": number}, step["type"])

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return base.openai_error(status, message, code)


# -- requests --------------------------------------------------------------------------------------------------------


def _conversation(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> list[Any]:
    messages: list[Any] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    if (previous := body.get("previous_response_id")) is not None:
        if previous not in earlier:
            raise RequestRefused(f"previous_response_id={previous!r} is no answer of this session")
        before = list(earlier[previous])
        if messages and before[0].role == "system":  # instructions are not carried over
            before = before[1:]
        messages += [one if one.pictures else one.for_template(arguments_as_text=True) for one in before]
    given_input = body.get("input")
    if isinstance(given_input, str):
        return [*messages, {"role": "user", "content": given_input}]
    for index, item in enumerate(base.records(body, "input")):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[Any], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind in ("message", "function_call", "reasoning"):
        last = messages[-1] if messages else None
        if not isinstance(last, dict) or last["role"] != "assistant":
            last = {"role": "assistant", "content": "", "tool_calls": []}
            messages.append(last)
        _add_to_turn(last, kind, item, where)
    else:
        raise RequestRefused(f"{where} is of type {kind!r}, which is not served")


def _add_to_turn(turn: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
    else:
        content = item.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text") for part in content or []]
        if not all(isinstance(part, str) for part in parts):
            raise RequestRefused(f"{where}.content has parts that are no text, which are not served")
        turn["content"] += "".join(str(part) for part in parts)


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestRefused(f"tools[{index}] is of type {tool.get('type')!r}; only functions are served")
    return {
        "type": "function",
        "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)},
    }


# -- answers ---------------------------------------------------------------------------------------------------------


def _items(turn: AssistantTurn, answer_id: str, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        thought = {"type": "reasoning_text", "text": turn.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": [thought]})
    calls = [call for call in turn.tool_calls if not call.malformed]
    if turn.content or not calls:
        text = {"type": "output_text", "text": turn.content, "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": status, "content": [text]}
        )
    return items + [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in calls
    ]


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, **empty, "status": "in_progress"},
    }
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
    else:
        part = item["content"][0]
        place = {**place, "content_index": 0}
        name = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
        extra = {} if item["type"] == "reasoning" else {"logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield {"type": f"{name}.delta", **place, "delta": piece, **extra}
        yield {"type": f"{name}.done", **place, "text": part["text"], **extra}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
