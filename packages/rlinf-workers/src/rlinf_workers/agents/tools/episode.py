"""All tools of an episode: calls by function name, further attempts, and the same state where the episode branches."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from rlinf_algos import did_you_mean
from rlinf_workers.agents.messages import ToolCall
from rlinf_workers.agents.pictures import part_of
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.tools.base import ToolResult, ToolUnavailable
from rlinf_workers.agents.tools.checked import CheckedSession, CheckedTool

LEFT_OUT = "[image left out]"
"""What a policy that reads text alone reads in place of a picture."""


@dataclasses.dataclass
class _Place:
    """One tool of the episode."""

    tool: CheckedTool
    session: CheckedSession | None = None
    snapshot: bytes | None = None
    """With which a new session begins."""
    has_state: bool = False
    """Whether the session has answered a call."""
    lost: str = ""
    """Why its state is lost, which a further attempt cannot change."""
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class EpisodeTools:
    """The sessions of one episode, each opened when one of its functions is first called. Calls may run at once; those
    of a tool that keeps a state run one after the other, in the order in which they were made.

    Args:
        tools: the started tools of the run, from `make_tools`.
        episode: identifies the episode; the sandbox of `python` takes the seed of its random numbers from it.
        num_attempts: how often a call is tried while the service fails. Each attempt has a new session, which begins
            with the state after the last call that succeeded; if that cannot be recreated, there is no further attempt.
        counts: counts the calls (`calls`), and those that failed by the policy's doing (`failed_calls`).
        calling: returns a context for calls, from what is called.
        sees: whether the policy sees pictures; otherwise it reads a note in place of each.
    """

    def __init__(
        self,
        tools: Sequence[CheckedTool],
        episode: str,
        *,
        num_attempts: int = 2,
        counts: Counter[str] | None = None,
        calling: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
        sees: bool = False,
    ) -> None:
        self._calling, self._branches, self._sees = calling, list[EpisodeTools](), sees
        self._places = [_Place(tool) for tool in tools]
        self._owners = {spec.name: place for place in self._places for spec in place.tool.specs}
        self._episode, self._num_attempts = episode, num_attempts
        self._counts = Counter[str]() if counts is None else counts

    @property
    def specs(self) -> list[dict[str, Any]]:
        """All functions in OpenAI's form, for `AgentSession.chat`."""
        return [spec.as_openai() for place in self._places for spec in place.tool.specs]

    async def answers(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Makes the calls of a turn, all at once, and returns a message for each.

        Raises: EpisodeEnded if a tool failed by itself.
        """
        with self._calling(f"tool {', '.join(dict.fromkeys(call.name for call in calls))}"):
            contents = await asyncio.gather(*(self._answer(call) for call in calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(calls, contents, strict=True)
        ]

    async def _answer(self, call: ToolCall) -> str | list[dict[str, Any]]:
        """A text, or parts where there are pictures."""
        if call.malformed:
            return f"The call could not be read: {call.malformed}"
        result = await self.call(call.name, json.loads(call.arguments))
        if result.failure == "service":
            raise EpisodeEnded("tool_service", f"{call.name}: {result.detail or result.text}")
        if not self._sees:
            return "\n".join(filter(None, [result.text, *[LEFT_OUT] * len(result.pictures)]))
        if not result.pictures:
            return result.text
        text = [{"type": "text", "text": result.text}] if result.text else []
        return [*text, *map(part_of, result.pictures)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a function. Raises nothing but asyncio.CancelledError."""
        result = await self._call(name, arguments)
        self._counts["calls"] += 1
        self._counts["failed_calls"] += result.failure == "policy"
        return result

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._owners:
            text = f"There is no tool {name!r}; {did_you_mean(name, self._owners)}"
            return ToolResult(text=text, failure="policy", detail=text)
        place, wall_s = self._owners[name], 0.0
        async with place.lock if place.tool.keeps_state else contextlib.nullcontext():
            for _ in range(self._num_attempts):
                result = await self._attempt(place, name, arguments)
                wall_s += result.wall_s
                if result.failure != "service" or place.lost:
                    break
        return msgspec.structs.replace(result, wall_s=wall_s)

    def branch(self, episode: str) -> EpisodeTools:
        """Tools that begin with the present state of these, and are closed with them.

        Args:
            episode: as for the first.

        Raises:
            ToolUnavailable: a tool has a state that cannot be recreated.
        """
        tools = [place.tool for place in self._places]
        branch = EpisodeTools(
            tools,
            episode,
            num_attempts=self._num_attempts,
            counts=self._counts,
            calling=self._calling,
            sees=self._sees,
        )
        for own, other in zip(self._places, branch._places, strict=True):
            if own.lost:
                raise ToolUnavailable(own.lost)
            other.snapshot = _state(own)
        self._branches.append(branch)
        return branch

    async def close(self) -> None:
        """Closes all sessions; the episode makes no further calls."""
        for place in self._places:
            session, place.session, place.lost = place.session, None, "the episode is closed"
            if session is not None:
                await session.close()
        for branch in self._branches:
            await branch.close()

    async def _attempt(self, place: _Place, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if place.lost:
            return ToolResult(text="", failure="service", detail=place.lost)
        if place.session is None:
            place.session = place.tool.open(self._episode)
            if place.snapshot is not None:
                result = await place.session.restore(place.snapshot)
                if result.failure:
                    await _leave(place)
                    return result
        result = await place.session.call(name, arguments)
        if result.failure != "service":
            place.has_state = True
            return result
        try:
            place.snapshot = _state(place)
        except ToolUnavailable as error:
            place.lost = f"{result.detail}; {error}"
            result = msgspec.structs.replace(result, detail=place.lost)
        await _leave(place)
        return result


def _state(place: _Place) -> bytes | None:
    """With which another session continues. Raises: ToolUnavailable."""
    return place.session.snapshot() if place.session is not None and place.has_state else place.snapshot


async def _leave(place: _Place) -> None:
    session, place.session, place.has_state = place.session, None, False
    if session is not None:
        await session.close()


async def start_tools(tools: Sequence[CheckedTool]) -> None:
    """Starts the tools of a run, one after the other.

    Raises:
        ToolUnavailable: a tool cannot work, or two have a function of the same name. All are closed then.
    """
    try:
        names: set[str] = set()
        for tool in tools:
            await tool.start()
            for spec in tool.specs:
                if spec.name in names:
                    raise ToolUnavailable(f"two tools have a function {spec.name!r}; rename one or give it a `prefix`")
                names.add(spec.name)
    except BaseException:
        for tool in tools:
            await tool.close()
        raise
