"""The agent process of a rollout rank: runs episodes, and asks the rank for every turn of the policy.

    python -m rlinf_workers.agents.host DESCRIPTOR < settings as JSON

It has the sessions, the tools and the agent; the rank has the engine. They exchange messages (link.py) on the socket
DESCRIPTOR, whose end ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec

from rlinf_workers.agents.direct import direct_agent
from rlinf_workers.agents.harness import Harness
from rlinf_workers.agents.link import (
    RECEIVE_BYTES,
    AbandonAll,
    Abandoned,
    AgentsReady,
    AgentsRefused,
    AgentTask,
    Answer,
    Ask,
    Begin,
    EpisodeReport,
    Frames,
    FromAgents,
    JoinStage,
    NewPicture,
    NoMoreEpisodes,
    ToAgents,
    Waiting,
    frame,
    to_agents,
)
from rlinf_workers.agents.loop import run_loop
from rlinf_workers.agents.noise import TurnNoise, noise_of_agent, noise_of_attempt
from rlinf_workers.agents.picture_reader import EpisodePictures, PictureReader
from rlinf_workers.agents.records import NOT_OF_POLICY, AgentTrajectory, EpisodeEnded, HarnessRaised, Sampled, cut
from rlinf_workers.agents.sessions import AgentSession, SessionLimits
from rlinf_workers.agents.settings import LOOP, EpisodeSettings, NamedAgent
from rlinf_workers.agents.templates import ChatTemplate, template_of_folder
from rlinf_workers.agents.tools import EpisodeTools, make_environments, make_tools, start_tools
from rlinf_workers.cores import unpin

_LOG = logging.getLogger(__name__)
REPORT_S = 1.0
"""Time outside the engine after which an episode is reported as waiting."""
MAX_PRINTED_SHOWN = 2000
"""Characters of what a harness printed before it failed, in the message."""
CHECK_S = 0.2
"""Time between two looks at how long episodes have been outside the engine."""
NUM_TOGETHER = 16
"""Messages of the rank after which its episodes go on, so that the engine can begin with the first turns early."""


class Attempt:
    """An attempt at an episode: its noise, and the time that it spends outside the engine."""

    def __init__(self, number: int, name: str, noise: int) -> None:
        self.number, self.name = number, name
        self._noise, self._noises = noise, dict[str, TurnNoise]()
        self.doing = "the harness"
        """Outside the engine."""
        self.num_turns = 0
        self.counts: Counter[str] = Counter()
        """See `AgentSession.counts`."""
        self._num_sampling, self._idle_s, self._since = 0, 0.0, time.monotonic()
        self.is_out_of_time = False
        """It was cancelled because it has been outside the engine for too long."""

    def noise_of(self, agent: str) -> TurnNoise:
        """The noise of an agent's turns, which does not depend on when others speak."""
        if agent not in self._noises:
            self._noises[agent] = TurnNoise(noise_of_agent(self._noise, agent))
        return self._noises[agent]

    @property
    def idle_s(self) -> float:
        """Time outside the engine so far."""
        return self._idle_s + (0.0 if self._num_sampling else time.monotonic() - self._since)

    @contextlib.contextmanager
    def sampling(self) -> Any:
        """While the engine samples for it."""
        if not self._num_sampling:
            self._idle_s += time.monotonic() - self._since
        self._num_sampling += 1
        self.num_turns += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            self._since = time.monotonic()

    @contextlib.contextmanager
    def calling(self, what: str) -> Any:
        """While it waits for a tool."""
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    @property
    def waits_s(self) -> float:
        """Time since the engine last sampled for it; 0 while it does."""
        return 0.0 if self._num_sampling else time.monotonic() - self._since


