"""The process that runs a rollout rank's episodes, as the rank sees it: its own agent process, or a router that several
ranks share."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rlinf_comm import PeerLost, record
from rlinf_comm.wire import Connection, Deadline, Hello, introduce
from rlinf_workers.agents.interpreters import same_interpreter
from rlinf_workers.agents.link import (
    RECEIVE_BYTES,
    AbandonAll,
    Abandoned,
    AgentsReady,
    AgentsRefused,
    Answer,
    Begin,
    ForRank,
    Frames,
    FromAgents,
    JoinStage,
    NewPicture,
    NoMoreEpisodes,
    StageBroken,
    StageOver,
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
CONNECT_S = 30.0
"""Time in which a router has to answer."""
ROUTER_SERVICE = "router"


class AgentLink:
    """A connection to a process that runs episodes.

    Args:
        on_message: called in the reading thread when there are messages to take.
    """

    pid = 0
    """Of the process; 0: it is on another machine."""

    def __init__(self, on_message: Callable[[], object]) -> None:
        self._on_message = on_message
        self._connection: socket.socket
        self._reading: threading.Thread | None = None
        self._messages: queue.SimpleQueue[FromAgents | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self.waits_for = ""
        """The episode that has been outside the engine for longest, and what it waits for; may be read in any
        thread."""

    def begin(self, messages: Sequence[Begin]) -> None:
        """Starts episodes. Raises: as `take`."""
        self._send(messages)

    def answer(self, messages: Sequence[Answer]) -> None:
        """Hands turns to their episodes."""
        self._send(messages)

    def take(self, *, waits: bool) -> list[ForRank]:
        """The messages that have arrived.

        Args:
            waits: wait for the first.

        Raises: ProcessLost or PeerLost if the process has ended.
        """
        messages: list[ForRank] = []
        while True:
            try:
                message = self._next(None if waits and not messages else 0.0)
            except queue.Empty:
                return messages
            if isinstance(message, ForRank):
                messages.append(message)
            elif self._is_end(message):
                return messages

    def _is_end(self, message: FromAgents) -> bool:
        """Whether nothing follows this message in the stage."""
        return False

    def abandon(self) -> None:
        """Cancels all episodes, or leaves the stage of a router; no message comes afterwards. Raises: as `take`."""
        number = next(self._numbers)
        self._send([AbandonAll(number=number)])
        while True:
            try:
                message = self._next(ABANDON_S)
            except queue.Empty:
                raise ProcessLost(f"the agent process (pid {self.pid}) does not cancel its episodes") from None
            if isinstance(message, Abandoned) and message.number == number:
                return

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # `close` alone is not seen while the thread receives
        self._connection.close()

    def _open(self, connection: socket.socket) -> None:
        """Receives from a new connection."""
        self._connection, self._messages = connection, queue.SimpleQueue()
        arguments = connection, self._messages
        self._reading = threading.Thread(target=self._read, args=arguments, name="agents", daemon=True)
        self._reading.start()

    @property
    def _is_connected(self) -> bool:
        """Whether there is a connection that has not ended."""
        return self._reading is not None and self._reading.is_alive()

    def _lost(self) -> Exception:
        """The error of a connection that has ended."""
        raise NotImplementedError

    def _next(self, timeout_s: float | None) -> FromAgents:
        message = self._messages.get(timeout=timeout_s) if timeout_s != 0 else self._messages.get_nowait()
        if message is None:
            self._messages.put(None)  # for later calls
            raise self._lost()
        return message

    def _send(self, messages: Sequence[ToAgents]) -> None:
        try:
            self._connection.sendall(b"".join(map(frame, messages)))
        except OSError:
            raise self._lost() from None

    def _read(self, connection: socket.socket, messages: queue.SimpleQueue[FromAgents | None]) -> None:
        frames = Frames()
        while received := _received(connection):
            decoded = [from_agents(body) for body in frames.feed(received)]
            for message in decoded:
                if isinstance(message, Waiting):
                    self.waits_for = message.text
                else:
                    messages.put(message)
            if decoded:
                self._on_message()
        messages.put(None)
        self._on_message()


def _received(connection: socket.socket) -> bytes:
    """Further bytes; b"" at the end."""
    try:
        return connection.recv(RECEIVE_BYTES)
    except OSError:
        return b""


class AgentProcess(AgentLink):
    """A running process of this rank; its output goes to the rank's log.

    Args:
        on_message: as in AgentLink.
    """

    def __init__(self, settings: EpisodeSettings, on_message: Callable[[], object]) -> None:
        super().__init__(on_message)
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
        self.pid = self._process.pid
        self._is_ready = False
        self._open(ours)

    def begin(self, messages: Sequence[Begin]) -> None:
        self._wait_until_ready()
        super().begin(messages)

    def take(self, *, waits: bool) -> list[ForRank]:
        """As in AgentLink. Raises: SettingsRefused too, if the process cannot start with these settings."""
        self._wait_until_ready()
        return super().take(waits=waits)

    def abandon(self) -> None:
        self._wait_until_ready()
        super().abandon()

    def close(self) -> None:
        """Ends the process."""
        super().close()
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

    def _lost(self) -> Exception:
        return ProcessLost(f"the agent process (pid {self.pid}) ended with status {self._process.wait()}")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class RouterAddress:
    """Where ranks reach a router."""

    host: str
    port: int
    key: bytes
    """Both ends of a connection prove that they know it."""
    hostname: str
    """Of its machine."""
    pid: int


class RouterLink(AgentLink):
    """A connection to the router that this rank shares with others, made for its first stage and anew after a loss.

    Args:
        name: of this rank.
        address: asks for the router's address; None: it was lost.
        on_message: as in AgentLink.
    """

    def __init__(
        self, name: str, address: Callable[[], RouterAddress | None], on_message: Callable[[], object]
    ) -> None:
        super().__init__(on_message)
        self._name, self._address = name, address
        self._stage = ""
        self.is_over = True
        """Whether the episodes of all ranks in this stage are over."""

    def join(self, stage: str, num_ranks: int) -> bool:
        """Samples turns of a stage from here on (`JoinStage`). Returns whether it did not yet. Raises: PeerLost."""
        if stage == self._stage and not self.is_over:
            return False
        if not self._is_connected:
            self._connect()
        self._stage, self.is_over = stage, False
        self._send([JoinStage(stage=stage, num_ranks=num_ranks)])
        return True

    def send_picture(self, picture: NewPicture) -> None:
        """Sends what a `PictureRequest` names."""
        self._send([picture])

    def no_more(self) -> None:
        """This rank begins no further episodes in the stage."""
        self._send([NoMoreEpisodes()])

    def abandon(self) -> None:
        """Leaves the stage, whose episodes stay in the router."""
        if self._is_connected and not self.is_over:
            with contextlib.suppress(PeerLost):
                super().abandon()
        self.is_over = True

    def close(self) -> None:
        if self._is_connected:
            super().close()

    def _is_end(self, message: FromAgents) -> bool:
        if isinstance(message, StageBroken):
            raise PeerLost(message.text)
        self.is_over = isinstance(message, StageOver)
        return self.is_over

    def _connect(self) -> None:
        address = self._address()
        if address is None:
            raise PeerLost("the router was lost before it could be reached")
        deadline = Deadline(CONNECT_S)
        connection = Connection.open((address.host, address.port), address.key, "the router", deadline)
        introduce(connection, Hello(service=ROUTER_SERVICE, name=self._name), deadline)
        connected = connection.without_tags().socket
        connected.settimeout(None)
        self.pid = address.pid if address.hostname == socket.gethostname() else 0
        self._open(connected)

    def _lost(self) -> Exception:
        AgentLink.close(self)
        if self._reading is not None:
            self._reading.join()
        return PeerLost("the connection to the router has ended")
