"""How a process of another host finds a channel."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.records import record
from rlinf_comm.wire.address import PeerAddress


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """How a process of the job opens a channel from anywhere. Valid while its ChannelServer lives. No secret."""

    server: PeerAddress
    """The process that serves it; its name is the channel's."""
    checked: bool
    """Whether items carry a digest from the producer to the consumer."""

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def creator_pid(self) -> int:
        """The process that the channel lives in, as its host counts them."""
        return self.server.pid
