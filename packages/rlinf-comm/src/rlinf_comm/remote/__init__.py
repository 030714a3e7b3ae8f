"""Channels for processes of other hosts: a server beside the channel (server.py), and the other side (client.py)."""

from __future__ import annotations

from rlinf_comm.remote.address import ServerAddress
from rlinf_comm.remote.server import ChannelServer
from rlinf_comm.remote.serving import ServerTraffic

__all__ = ["ChannelServer", "ServerAddress", "ServerTraffic"]
