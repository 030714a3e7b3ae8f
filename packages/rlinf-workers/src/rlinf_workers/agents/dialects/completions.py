"""OpenAI's completions of a text or of tokens: POST v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rlinf_workers.agents.dialects import base
from rlinf_workers.agents.dialects.base import DialectRequest, event, pieces
from rlinf_workers.agents.messages import Message, RequestRefused
from rlinf_workers.agents.sessions import AssistantTurn

USED = ("prompt", "n", "max_tokens", "stop", "logprobs", "echo", "suffix")


class CompletionsDialect:
    """See the module."""

    path = "completions"

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> DialectRequest:
        for key in ("echo", "suffix"):
            if body.get(key):
                raise RequestRefused(f"{key} is not served; leave it out")
        return DialectRequest(
            prompts=_prompts(body.get("prompt")),
            n=base.number(body, "n") or 1,
            max_tokens=base.number(body, "max_tokens"),
            stop=base.strings(body, "stop"),
            logprobs=body.get("logprobs") is not None and body.get("logprobs") is not False,
            usage_in_stream=bool((body.get("stream_options") or {}).get("include_usage")),
            **base.common(body, USED),
        )

    def answer(self, request: DialectRequest, turns: Sequence[AssistantTurn], answer_id: str) -> dict[str, Any]:
        return {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [_choice(request, index, turn) for index, turn in enumerate(turns)],
            "usage": base.usage(turns, request.n),
        }

    def events(self, request: DialectRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        head = {key: answer[key] for key in ("id", "object", "created", "model")}
        for choice in answer["choices"]:
            for piece in pieces(choice["text"]):
                part = {"index": choice["index"], "text": piece, "finish_reason": None, "logprobs": None}
                yield event({**head, "choices": [part]})
            yield event({**head, "choices": [{**choice, "text": ""}]})
        if request.usage_in_stream:
            yield event({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return base.openai_error(status, message, code)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A text, tokens, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(one) is int for one in prompt):
            return [prompt]
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if all(isinstance(one, list) and one and all(type(token) is int for token in one) for one in prompt):
            return prompt
    raise RequestRefused("prompt is neither a text, nor tokens, nor a list of texts or of tokens")


def _choice(request: DialectRequest, index: int, turn: AssistantTurn) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        ends = list(accumulate((len(text) for text in turn.token_texts), initial=0))
        logprobs = {
            "tokens": list(turn.token_texts),
            "token_logprobs": turn.logprobs,
            "top_logprobs": None,
            "text_offset": ends[:-1],
        }
    return {
        "index": index,
        "text": turn.content,
        "finish_reason": turn.finish_reason,
        "logprobs": logprobs,
        **base.token_fields(request, turn),
    }
