"""A harness of the user's: a function that gets a task and the address of a session, and talks to it as to any server.

    async def run(base_url, task, *, session) -> float | None

It runs in a process of its own (harness_process.py), under any interpreter. Its return value is the reward of the
episode; None leaves the scoring to the job's reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlinf_workers.agents.harness_process import PROBLEM
from rlinf_workers.agents.interpreters import other_interpreter, same_interpreter
from rlinf_workers.agents.messages import RequestRefused
from rlinf_workers.agents.records import EpisodeEnded, HarnessRaised

_SCRIPT = Path(__file__).with_name("harness_process.py")
START_S = 120.0
"""Time in which the harness has to be imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """What a harness returned for an episode."""

    reward: float | None
    printed: str


class TakesRewards(Protocol):
    """What a harness gives rewards to: the session."""

    def reward_numbered_turn(self, number: int, value: float) -> None:
        """Raises: RequestRefused."""
        ...

    def reward(self, value: float, *, agent: str) -> None:
        """Raises: RequestRefused."""
        ...


def import_problem(path: str, python: str | None = None, *, first: str = "") -> str:
    """Why an interpreter cannot import a function, a harness or a tool; "": it can.

    Args:
        path: `package.module:function`.
        python: None: this one.
        first: what its first parameter has to be called.
    """
    arguments = [python or sys.executable, "-B", str(_SCRIPT), "check", path, first]
    env = same_interpreter() if python in (None, sys.executable) else other_interpreter()
    try:
        done = subprocess.run(arguments, env=env, capture_output=True, text=True, errors="replace", timeout=START_S)
    except OSError as error:
        return f"there is no interpreter {python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"its module was not imported within {START_S:g} s"
    if done.returncode == 0:
        return ""
    return done.stdout.rpartition("\0")[2] if done.returncode == PROBLEM else f"its import ended the process: {done}"


class Harness:
    """The process of a harness; started by the first episode, and again after it was lost.

    Args:
        path: `package.module:function`.
        python: its interpreter; None: this one.
    """

    def __init__(self, path: str, python: str | None = None) -> None:
        self._path, self._python = path, python or sys.executable
        self._starting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._next = 0

    async def run(
        self, name: str, base_url: str, api_key: str, task: dict[str, Any], rewarded: TakesRewards
    ) -> HarnessResult:
        """Runs an episode; cancelling it cancels the harness's coroutine.

        Args:
            name: of the session.
            rewarded: gets the rewards of turns and of agents.

        Raises: EpisodeEnded if the harness raises or its process dies.
        """
        connection = await self._connected()
        self._next += 1
        number = self._next
        return await connection.episode(
            number,
            {"id": number, "session": name, "base_url": base_url, "api_key": api_key, "task": task},
            rewarded,
        )

    async def start(self) -> None:
        """Starts the process. Raises: EpisodeEnded if the harness cannot be imported."""
        await self._connected()

    async def close(self) -> None:
        """Ends the process."""
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> _Connection:
        async with self._starting:
            if self._connection is None or self._connection.is_lost:
                self._connection = await _Connection.open(self._python, self._path)
            return self._connection


class _Connection:
    """A running process and its episodes."""

    def __init__(self, process: asyncio.subprocess.Process, reader: Any, writer: Any) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._open: dict[int, tuple[asyncio.Future[HarnessResult], TakesRewards]] = {}
        self.is_lost = False
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, python: str, path: str) -> _Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                python,
                str(_SCRIPT),
                str(theirs.fileno()),
                path,
                pass_fds=(theirs.fileno(),),
                env=same_interpreter() if python == sys.executable else other_interpreter(),
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 28)
        connection = cls(process, reader, writer)
        try:
            first = await asyncio.wait_for(reader.readline(), START_S)
        except asyncio.TimeoutError:
            first = b""
        started = json.loads(first) if first else {"error": f"it did not start within {START_S:g} s, or ended"}
        if "error" in started:
            await connection.close()
            raise EpisodeEnded("harness_lost", f"{path} under {python}: {started['error']}")
        connection._reading = asyncio.ensure_future(connection._read())
        return connection

    async def episode(self, number: int, message: dict[str, Any], rewarded: TakesRewards) -> HarnessResult:
        future: asyncio.Future[HarnessResult] = asyncio.get_running_loop().create_future()
        self._open[number] = future, rewarded
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            return await future
        finally:
            if self._open.pop(number, None) is not None and not self.is_lost:
                self._writer.write(json.dumps({"cancel": number}).encode() + b"\n")

    async def close(self) -> None:
        self.is_lost = True
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        while line := await self._line():
            message = json.loads(line)
            future, rewarded = self._open.get(message["id"], (None, None))
            if future is None or rewarded is None:
                continue
            if "turn_reward" in message or "agent_reward" in message:
                try:
                    if "agent_reward" in message:
                        rewarded.reward(message["agent_reward"], agent=message["agent"])
                    else:
                        rewarded.reward_numbered_turn(message["turn"], message["turn_reward"])
                except RequestRefused as error:
                    _end(future, HarnessRaised("harness_lost", str(error)))  # `episode` cancels it
                continue
            del self._open[message["id"]]
            if "error" in message:
                _end(future, HarnessRaised("harness_lost", message["error"], printed=message["printed"]))
            elif not future.done():
                future.set_result(HarnessResult(reward=message["reward"], printed=message["printed"]))
        self.is_lost = True
        status = await self._process.wait()
        lost, self._open = self._open, {}
        for future, _ in lost.values():
            _end(future, EpisodeEnded("harness_lost", f"the harness's process ended with status {status}"))

    async def _line(self) -> bytes:
        try:
            return await self._reader.readline()
        except (ConnectionResetError, ValueError):
            return b""


def _end(future: asyncio.Future[HarnessResult], error: EpisodeEnded) -> None:
    if not future.done():
        future.set_exception(error)