def longest_wait(attempts: Iterable[Attempt]) -> str:
    """The attempt that has been outside the engine for longest, and what it waits for; empty if none has been for a
    second."""
    longest = max(attempts, key=lambda one: one.waits_s, default=None)
    if longest is None or longest.waits_s < REPORT_S:
        return ""
    return f"session {longest.name}, after turn {longest.num_turns}: {longest.doing} for {longest.waits_s:.0f} s"


class AgentHost:
    """Runs the episodes of a rank.

    Args:
        send: puts a message on the socket.
    """

    def __init__(self, settings: EpisodeSettings, send: Callable[[FromAgents], None]) -> None:
        self._settings, self._send = settings, send
        self._template = template_of_folder(settings.tokenizer_folder, settings.chat_options, ends=settings.stop_ids)
        self._templates = {name: self._template_of(agent) for name, agent in settings.agents.items()}
        self._tools = make_tools(settings.tools)
        self._environments = None if settings.environment is None else make_environments(settings.environment)
        self._pictures = None if settings.pictures is None else PictureReader(settings.pictures, send)
        self._agent = None if settings.run == LOOP else direct_agent(settings.run)
        is_harness = settings.run != LOOP and self._agent is None
        self._harness = Harness(settings.run, settings.python) if is_harness else None
        self._server: Any = None
        self._attempts: dict[str, Attempt] = {}
        """Name of a session -> its attempt."""
        self._requests: dict[int, asyncio.Future[Sampled]] = {}
        self._num_requests = 0
        self._running: dict[int, asyncio.Task[None]] = {}
        """By number of the episode."""
        self._watching: asyncio.Task[None] | None = None

    def _template_of(self, agent: NamedAgent) -> ChatTemplate:
        if agent.folder is None:
            return self._template
        return template_of_folder(agent.folder, self._settings.chat_options, ends=agent.stop_ids)

    async def start(self) -> None:
        """Raises: EpisodeEnded if the harness cannot be imported; ToolUnavailable if a tool does not work."""
        await start_tools(self._tools)
        if self._harness is not None:
            from rlinf_workers.agents.server import ServerLimits, SessionServer  # needs aiohttp

            self._server = SessionServer(limits=ServerLimits(max_sessions=2 * self._settings.max_episodes))
            await self._server.start()
            await self._harness.start()
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Ends attempts that have been outside the engine for too long, and reports what episodes wait for."""
        reported = ""
        while True:
            await asyncio.sleep(CHECK_S)
            for attempt in self._attempts.values():
                if attempt.idle_s > self._settings.max_idle_s and not attempt.is_out_of_time:
                    attempt.is_out_of_time = True
                    self._running[attempt.number].cancel()
            if (text := longest_wait(self._attempts.values())) != reported:
                self._send(Waiting(text=text))
                reported = text

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.abandon()
        if self._harness is not None:
            await self._harness.close()
            await self._server.stop()
        for tool in self._tools:
            await tool.close()

    # -- messages --------------------------------------------------------------------------------------------------

    def begin(self, message: Begin) -> None:
        """Starts an episode."""
        task = asyncio.ensure_future(self._run(message))
        self._running[message.episode] = task
        task.add_done_callback(lambda _: self._running.pop(message.episode, None))

    def answer(self, message: Answer) -> None:
        """Hands a turn to the episode that waits for it."""
        future = self._requests.pop(message.request, None)
        if future is not None and not future.done():
            future.set_result(message.sampled)

    async def abandon(self) -> None:
        """Cancels all episodes."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._pictures is not None:
            self._pictures.abandon()

    # -- tokens ----------------------------------------------------------------------------------------------------

    async def sample(
        self, session: str, token_ids: Sequence[int], *, max_new_tokens: int | None, seed: int | None, agent: str
    ) -> Sampled:
        """A turn of a session, from the engine (`TokenSource`)."""
        attempt = self._attempts[session]
        if len(token_ids) > self._settings.max_prompt_tokens:
            raise EpisodeEnded(
                "tokens",
                f"the history has {len(token_ids)} tokens, and a whole turn of {self._settings.max_new_tokens} no "
                f"longer fits into {self._settings.max_context_tokens}",
            )
        sampled = await self._ask(attempt, token_ids, attempt.noise_of(agent).next(token_ids, seed), agent)
        return sampled if max_new_tokens is None else cut(sampled, max_new_tokens, truncated=True)

    async def _ask(self, attempt: Attempt, token_ids: Sequence[int], noise: int, agent: str) -> Sampled:
        self._num_requests += 1
        request = self._num_requests
        future = self._requests[request] = asyncio.get_running_loop().create_future()
        ask = Ask(request=request, episode=attempt.number, token_ids=list(token_ids), noise=noise, agent=agent)
        self._send(ask)
        try:
            with attempt.sampling():
                return await future
        finally:
            self._requests.pop(request, None)

    # -- episodes --------------------------------------------------------------------------------------------------

    async def _run(self, begin: Begin) -> None:
        try:
            await self._report(begin)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - a fault of ours, which must not look like one of the policy
            detail = traceback.format_exc()
            _LOG.exception("episode %s", begin.task.name)
            trajectory = AgentTrajectory(nodes=[], cause="service", detail=detail)
            self._send(EpisodeReport(episode=begin.episode, trajectory=trajectory))

    async def _report(self, begin: Begin) -> None:
        idle_s = 0.0
        for number in range(1 + self._settings.num_retries):
            attempt = Attempt(begin.episode, f"{begin.task.name}-{number}", noise_of_attempt(begin.noise, number))
            trajectory = _with_turns(await self._attempt(begin.task, attempt))
            idle_s += attempt.idle_s
            if not trajectory.is_discarded:
                break
            _LOG.warning("episode %s: %s: %s", begin.task.name, trajectory.cause, trajectory.detail)
        self._send(
            EpisodeReport(
                episode=begin.episode,
                trajectory=trajectory,
                num_retries=number,
                idle_s=idle_s,
                counts=dict(attempt.counts),
            )
        )

    async def _attempt(self, task: AgentTask, attempt: Attempt) -> AgentTrajectory:
        settings, name = self._settings, attempt.name
        limits = SessionLimits(
            max_turns=settings.max_turns,
            max_context_tokens=settings.max_context_tokens,
            max_new_tokens=settings.max_new_tokens,
        )
        pictures = None
        if self._pictures is not None:
            pictures = EpisodePictures(attempt.number, task.pictures, self._pictures)
        session = AgentSession(name, self._template, self, limits, agents=self._templates, pictures=pictures)
        attempt.counts = session.counts
        self._attempts[name] = attempt
        trajectory: AgentTrajectory | None = None
        try:
            trajectory = await self._outcome(session, task, attempt)
        except BaseException:
            if not attempt.is_out_of_time:
                raise
        finally:
            del self._attempts[name]
        if trajectory is None or attempt.is_out_of_time:
            limit = f"more than {settings.max_idle_s:g} s outside the engine"
            return session.trajectory(cause="time", detail=limit)
        return trajectory

    async def _outcome(self, session: AgentSession, task: AgentTask, attempt: Attempt) -> AgentTrajectory:
        try:
            reward, printed = await self._play(session, task, attempt)
        except EpisodeEnded as raised:
            # What a request met is why a harness raised. It must not hide that the policy has used its turns.
            end = session.end if isinstance(raised, HarnessRaised) and session.end is not None else raised
            detail = end.detail
            if end.cause == "harness_lost" and raised.printed:
                detail = f"{detail.rstrip()}\nIt printed:\n{raised.printed[-MAX_PRINTED_SHOWN:]}"
            return session.trajectory(cause=end.cause, detail=detail, printed=raised.printed)
        if (end := session.end) is None:
            return session.trajectory(reward=reward, printed=printed)
        return session.trajectory(reward=reward, cause=end.cause, detail=end.detail, printed=printed)

    async def _play(self, session: AgentSession, task: AgentTask, attempt: Attempt) -> tuple[float | None, str]:
        """One attempt. Returns the reward, and what the harness printed."""
        if self._harness is not None:
            return await self._call(session, task)
        session.tools = EpisodeTools(
            self._tools,
            session.id,
            counts=session.counts,
            calling=attempt.calling,
            sees=self._pictures is not None,
        )
        environment = None if self._environments is None else self._environments()
        try:
            if self._agent is not None:
                return await self._agent(session, task), ""
            await run_loop(session, task, environment, attempt.calling)
        finally:
            await session.tools.close()
            if environment is not None:
                await environment.close()
        return None, ""

    async def _call(self, session: AgentSession, task: AgentTask) -> tuple[float | None, str]:
        assert self._harness is not None, "called where there is one"
        base_url, token = self._server.open(session)
        try:
            of_harness = msgspec.to_builtins(msgspec.structs.replace(task, pictures=[]))
            result = await self._harness.run(session.id, base_url, token, of_harness, session)
        finally:
            self._server.close(session.id)
        if session.end is not None and session.end.cause in NOT_OF_POLICY:
            session.raise_end()
        return result.reward, result.printed


