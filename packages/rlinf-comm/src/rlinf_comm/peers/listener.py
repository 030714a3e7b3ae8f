"""Where other peers call: a listening socket, and a thread for each call until a link has come of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from rlinf_comm.errors import CommError
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.line import Line, Stranger, watched

_LOG = logging.getLogger(__name__)

_PROOF_TIMEOUT_S = 5.0
"""For a stranger to say who he is."""
_MAX_CALLS = 64
"""Threads that talk to callers at once; more wait."""


class Listener:
    """Accepts calls until it is closed."""

    def __init__(self, host: str, token: bytes, meet: Callable[[Line], None]) -> None:
        """Binds at once; `meet` gets each proven line, from start() on, and owns it."""
        self._token = token
        self._meet = meet
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = watched(socket.create_server((host, 0), family=family, backlog=128))
        self._calls = threading.BoundedSemaphore(_MAX_CALLS)
        self._is_open = True

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._accept, name="rlinf-comm listener", daemon=True).start()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if not self._is_open:
                    return
                _LOG.warning("a connection was not accepted: %s", error)
                continue
            self._calls.acquire()
            threading.Thread(target=self._serve, args=(connected,), name="rlinf-comm call", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            line = Line(connected)
            try:
                line.accept(self._token, Deadline(_PROOF_TIMEOUT_S))
                self._meet(line)
            except (CommError, Stranger, OSError) as error:
                line.close()
                if self._is_open:
                    _LOG.warning("a caller was turned away: %s", error)
        finally:
            self._calls.release()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept
            except OSError:
                pass  # it had ended by itself
            self._socket.close()
