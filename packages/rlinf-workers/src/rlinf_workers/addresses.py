"""The nodes of a run, and the address at which others reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

DRIVERS_NODE = 0
"""The driver's node, as the cluster counts them."""
LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "RLINF_NODE_ADDRESS"
"""Set by a launcher in the driver and in each worker; differs between nodes."""
ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Env vars that make ranks on one machine listen at its loopback address, not at the address of its host name."""
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface."""


def own_address() -> str:
    """The address set by the launcher, which has seen the machine in its network; otherwise that of the host name."""
    return os.environ.get(ADDRESS_VARIABLE) or socket.gethostbyname(socket.gethostname())


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None: there is none."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