def _with_turns(trajectory: AgentTrajectory) -> AgentTrajectory:
    """The episode; one in which the policy was never asked cannot have ended by its doing."""
    if trajectory.nodes or trajectory.is_discarded:
        return trajectory
    detail = "the agent did not ask the policy for a turn" + (f": {trajectory.detail}" if trajectory.detail else "")
    return msgspec.structs.replace(trajectory, cause="harness_lost", detail=detail)


class MessageWriter:
    """Sends messages to the rank. Those of one turn of the event loop leave together, and interrupt the engine once."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []

    def send(self, message: FromAgents) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self.flush)
        self._frames.append(frame(message))

    def flush(self) -> None:
        self._writer.write(b"".join(self._frames))
        self._frames.clear()


def reason_of(error: Exception) -> str:
    """Why agents cannot start."""
    return error.detail if isinstance(error, EpisodeEnded) else f"{type(error).__name__}: {error}"


async def serve(descriptor: int, settings: EpisodeSettings) -> None:
    """Runs episodes until the socket ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    messages = MessageWriter(writer)
    try:
        host = AgentHost(settings, messages.send)
        await host.start()
    except Exception as error:  # noqa: BLE001 - the rank reports it
        _LOG.exception("the agents cannot start")
        messages.send(AgentsRefused(text=reason_of(error)))
        messages.flush()
        await writer.drain()
        return
    messages.send(AgentsReady())
    async for message in messages_of_rank(reader):
        match message:
            case Begin():
                host.begin(message)
            case Answer():
                host.answer(message)
            case AbandonAll(number=abandoned):
                await host.abandon()
                messages.send(Abandoned(number=abandoned))
            case JoinStage() | NoMoreEpisodes() | NewPicture():
                raise AssertionError("these are for a router")
    await host.close()


async def messages_of_rank(reader: asyncio.StreamReader) -> AsyncIterator[ToAgents]:
    """What a rank sends, until its connection ends."""
    frames = Frames()
    while received := await _received(reader):
        for number, body in enumerate(frames.feed(received), 1):
            yield to_agents(body)
            if number % NUM_TOGETHER == 0:
                await asyncio.sleep(0)


async def _received(reader: asyncio.StreamReader) -> bytes:
    """Further bytes; b"" at the end."""
    try:
        return await reader.read(RECEIVE_BYTES)
    except ConnectionResetError:
        return b""


def yield_to_engine() -> None:
    """A message that wakes this process, or one that it starts, does not stop the engine where both share a core."""
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    unpin()  # the rank's cores are the engine's
    yield_to_engine()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EpisodeSettings)
    asyncio.run(serve(int(sys.argv[1]), settings))


if __name__ == "__main__":
    main()
