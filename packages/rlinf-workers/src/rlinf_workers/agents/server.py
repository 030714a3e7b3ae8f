"""The session server: sessions behind the HTTP APIs that agents are written for.

A session has an address and a token of its own:

    POST /sessions/ID/v1/chat/completions | completions | responses (OpenAI), messages (Anthropic)
    GET  /sessions/ID/v1/models

`base_url` ends in `/v1`, as OpenAI's SDK wants it. Anthropic's adds `/v1` itself, so every path exists with `/v1/v1`
too. A stream is sent when its turn is finished, since only then is it known whether the text holds a call.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from aiohttp import web

from rlinf_workers.agents.dialects import (
    ChatDialect,
    CompletionsDialect,
    Dialect,
    DialectRequest,
    MessagesDialect,
    ResponsesDialect,
)
from rlinf_workers.agents.messages import Message, RequestRefused, read_messages
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession, AssistantTurn

_LOG = logging.getLogger(__name__)
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect())
CODES = {"tokens": "context_length_exceeded", "turns": "turns_exhausted", "time": "time_exhausted"}
"""Of errors by cause, as SDKs know them where they know one."""
MAX_ANSWERS = 64
"""Answers of a session that `previous_response_id` can continue."""
STOP_S = 2.0
"""Time that open requests get when the server stops."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What the server accepts."""

    max_sessions: int = 4096
    max_body_bytes: int = 64 << 20
    max_concurrent: int = 64
    """Requests of one session at a time; more are answered with 429."""


@dataclass
class _OpenSession:
    session: AgentSession
    token: str
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    answers: OrderedDict[str, tuple[Message, ...]] = field(default_factory=OrderedDict)
    """Conversations by the id of the answer that ended them."""
    num_answers: int = 0


