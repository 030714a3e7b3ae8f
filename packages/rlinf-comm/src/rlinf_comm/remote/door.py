"""The door of a channel: where processes of other hosts reach it.

    door = ChannelDoor(channel, host="10.0.0.1")          # in the process that created the channel
    far = RemoteChannel.open(door.address)                 # in any process of the job

Each caller has a thread of the door's, which does with the channel what the caller asks for: it waits in the channel's
own put and take, so that bounds, shares of keys, order, and who waits for whom are those of a producer or consumer
of this host. What a caller has put, and the door has not got into the channel yet, waits here: one item that its caller
waits for, and the items that were put without waiting, for which there was room when the door granted it (`_grant`).

A value is not decoded on its way in: it goes into the channel as it came (_carried.py).
"""

from __future__ import annotations

import logging
import os
import threading

from rlinf_comm import _C
from rlinf_comm.channel import Channel
from rlinf_comm.errors import CommError, PeerLeft, PeerLost
from rlinf_comm.peers.address import PeerAddress, check_arguments, this_host
from rlinf_comm.peers.deadline import Deadline
from rlinf_comm.peers.line import Line, peer_key
from rlinf_comm.peers.meeting import Hello
from rlinf_comm.peers.peer import DEFAULT_CAPACITY_BYTES
from rlinf_comm.peers.reception import Reception
from rlinf_comm.peers.secret import require_secret_beyond
from rlinf_comm.remote.address import DoorAddress
from rlinf_comm.remote.messages import Enter
from rlinf_comm.remote.visit import DoorTraffic, Guest, Visit
from rlinf_comm.remote.wire import Wire

_LOG = logging.getLogger(__name__)

_MEETING_TIMEOUT_S = 30.0


class ChannelDoor:
    """Serves one channel to processes that cannot share its memory, until it is closed or its process ends."""

    def __init__(self, channel: Channel, *, host: str = "127.0.0.1") -> None:
        """Listens at exactly this address of the machine, on a port of the system's choice.

        Raises:
            ValueError: another process created the channel, or `host` is no address that others can call.
            NotTrusted: others could call, and the job has no secret that was set.
        """
        if channel._owner_pid != os.getpid():
            raise ValueError(f"channel {channel.name!r}: its door stands in the process that created it")
        check_arguments(channel.name, host, DEFAULT_CAPACITY_BYTES)
        whose = f"the door of channel {channel.name!r}"
        require_secret_beyond(host, whose)
        self._channel = channel
        self._lock = threading.Lock()
        self._guests: dict[bytes, Guest] = {}
        """By incarnation, while they have a line."""
        self._lost: dict[bytes, PeerAddress] = {}
        self._visits: set[Visit] = set()
        self._is_open = True
        self.traffic = DoorTraffic()
        if channel._raises_on_loss:
            channel._elsewhere = self
        incarnation = os.urandom(16)
        self._reception = Reception((host, 0), peer_key(incarnation), self._meet, whose)
        pid, start_ticks = _C.current_process()
        self._address = PeerAddress(
            name=channel.name,
            host=this_host(),
            pid=pid,
            start_ticks=start_ticks,
            endpoint=(host, self._reception.port),
            incarnation=incarnation,
        )
        self._reception.start()

    @property
    def address(self) -> DoorAddress:
        return DoorAddress(door=self._address, checked=self._channel._is_checked)

    def __repr__(self) -> str:
        host, port = self._address.endpoint
        return f"<ChannelDoor of {self._address.name!r} at {host}:{port}{'' if self._is_open else ', closed'}>"

    def __enter__(self) -> ChannelDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets nobody in any more, and ends what callers wait for with PeerLeft. The channel itself stays as it is."""
        self._is_open = False
        self._reception.close()
        with self._lock:
            visits = list(self._visits)
        for visit in visits:
            visit.stop()

    # --- who was lost (channel.Elsewhere) ---

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

    def _meet(self, line: Line) -> None:
        deadline = Deadline(_MEETING_TIMEOUT_S)
        caller = line.hear(Hello, deadline).caller
        counts = self._channel.stats()
        line.tell(Enter(counts.capacity_items, counts.capacity_bytes, counts.num_keys), deadline)
        visit = Visit(
            self._channel,
            Wire(line, caller),
            self._come(caller),
            self.traffic,
            num_producers=self._num_producers,
            check_others=self.check if self._channel._raises_on_loss else None,
        )
        with self._lock:
            self._visits.add(visit)
        loss: Exception | None = None
        try:
            visit.serve()
        except PeerLeft:
            pass
        except (CommError, OSError) as error:
            loss = error
        finally:
            visit.wire.shut(farewell=False)
            self._go(visit, loss if self._is_open else None)

    def _come(self, caller: PeerAddress) -> Guest:
        with self._lock:
            guest = self._guests.setdefault(caller.incarnation, Guest(caller))
            guest.num_lines += 1
        return guest

    def _go(self, visit: Visit, loss: Exception | None) -> None:
        guest = visit.guest
        with self._lock:
            self._visits.discard(visit)
            guest.num_lines -= 1
            if not guest.num_lines:
                self._guests.pop(guest.address.incarnation, None)
            is_told = self._channel._raises_on_loss  # where nobody is, nobody would take it out again
            if loss is not None and is_told and (guest.is_missed or visit.wire.is_amid_a_message):
                self._lost[guest.address.incarnation] = guest.address
        if loss is not None:
            _LOG.warning("the door of channel %r: %s", self._channel.name, loss)

    def _num_producers(self) -> int:
        with self._lock:
            return sum(guest.has_put for guest in self._guests.values())
