"""Who a peer is, and where it can be met."""

from __future__ import annotations

import functools
import os
import pathlib
from dataclasses import dataclass

from rlinf_comm import _C
from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class HostIdentity:
    """The machine that a process runs on, and what of it the process sees."""

    boot_id: str
    """Random for each boot of a kernel: equal on the same machine, in all of its containers."""
    network_namespace: int
    pid_namespace: int

    def difference_to(self, other: HostIdentity) -> str | None:
        """Why memory cannot be shared with `other` by the segments' hand-over; None when nothing speaks against it."""
        if self.boot_id != other.boot_id:
            return f"another host (boot id {other.boot_id[:8]}, here {self.boot_id[:8]})"
        if self.network_namespace != other.network_namespace:
            return f"another network namespace ({other.network_namespace}, here {self.network_namespace})"
        return None


@functools.cache
def this_host() -> HostIdentity:
    """Returns the identity of this host: its boot and the namespaces of this process."""
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network, pid = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))
    return HostIdentity(boot_id=boot_id, network_namespace=network, pid_namespace=pid)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAddress:
    """How to meet one peer. Small; pack it, pickle it, or leave it to a directory.

    It holds no secret: whoever wants to connect has to know that of the job (secret.py).
    """

    name: str
    host: HostIdentity
    pid: int
    start_ticks: int
    """Start time of that process, which tells it from a later one with its pid."""
    endpoint: tuple[str, int]
    """Host and TCP port it listens on."""
    incarnation: bytes
    """16 random bytes, which tell this process under the name from others before and after it."""

    def __repr__(self) -> str:
        host, port = self.endpoint
        return f"<PeerAddress {self.name!r}: process {self.pid} at {host}:{port}>"

    @property
    def place(self) -> str:
        """The peer's process and host, for messages."""
        same_host = self.host.boot_id == this_host().boot_id
        return f"process {self.pid} on " + ("this host" if same_host else f"the host of {self.endpoint[0]}")

    def is_known_dead(self) -> bool:
        """Whether the process is gone for sure, as far as this host's process table tells."""
        here = this_host()
        if (self.host.boot_id, self.host.pid_namespace) != (here.boot_id, here.pid_namespace):
            return False
        return not _C.is_alive(self.pid, self.start_ticks)


def own_address(name: str, endpoint: tuple[str, int] = ("", 0), incarnation: bytes | None = None) -> PeerAddress:
    """The address of this process under a name; without an endpoint nobody can call it."""
    pid, start_ticks = _C.current_process()
    return PeerAddress(
        name=name,
        host=this_host(),
        pid=pid,
        start_ticks=start_ticks,
        endpoint=endpoint,
        incarnation=incarnation or os.urandom(16),
    )


def check_arguments(name: str, host: str, capacity_bytes: int) -> None:
    """Raises ValueError for what a peer cannot be made of."""
    if not name:
        raise ValueError("name=''; a peer needs a name, say 'trainer/0'")
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"peer {name!r}: host={host!r} is no address that others can call; give one of this host's")
    if capacity_bytes < 1 << 16:
        raise ValueError(f"peer {name!r}: capacity_bytes={capacity_bytes}; at least 65536")
