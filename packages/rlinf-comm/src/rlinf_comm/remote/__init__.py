"""Channels for processes of other hosts: a door beside the channel (door.py), and its other side (channel.py)."""

from __future__ import annotations

from rlinf_comm.remote.address import DoorAddress
from rlinf_comm.remote.channel import RemoteChannel
from rlinf_comm.remote.door import ChannelDoor, DoorTraffic

__all__ = ["ChannelDoor", "DoorAddress", "DoorTraffic", "RemoteChannel"]
