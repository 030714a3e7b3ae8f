"""OpenAI's chat completions: POST v1/chat/completions.

Thoughts are returned as `reasoning_content`, which DeepSeek's API introduced and open engines share, and are read from
there. Source of the fields: OpenAI's API reference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_workers.agents.dialects import base
from rlinf_workers.agents.dialects.base import DialectRequest, event, pieces
from rlinf_workers.agents.messages import Message, ToolCall
from rlinf_workers.agents.sessions import AssistantTurn

USED = ("messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "stop", "logprobs")


class ChatDialect:
    """See the module."""

    path = "chat/completions"

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> DialectRequest:
        fields = base.common(body, USED)
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            fields["ignored"] += ("tool_choice",)
        limit = base.number(body, "max_completion_tokens")
        return DialectRequest(
            messages=base.records(body, "messages"),
            tools=[] if choice == "none" else base.records(body, "tools"),
            n=base.number(body, "n") or 1,
            max_tokens=base.number(body, "max_tokens") if limit is None else limit,
            stop=base.strings(body, "stop"),
            logprobs=bool(body.get("logprobs")),
            usage_in_stream=bool((body.get("stream_options") or {}).get("include_usage")),
            **fields,
        )

    def answer(self, request: DialectRequest, turns: Sequence[AssistantTurn], answer_id: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [_choice(request, index, turn) for index, turn in enumerate(turns)],
            "usage": base.usage(turns, request.n),
        }

    def events(self, request: DialectRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for choice in answer["choices"]:
            deltas = list(_deltas(choice["message"]))
            for place, delta in enumerate(deltas):
                part: dict[str, Any] = {"index": choice["index"], "delta": delta, "finish_reason": None}
                if place == 0 and choice["logprobs"]:
                    part["logprobs"] = choice["logprobs"]
                yield event({**head, "choices": [part]})
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            extra = {key: choice[key] for key in ("token_ids", "token_logprobs", "policy_versions") if key in choice}
            yield event({**head, "choices": [{**last, **extra}]})
        if request.usage_in_stream:
            yield event({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return base.openai_error(status, message, code)


def _choice(request: DialectRequest, index: int, turn: AssistantTurn) -> dict[str, Any]:
    calls = [_call(call) for call in turn.tool_calls if not call.malformed]
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": _logprobs(turn), "refusal": None} if request.logprobs else None,
        **base.token_fields(request, turn),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(turn: AssistantTurn) -> list[dict[str, Any]]:
    """Of the sampled tokens; there are no alternatives, since the engine keeps none."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(turn.token_texts, turn.logprobs, strict=True)
    ]


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for piece in pieces(message.get("reasoning_content", "")):
        yield {"reasoning_content": piece}
    for piece in pieces(message["content"] or ""):
        yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": function}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
