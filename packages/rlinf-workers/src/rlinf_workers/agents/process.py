"""The agent process of a rollout rank, as the rank sees it."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from rlinf_workers.agents.interpreters import same_interpreter
from rlinf_workers.agents.link import (
    RECEIVE_BYTES,
    AbandonAll,
    Abandoned,
    AgentsReady,
    AgentsRefused,
    Answer,
    Ask,
    Begin,
    EpisodeReport,
    Frames,
    FromAgents,
    ToAgents,
    Waiting,
    frame,
    from_agents,
)
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.errors import ProcessLost, SettingsRefused

START_S = 180.0
"""Time in which the process has to start, its harness included."""
ABANDON_S = 60.0
"""Time in which running episodes have to be cancelled."""


class AgentProcess:
    """A running process; its output goes to the rank's log.

    Args:
        on_message: called in the reading thread when there are messages to take.
    """

    def __init__(self, settings: EpisodeSettings, on_message: Callable[[], object]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlinf_workers.agents.host", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=same_interpreter(),
            )
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(msgspec.json.encode(settings))
        self._process.stdin.close()
        self._connection, self._on_message = ours, on_message
        self._messages: queue.SimpleQueue[FromAgents | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._is_ready = False
        self.waits_for = ""
        """The episode that has been outside the engine for longest, and what it waits for; may be read in any
        thread."""
        threading.Thread(target=self._read, name="agents", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def begin(self, messages: Sequence[Begin]) -> None:
        """Starts episodes. Raises: as `take`."""
        self._wait_until_ready()
        self._send(messages)

    def answer(self, messages: Sequence[Answer]) -> None:
        """Hands turns to their episodes."""
        self._send(messages)

    def take(self, *, waits: bool) -> list[Ask | EpisodeReport]:
        """The messages that have arrived.

        Args:
            waits: wait for the first.

        Raises:
            ProcessLost: the process has ended.
            SettingsRefused: it cannot start with these settings.
        """
        self._wait_until_ready()
        messages: list[Ask | EpisodeReport] = []
        while True:
            try:
                message = self._next(None if waits and not messages else 0.0)
            except queue.Empty:
                return messages
            if isinstance(message, Ask | EpisodeReport):
                messages.append(message)

    def abandon(self) -> None:
        """Cancels all episodes; none of their messages comes afterwards. Raises: as `take`."""
        number = next(self._numbers)
        self._wait_until_ready()
        self._send([AbandonAll(number=number)])
        while True:
            try:
                message = self._next(ABANDON_S)
            except queue.Empty:
                raise ProcessLost(f"the agent process (pid {self.pid}) does not cancel its episodes") from None
            if isinstance(message, Abandoned) and message.number == number:
                return

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # `close` alone is not seen while the thread receives
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            message = self._next(START_S)
        except queue.Empty:
            raise ProcessLost(f"the agent process (pid {self.pid}) did not start within {START_S:g} s") from None
        if isinstance(message, AgentsRefused):
            raise SettingsRefused(f"the agents cannot run: {message.text}")
        assert isinstance(message, AgentsReady), "the first message"
        self._is_ready = True

    def _next(self, timeout_s: float | None) -> FromAgents:
        message = self._messages.get(timeout=timeout_s) if timeout_s != 0 else self._messages.get_nowait()
        if message is None:
            self._messages.put(None)  # for later calls
            raise ProcessLost(f"the agent process (pid {self.pid}) ended with status {self._process.wait()}")
        return message

    def _send(self, messages: Sequence[ToAgents]) -> None:
        try:
            self._connection.sendall(b"".join(map(frame, messages)))
        except OSError:
            status = self._process.wait()
            raise ProcessLost(f"the agent process (pid {self.pid}) ended with status {status}") from None

    def _read(self) -> None:
        frames = Frames()
        while received := self._received():
            messages = [from_agents(body) for body in frames.feed(received)]
            for message in messages:
                if isinstance(message, Waiting):
                    self.waits_for = message.text
                else:
                    self._messages.put(message)
            if messages:
                self._on_message()
        self._messages.put(None)
        self._on_message()

    def _received(self) -> bytes:
        """Further bytes; b"" at the end."""
        try:
            return self._connection.recv(RECEIVE_BYTES)
        except OSError:
            return b""
