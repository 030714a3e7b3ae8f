"""The place where others call: a listening socket, and one thread that lets in those who prove that they know the key.

All callers that have proven nothing yet are heard by turns, a few bytes at a time, so that none of them holds up
another: idle ones, slow ones, and those who talk of something else. Each has PROOF_TIMEOUT_S and 56 bytes of memory;
beyond _MAX_UNPROVEN of them, one has to go: the oldest of the address with the most, and of those who have not greeted
while there are any. So a flood of strangers drives out strangers: the greeting of a peer comes with its connection.
Who has proven gets a thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlinf_comm.errors import CommError, DecodeError
from rlinf_comm.wire.connection import Connection, prepare, watched
from rlinf_comm.wire.handshake import (
    GREETING,
    MAGIC,
    PROOF_BYTES,
    PROOF_TIMEOUT_S,
    Stranger,
    Tags,
    check_greeting,
    check_proof,
    new_greeting,
    proof,
)
from rlinf_comm.wire.limited_log import LimitedLog

_LOG = logging.getLogger(__name__)

_MAX_UNPROVEN = 64
"""A peer proves itself within one round trip, so that these are strangers, or a whole cluster that starts at once."""

_BACKLOG = 4096
"""Connections that the system keeps until they are accepted, as many as Linux allows by default: where there is no room
for a peer, behind a burst of strangers, it tries again after a second. All who wait here are accepted within a tenth of
one."""

_ACCEPTS_IN_A_ROW = 8
"""Connections that are accepted before those who are there are heard again."""

_IDLE_S = 60.0
"""When nobody calls, it looks this often whether lines were left out of the log."""

_END_TIMEOUT_S = 5.0
"""For the thread to see that it is closed, which takes it no time unless the machine is very busy."""

_PAUSE_S = 0.05
"""Pause after a call that could not be accepted, say because the system has no descriptors left."""


@dataclass(slots=True, eq=False)
class _Caller:
    """Somebody who has proven nothing."""

    socket: socket.socket
    host: str
    end_s: float
    """The time at which it must have proven itself."""
    heard: bytearray = field(default_factory=bytearray)
    greetings: bytes = b""
    """Its own and ours, once it has greeted."""
    is_here: bool = True
    """False: it was turned away, or let in."""


class Listener:
    """Accepts calls until it is closed."""

    def __init__(self, endpoint: tuple[str, int], key: bytes, enter: Callable[[Connection], None], whose: str) -> None:
        """Binds exactly this endpoint at once (port 0: any). From start() on, `enter` gets each proven line in a thread
        of its own, and owns it; `whose` is for the log.
        """
        self._key = key
        self._enter = enter
        self._whose = whose
        host, port = endpoint
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = watched(socket.create_server((host, port), family=family, backlog=_BACKLOG))
        self._socket.setblocking(False)
        self._callers: list[_Caller] = []
        """Callers that have proven nothing yet, the oldest first."""
        self._selector = selectors.PollSelector()  # epoll's would be shared with forked children
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._log = LimitedLog(_LOG)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="rlinf-comm listener", daemon=True)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the rest
        except OSError:
            pass  # it had ended by itself
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_TIMEOUT_S)  # else it might yet wait at the descriptor, which may be another's soon
        self._socket.close()

    def _run(self) -> None:
        while self._is_open:
            ready = self._selector.select(self._wait_s())
            self._log.sum_up()
            for key, _ in ready:
                if key.data is None:
                    self._accept_those_who_wait()
                elif key.data.is_here:  # else it had to go a moment ago
                    self._hear(key.data)
            now_s = time.monotonic()
            for late in [caller for caller in self._callers if caller.end_s <= now_s]:
                self._turn_away(late, f"it has not proven who it is within {PROOF_TIMEOUT_S:g} s")
        for caller in self._callers:
            caller.socket.close()

    def _wait_s(self) -> float:
        return max(self._callers[0].end_s - time.monotonic(), 0.0) if self._callers else _IDLE_S

    def _accept_those_who_wait(self) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                connected, (host, *_) = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._is_open:
                    self._log.warn(f"{self._whose}: a connection was not accepted: {error.strerror or error}")
                    time.sleep(_PAUSE_S)
                return
            connected.setblocking(False)
            caller = _Caller(watched(connected), host, time.monotonic() + PROOF_TIMEOUT_S)
            self._callers.append(caller)
            self._selector.register(connected, selectors.EVENT_READ, caller)
            self._hear(caller)  # a peer's greeting is mostly here already
            if len(self._callers) > _MAX_UNPROVEN:
                self._turn_one_away()

    def _turn_one_away(self) -> None:
        silent = [caller for caller in self._callers if not caller.greetings] or self._callers
        hosts = [caller.host for caller in silent]
        most = max(set(hosts), key=hosts.count)
        self._turn_away(
            silent[hosts.index(most)], f"more than {_MAX_UNPROVEN} callers have proven nothing, it is the oldest there"
        )

    def _hear(self, caller: _Caller) -> None:
        try:
            connection = self._next_step(caller)
        except BlockingIOError:
            return
        except (Stranger, DecodeError) as error:
            self._turn_away(caller, str(error))
        except OSError as error:
            self._turn_away(caller, f"the connection broke: {error.strerror or error}")
        else:
            if connection is not None:
                self._forget(caller)
                self._let_in(connection)

    def _next_step(self, caller: _Caller) -> Connection | None:
        """The connection, once it has proven that it knows the key."""
        num_wanted = PROOF_BYTES if caller.greetings else GREETING.size
        received = caller.socket.recv(num_wanted - len(caller.heard))
        if not received:
            raise Stranger(f"it hung up after {len(caller.heard) + len(caller.greetings) // 2} bytes")
        caller.heard += received
        if len(caller.heard) < num_wanted:
            return None
        message, caller.heard = bytes(caller.heard), bytearray()
        if not caller.greetings:
            mine = new_greeting()
            if message.startswith(MAGIC):
                caller.socket.send(mine)  # also to another version, which then can say so; a fresh socket takes it
            check_greeting(message, f"a caller from {caller.host}")
            caller.greetings = message + mine
            return None
        check_proof(message, self._key, caller.greetings, b"caller")
        caller.socket.send(proof(self._key, caller.greetings, b"called"))
        return Connection(
            prepare(caller.socket), f"a caller from {caller.host}", Tags(self._key, caller.greetings, b"called")
        )

    def _forget(self, caller: _Caller) -> None:
        caller.is_here = False
        self._callers.remove(caller)
        self._selector.unregister(caller.socket)

    def _turn_away(self, caller: _Caller, why: str) -> None:
        self._log.warn(f"{self._whose}: a caller from {caller.host} was turned away: {why}")
        self._forget(caller)
        caller.socket.close()

    def _let_in(self, connection: Connection) -> None:
        try:
            threading.Thread(target=self._serve, args=(connection,), name="rlinf-comm call", daemon=True).start()
        except RuntimeError as error:  # no more threads; others may come once some have ended
            connection.shut()
            self._log.warn(f"{self._whose}: no link with a caller: {error}")

    def _serve(self, connection: Connection) -> None:
        try:
            self._enter(connection)
        except (CommError, OSError) as error:
            connection.shut()
            if self._is_open:
                _LOG.warning("%s: no link with a caller: %s", self._whose, error)
        except BaseException:  # a mistake of this program's must not leave the caller hanging
            connection.shut()
            raise
