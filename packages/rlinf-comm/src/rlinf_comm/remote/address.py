"""How a process of another host finds a channel."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.peers.address import PeerAddress
from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class DoorAddress:
    """How a process of the job opens a channel from anywhere. Valid while the ChannelDoor lives. It holds no secret."""

    door: PeerAddress
    """The process that serves it; its name is the channel's."""
    checked: bool
    """Whether items carry a digest from the producer to the consumer."""

    @property
    def name(self) -> str:
        return self.door.name