class HttpRefusal(Exception):
    """A request that is answered with an error.

    Args:
        code: for programs; "": the status says it all.
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class SessionServer:
    """Serves sessions of this event loop.

    Args:
        host: the address to listen on; another machine can only reach it if this is not a loopback address.
        port: 0: any free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits | None = None) -> None:
        self._host, self._port, self._limits = host, port, limits or ServerLimits()
        self._sessions: dict[str, _OpenSession] = {}
        self._runner: web.AppRunner | None = None
        self._address = ""

    async def start(self) -> str:
        """Listens, and returns the address, such as `http://127.0.0.1:41234`."""
        application = web.Application(client_max_size=self._limits.max_body_bytes)
        for version in ("v1", "v1/v1"):
            for dialect in DIALECTS:
                application.router.add_post(f"/sessions/{{id}}/{version}/{dialect.path}", self._handler(dialect))
            application.router.add_get(f"/sessions/{{id}}/{version}/models", self._models)
        # Without it a client that hangs up would leave its turn to be sampled for nobody.
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self._address

    def open(self, session: AgentSession) -> tuple[str, str]:
        """Serves a session. Returns its `base_url`, and its token.

        Raises: ValueError if one with this id is open; RuntimeError if the server has no place for it.
        """
        if session.id in self._sessions:
            raise ValueError(f"a session {session.id!r} is open")
        if len(self._sessions) >= self._limits.max_sessions:
            raise RuntimeError(f"{len(self._sessions)} sessions are open, and no more may be (max_sessions)")
        token = secrets.token_urlsafe(24)
        self._sessions[session.id] = _OpenSession(session, token)
        return f"{self._address}/sessions/{quote(session.id, safe='')}/v1", token

    def close(self, session_id: str) -> None:
        """Ends a session; its open requests are cancelled and answered with 404."""
        for request in self._sessions.pop(session_id).requests:
            request.cancel()

    async def stop(self) -> None:
        """Closes all sessions and stops listening."""
        for session_id in list(self._sessions):
            self.close(session_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # -- requests --------------------------------------------------------------------------------------------------

    def _handler(self, dialect: Dialect) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._serve(dialect, request)
            except HttpRefusal as refusal:
                return _error(dialect, refusal)

        return handle

    async def _serve(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        opened = self._authorized(request)
        if len(opened.requests) >= self._limits.max_concurrent:
            raise HttpRefusal(429, f"the session has {len(opened.requests)} requests at a time, and may not have more")
        work = asyncio.ensure_future(self._turns(dialect, request, opened))
        opened.requests.add(work)
        try:
            parsed, turns, answer_id = await work
        except asyncio.CancelledError:
            if self._sessions.get(opened.session.id) is opened:
                raise  # the client has hung up
            raise HttpRefusal(404, "the session was closed") from None
        finally:
            work.cancel()
            opened.requests.discard(work)
        answer = dialect.answer(parsed, turns, answer_id)
        headers = {"x-rlinf-ignored": ", ".join(parsed.ignored)} if parsed.ignored else {}
        if not parsed.stream:
            return web.json_response(answer, headers=headers)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        await response.prepare(request)
        for event in dialect.events(parsed, answer):
            await response.write(event)
        await response.write_eof()
        return response

    async def _turns(
        self, dialect: Dialect, request: web.Request, opened: _OpenSession
    ) -> tuple[DialectRequest, Sequence[AssistantTurn], str]:
        """Reads a request and samples its turns. Raises: HttpRefusal."""
        session = opened.session
        try:
            parsed = _read(dialect, await _body(request), opened)
            session.counts.update(f"ignored_{name}" for name in parsed.ignored)
            if parsed.state:
                session.next_state = parsed.state
            turns = await _sample(session, parsed)
        except RequestRefused as refusal:
            raise HttpRefusal(400, str(refusal)) from refusal
        except EpisodeEnded as end:
            status = 400 if end.cause in CODES else 503
            raise HttpRefusal(status, end.detail or end.cause, CODES.get(end.cause, end.cause)) from end
        except (HttpRefusal, asyncio.CancelledError):
            raise
        except Exception as error:  # a fault of ours, which must not look like one of the policy
            _LOG.exception("session %s", session.id)
            session.end = EpisodeEnded("service", f"{type(error).__name__}: {error}")
            raise HttpRefusal(500, session.end.detail, "service") from error
        if parsed.logprobs:
            turns = [replace(turn, token_texts=session.token_texts(turn)) for turn in turns]
        opened.num_answers += 1
        answer_id = f"{opened.num_answers:06d}"
        if parsed.messages and dialect.path == ResponsesDialect.path:
            opened.answers[f"resp_{answer_id}"] = (*read_messages(parsed.messages), turns[0].as_message())
            while len(opened.answers) > MAX_ANSWERS:
                opened.answers.popitem(last=False)
        return parsed, turns, answer_id

    def _authorized(self, request: web.Request) -> _OpenSession:
        """The session that a request names. Raises: HttpRefusal without its token, or if there is none."""
        opened = self._sessions.get(request.match_info["id"])
        if opened is None:
            raise HttpRefusal(404, f"there is no session {request.match_info['id']!r}, or it was closed")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        tokens = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(one.encode(), opened.token.encode()) for one in tokens):
            raise HttpRefusal(401, "the token of the session is missing or wrong (Authorization: Bearer, or x-api-key)")
        return opened

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            opened = self._authorized(request)
        except HttpRefusal as refusal:
            return _error(DIALECTS[0], refusal)
        names = opened.session.agents or ("policy",)
        anthropic = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
        model = {"object": "model", "created": 0, "owned_by": "rlinf", **anthropic}
        models = [{"id": name, "display_name": name, **model} for name in names]
        page = {"object": "list", "data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        return web.json_response(page)


async def _body(request: web.Request) -> dict[str, Any]:
    """Raises: HttpRefusal."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise HttpRefusal(413, f"the body of the request is too large: {error.text}") from error
    except ValueError as error:
        raise HttpRefusal(400, f"the body of the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise HttpRefusal(400, "the body of the request is no JSON object")
    return body


def _read(dialect: Dialect, body: dict[str, Any], opened: _OpenSession) -> DialectRequest:
    """Raises: RequestRefused, also for values of types that the dialect does not have there."""
    try:
        return dialect.read(body, opened.answers)
    except (TypeError, AttributeError, KeyError) as error:
        raise RequestRefused(f"the request has a value of the wrong type: {error}") from error


async def _sample(session: AgentSession, request: DialectRequest) -> list[AssistantTurn]:
    limits: dict[str, Any] = {
        "n": request.n,
        "max_tokens": request.max_tokens,
        "stop": request.stop,
        "seed": request.seed,
        "agent": request.model if session.agents else "",
    }
    if not request.prompts:
        return await session.chat(request.messages, tools=request.tools, **limits)
    turns: list[AssistantTurn] = []
    for prompt in request.prompts:
        turns += await session.complete(prompt, **limits)
    return turns


def _error(dialect: Dialect, refusal: HttpRefusal) -> web.Response:
    """SDKs try 429 again by themselves, and nothing else: what has failed here fails again."""
    retries = refusal.status == 429
    headers = {"x-should-retry": str(retries).lower(), **({"Retry-After": "1"} if retries else {})}
    body = dialect.error(refusal.status, refusal.message, refusal.code)
    return web.json_response(body, status=refusal.status, headers=headers)
