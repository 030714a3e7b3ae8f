"""The rows of one connection to a simulator server, in place of a child process of a `SubprocessVector`.

A thread of this process answers the vector's commands by calls to the server. So a remote simulator that is killed,
hangs or cannot be reached is replaced by the code that replaces a child process: the thread and the connection end, a
new one replays the episodes and repeats the command.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

from rlinf_envs.adapters.remote.connection import ServerConnection, addresses
from rlinf_envs.adapters.remote.opening import opened
from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.protocol import BatchedEnv
from rlinf_envs.core.simulator_process import SimulatorHandle, SimulatorLost
from rlinf_envs.core.subprocess_child import CommandedEnv, answered

_TURNS = itertools.count(os.getpid())
"""Counts the connections of this process; the first addresses of processes differ."""


class RemoteSimulator(SimulatorHandle):
    """Connections use the addresses of an id in turn, and so does one in place of another that was lost."""

    elsewhere = "over a new connection"
    _link: _Link

    @property
    def where(self) -> str:
        return f"the simulator of {self._rows_text} at {self._link.server.address}"

    def _start(self) -> None:
        names = addresses(self.spec.id)
        server = ServerConnection(names[next(_TURNS) % len(names)], _secret_file(self.spec))
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        env = _RemoteEnv(server, self.memory_fd, self._pictures_fd)
        self._link = _Link(server, env, Connection(theirs.detach()))

    def _kill(self) -> None:
        self._link.server.abort()
        self._link.thread.join()
        self._link.server.close()
        self.connection.close()

    def _wait_for_end(self, patience_s: float) -> None:
        self._link.thread.join(patience_s)

    def _how_it_ended(self) -> str:
        return self._link.reason


class _Link:
    """A connection to the server and the thread that uses it."""

    def __init__(self, server: ServerConnection, env: CommandedEnv, commands: Connection) -> None:
        self.server = server
        self.reason = "was lost"
        """Why the connection broke."""
        self._env, self._commands = env, commands
        self.thread = threading.Thread(target=self._serve, name=f"rlinf-remote-{server.address}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self._commands:
            while True:
                try:
                    command, arguments = self._commands.recv()
                    self._commands.send(answered(self._env, command, arguments))
                except (EOFError, OSError):  # the vector is gone, or has given up this link
                    return
                except SimulatorLost as lost:
                    self.reason = str(lost)
                    return
                if command == "close":
                    return


class _RemoteEnv(CommandedEnv):
    """Creates its environments over a connection."""

    def __init__(self, server: ServerConnection, memory_fd: int, pictures_fd: int | None) -> None:
        super().__init__(memory_fd, pictures_fd)
        self._server = server

    def _created(self, spec: EnvSpec) -> BatchedEnv:
        options: dict[str, Any] = dict(spec.options)
        options.pop("secret_file", None)
        return opened(
            self._server,
            spec.num_envs,
            max_episode_steps=spec.max_episode_steps,
            ignore_terminations=spec.ignore_terminations,
            picture_layout=options.pop("picture_layout", None),
            options=options,
        )


def _secret_file(spec: EnvSpec) -> str | None:
    path = spec.options.get("secret_file")
    return None if path is None else str(path)
