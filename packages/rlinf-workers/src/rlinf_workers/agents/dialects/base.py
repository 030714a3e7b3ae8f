"""What every dialect gives the server, and how their common parameters are read.

Parameters that would change how tokens are sampled are not applied: the recipe's sampling holds, because gradients need
it. They, and whatever else the server does not know, are listed in `ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf_workers.agents.messages import Message, RequestRefused
from rlinf_workers.agents.sessions import AssistantTurn

EXTENSIONS = ("seed", "state", "return_token_ids")
"""Of every dialect: the seed of the sampling; `AgentSession.next_state`; ids, log-probabilities and versions of tokens
in the answer."""
HARMLESS = frozenset(
    (
        *("model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "include", "background", "truncation"),
        *EXTENSIONS,
    )
)
"""Parameters that cannot change an answer here."""
PIECE_CHARACTERS = 48
"""Of an event of a stream."""


@dataclass(frozen=True, kw_only=True)
class DialectRequest:
    """A request, whatever its dialect."""

    model: str
    messages: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's chat form."""
    prompts: Sequence[str | Sequence[int]] = ()
    """Of a completion; `messages` is empty then."""
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    state: str = ""
    logprobs: bool = False
    stream: bool = False
    token_ids: bool = False
    """Return them."""
    usage_in_stream: bool = False
    ignored: tuple[str, ...] = ()
    """Parameters that were not applied."""


class Dialect(Protocol):
    """One API."""

    path: str
    """After `/sessions/ID/v1/`."""

    def read(self, body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> DialectRequest:
        """Reads a request.

        Args:
            earlier: conversations of this session by the id of the answer that ended them.

        Raises: RequestRefused.
        """
        ...

    def answer(self, request: DialectRequest, turns: Sequence[AssistantTurn], answer_id: str) -> dict[str, Any]:
        """The finished turns, in order: those of the first prompt, then those of the next."""
        ...

    def events(self, request: DialectRequest, answer: Mapping[str, Any]) -> Iterator[bytes]:
        """An answer as server-sent events."""
        ...

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        """The body of an error."""
        ...


def number(body: Mapping[str, Any], key: str) -> int | None:
    """A whole number of a request; None: it has none. Raises: RequestRefused."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestRefused(f"{key}={value!r} is no whole number")
    return value


def strings(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text or a list of texts. Raises: RequestRefused."""
    value = body.get(key)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise RequestRefused(f"{key}={value!r} is neither a text nor a list of texts")
    return tuple(values)


def records(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """A list of objects; [] if it is missing. Raises: RequestRefused."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RequestRefused(f"{key} is no list of objects")
    return value


def common(body: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """Fields of `DialectRequest` that all dialects spell alike.

    Args:
        used: other parameters that the dialect reads.
    """
    seed, state = number(body, "seed"), body.get("state") or ""
    if not isinstance(state, str):
        raise RequestRefused(f"state={state!r} is no text")
    return {
        "model": str(body.get("model") or "policy"),
        "seed": seed,
        "state": state,
        "stream": bool(body.get("stream")),
        "token_ids": bool(body.get("return_token_ids")),
        "ignored": tuple(
            key for key in body if key not in HARMLESS and key not in used and body[key] not in (None, [], {})
        ),
    }


def token_fields(request: DialectRequest, turn: AssistantTurn) -> dict[str, Any]:
    """The extension `return_token_ids` of an answer's turn."""
    if not request.token_ids:
        return {}
    return {"token_ids": turn.token_ids, "token_logprobs": turn.logprobs, "policy_versions": turn.versions}


def pieces(text: str) -> list[str]:
    """A text in parts for a stream."""
    return [text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS)]


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def openai_error(status: int, message: str, code: str) -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}


def usage(turns: Sequence[AssistantTurn], num_samples: int) -> dict[str, int]:
    """Tokens of an answer, as OpenAI counts them: those of a prompt once.

    Args:
        turns: `num_samples` of the first prompt, then those of the next.
    """
    prompt = sum(turn.num_prompt_tokens for turn in turns[::num_samples])
    completion = sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
