"""Serves a router to rollout ranks, on this machine and others: an event loop in a thread, and who may connect."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future

from rlinf_comm.wire import Connection, Deadline, Hello, Listener, accept_handshake, send_hello
from rlinf_workers.agents.host import AgentHost, MessageWriter, messages_of_rank, reason_of
from rlinf_workers.agents.link import AbandonAll, Answer, Begin, JoinStage, NewPicture, NoMoreEpisodes
from rlinf_workers.agents.process import CONNECT_S, ROUTER_SERVICE, RouterAddress
from rlinf_workers.agents.router import RankLink, Router
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.errors import SettingsRefused

_LOG = logging.getLogger(__name__)
STOP_S = 5.0
"""Time in which episodes have to be cancelled at the end."""


class RouterServer:
    """Runs the episodes of ranks until it is closed.

    Args:
        host: the address of this machine to listen at.

    Raises: SettingsRefused if the agents cannot run.
    """

    def __init__(self, settings: EpisodeSettings, host: str) -> None:
        self._settings, self._router = settings, Router()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._started: Future[None] = Future()
        self._serving: set[asyncio.Task[None]] = set()
        """One for each connection; a stream ends if nothing else refers to its task."""
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except Exception as error:
            raise SettingsRefused(f"the agents cannot run: {reason_of(error)}") from error
        key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), key, self._let_in, "the router")
        self._listener.start()
        self.address = RouterAddress(
            host=host, port=self._listener.port, key=key, hostname=socket.gethostname(), pid=os.getpid()
        )

    def close(self) -> None:
        """Cancels all episodes."""
        self._listener.close()
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        try:
            host = self._router.episodes = AgentHost(self._settings, self._router.heard)
            await host.start()
        except Exception as error:  # noqa: BLE001 - reported by the constructor
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopped.wait()
        await host.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _let_in(self, connection: Connection) -> None:
        """Serves a caller that has proven that it knows the key, in the event loop."""
        deadline, own = Deadline(CONNECT_S), Hello(service=ROUTER_SERVICE)
        hello = accept_handshake(connection, own, deadline)
        send_hello(connection, own, deadline)
        self._loop.call_soon_threadsafe(self._begin_serving, connection.without_tags().socket, hello.name)

    def _begin_serving(self, connected: socket.socket, name: str) -> None:
        task = self._loop.create_task(self._serve_rank(connected, name))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_rank(self, connected: socket.socket, name: str) -> None:
        router = self._router
        connected.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connected)
        rank = RankLink(name, MessageWriter(writer).send)
        try:
            async for message in messages_of_rank(reader):
                match message:
                    case JoinStage():
                        await router.join(rank, message)
                    case Begin():
                        router.begin(rank, message)
                    case Answer():
                        router.answer(rank, message)
                    case NoMoreEpisodes():
                        router.no_more(rank)
                    case NewPicture():
                        router.take_picture(message)
                    case AbandonAll(number=number):
                        router.leave(rank, number)
        except Exception:
            _LOG.exception("%s: its connection ends", name)
            raise
        finally:
            router.lost(rank)
            writer.close()
