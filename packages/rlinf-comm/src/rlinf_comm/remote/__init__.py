"""Channels for processes of other hosts: a channel server (server.py), and its client (client.py)."""

from __future__ import annotations

from rlinf_comm.remote.address import ServerAddress
from rlinf_comm.remote.server import ChannelServer
from rlinf_comm.remote.serving import ServerTraffic

__all__ = ["ChannelServer", "ServerAddress", "ServerTraffic"]
