"""The address of a channel for processes of other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm.records import record
from rlinf_comm.wire.address import PeerAddress


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """The address with which a process of the job opens a channel from anywhere. Valid while its ChannelServer lives.
    No secret."""

    server: PeerAddress
    """The process that serves it; its name is the channel's."""
    checked: bool
    """Whether items carry a digest from the producer to the consumer."""

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def creator_pid(self) -> int:
        """The pid of the process that holds the channel, on its host."""
        return self.server.pid
