"""The server of a channel: where processes of other hosts reach it.

    server = ChannelServer(channel, host="10.0.0.1")        # in the process that created the channel
    channel = Channel.open(server.address)                  # in any process of the job

Each client has a thread of the server's, which does with the channel what the client asks for: it waits in the
channel's own put and take, so that bounds, shares of keys, order, and who waits for whom are those of a producer or
consumer of this host. What a client has put, and is not in the channel yet, waits here: one item that its client waits
for, and the items that were put without waiting, for which there was room when the server granted it (`_grant`).

A value is not decoded on its way in: it goes into the channel as it came (_carried.py).
"""

from __future__ import annotations

import logging
import os
import threading

import msgspec

from rlinf_comm.channel import Channel, SharedBackEnd
from rlinf_comm.errors import CommError, DecodeError, PeerLeft, PeerLost
from rlinf_comm.peers.peer import DEFAULT_CAPACITY_BYTES
from rlinf_comm.remote.address import ServerAddress
from rlinf_comm.remote.exchange import Exchange
from rlinf_comm.remote.messages import SERVICE, Enter
from rlinf_comm.remote.serving import Client, ServedConnection, ServerTraffic
from rlinf_comm.wire.address import PeerAddress, check_arguments, own_address
from rlinf_comm.wire.connection import Connection, peer_key
from rlinf_comm.wire.deadline import Deadline
from rlinf_comm.wire.handshake import Hello, accept_handshake, send_hello
from rlinf_comm.wire.listener import Listener
from rlinf_comm.wire.secret import require_secret_beyond

_LOG = logging.getLogger(__name__)

_MEETING_TIMEOUT_S = 30.0


class ChannelServer:
    """Serves one channel to processes that cannot share its memory, until it is closed or its process ends."""

    def __init__(self, channel: Channel, *, host: str = "127.0.0.1") -> None:
        """Listens at exactly this address of the machine, on a port of the system's choice.

        Raises:
            ValueError: another process created the channel, or `host` is no address that others can call.
            NotTrusted: others could call, and the job has no secret that was set.
        """
        back_end = channel._back_end
        if not isinstance(back_end, SharedBackEnd) or back_end.owner_pid != os.getpid():
            raise ValueError(f"channel {channel.name!r}: its server is made in the process that created it")
        check_arguments(channel.name, host, DEFAULT_CAPACITY_BYTES)
        whose = f"the server of channel {channel.name!r}"
        require_secret_beyond(host, whose)
        self._channel, self._back_end = channel, back_end
        self._lock = threading.Lock()
        self._clients: dict[bytes, Client] = {}
        """By incarnation, while they have a connection."""
        self._lost: dict[bytes, PeerAddress] = {}
        self._connections: set[ServedConnection] = set()
        self._is_open = True
        self.traffic = ServerTraffic()
        if back_end.raises_on_loss:
            back_end.remote_users = self
        incarnation = os.urandom(16)
        self._listener = Listener((host, 0), peer_key(incarnation), self._meet, whose)
        self._address = own_address(channel.name, (host, self._listener.port), incarnation)
        self._listener.start()

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(server=self._address, checked=self._channel._is_checked)

    def __repr__(self) -> str:
        host, port = self._address.endpoint
        return f"<ChannelServer of {self._address.name!r} at {host}:{port}{'' if self._is_open else ', closed'}>"

    def __enter__(self) -> ChannelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets nobody in any more, and ends what callers wait for with PeerLeft. The channel itself stays as it is."""
        self._is_open = False
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for served in connections:
            served.stop()

    # --- who was lost (channel.RemoteUsers) ---

    def check(self) -> None:
        """Raises PeerLost when a caller has died that used the channel and had not left it."""
        with self._lock:
            lost = list(self._lost.values())
        if lost:
            raise PeerLost(
                f"the take has to wait, but {', '.join(f'{who.name} ({who.place})' for who in lost)} died without "
                "leaving the channel; drop_lost_peers() goes on with the rest, abort(reason) ends it for all, and "
                "lost_peers='tolerate' at its creation waits for a replacement",
                pids=tuple(who.pid for who in lost),
            )

    def drop(self) -> list[int]:
        """Goes on without those that were lost; their pids, each on its host."""
        with self._lock:
            lost, self._lost = self._lost, {}
        return [who.pid for who in lost.values()]

    # --- callers ---

    def _meet(self, connection: Connection) -> None:
        deadline = Deadline(_MEETING_TIMEOUT_S)
        hello, counts = accept_handshake(connection, Hello(service=SERVICE), deadline), self._channel.stats()
        if hello.caller is None or hello.name != self._channel.name:
            send_hello(connection, Hello(refusal=f"this is channel {self._channel.name!r}"), deadline)
            raise DecodeError(f"{connection.who} wants channel {hello.name!r}")
        entered = Enter(counts.capacity_items, counts.capacity_bytes, counts.num_keys)
        send_hello(connection, Hello(service=SERVICE, details=msgspec.msgpack.encode(entered)), deadline)
        caller = hello.caller
        served = ServedConnection(
            self._channel,
            self._back_end,
            Exchange(connection, caller),
            self._come(caller),
            self.traffic,
            num_producers=self._num_producers,
            check_others=self.check if self._back_end.raises_on_loss else None,
        )
        with self._lock:
            self._connections.add(served)
        loss: Exception | None = None
        try:
            served.serve()
        except PeerLeft:
            pass
        except (CommError, OSError) as error:
            loss = error
        finally:
            served.exchange.shut(farewell=False)
            self._go(served, loss if self._is_open else None)

    def _come(self, caller: PeerAddress) -> Client:
        with self._lock:
            client = self._clients.setdefault(caller.incarnation, Client(caller))
            client.num_connections += 1
        return client

    def _go(self, served: ServedConnection, loss: Exception | None) -> None:
        client = served.client
        with self._lock:
            self._connections.discard(served)
            client.num_connections -= 1
            if not client.num_connections:
                self._clients.pop(client.address.incarnation, None)
            is_reported = self._back_end.raises_on_loss  # where nobody is, nobody would take it out again
            if loss is not None and is_reported and (client.is_missed or served.exchange.is_amid_a_message):
                self._lost[client.address.incarnation] = client.address
        if loss is not None:
            _LOG.warning("the server of channel %r: %s", self._channel.name, loss)

    def _num_producers(self) -> int:
        with self._lock:
            return sum(client.has_put for client in self._clients.values())
