"""Keeps other users of this machine out of gloo process groups.

Gloo does not authenticate its peers. Until a group is destroyed, each of its ranks listens at a TCP port, which every
user of the machine can see. Whoever connects first and sends a small number is taken for another rank: it receives that
rank's share of the gradients, and its numbers are added to them. Unused connections stay open, too, until the process
has no descriptors left and is aborted.

So when a group is created, before anything is sent through it, each rank looks up the owners of its new connections'
other ends in the kernel's table, and refuses the group if one belongs to another user. Then it closes its port: a
filter drops whatever else is sent there. Another user can still connect while the ranks connect, which ends the run
with an error that says so. Connections from other machines are not checked: their network has to be closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import logging
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rlinf_workers.errors import WorkersError

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
NUM_LOOKS = 3
"""How often a table is read, since a read may miss a line if the table changes meanwhile."""
NUM_DESCRIPTORS = 1 << 16
"""Descriptor limit of a process with groups, if the system allows it: 1,024, the usual limit, is soon used up while
anybody may connect."""
_MAPPED = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address in the IPv6 table."""
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A packet filter (struct sock_filter) of one instruction: return 0 bytes of the packet."""
_TIMEVAL_BYTES = 16
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """A TCP connection of this process, with both ends as (address, port)."""

    local: tuple[str, int]
    remote: tuple[str, int] | None
    """None: it is no longer connected."""

    @property
    def other_end(self) -> str:
        """The key of the other end's socket in `users_of_ends`."""
        return "" if self.remote is None else f"{_in_table(self.remote)} {_in_table(self.local)}"

    @property
    def own_end(self) -> str:
        """As `other_end`."""
        return "" if self.remote is None else f"{_in_table(self.local)} {_in_table(self.remote)}"

    @property
    def is_from_here(self) -> bool:
        return self.remote is None or ipaddress.ip_address(self.remote[0]).is_loopback


def guard_gloo() -> None:
    """Makes every gloo group that this process creates from now on accept this user's processes only."""
    original: Callable[..., None] = dist.ProcessGroupGloo.__init__
    if hasattr(original, "__wrapped__") or not os.access(TABLES[0], os.R_OK):
        return
    _raise_limit()

    @functools.wraps(original)
    def make(group: dist.ProcessGroupGloo, *arguments: object, **keywords: object) -> None:
        before = _sockets().keys()
        original(group, *arguments, **keywords)
        new = [descriptor for inode, descriptor in _sockets().items() if inode not in before]
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(one) for one in _tcp(new)]
            listeners = [one for one in sockets if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            lines = [one for one in sockets if one not in listeners]
            used = [one for one in lines if _is_used(one)]
            if len(used) < group.size() - 1:  # this gloo sets no read timeouts
                used = lines
            refuse_strangers([_connection(one) for one in used], {one.getsockname()[1] for one in listeners})
            for listener in listeners:
                _close_port(listener)

    dist.ProcessGroupGloo.__init__ = make  # pyright: ignore[reportAttributeAccessIssue]


def refuse_strangers(connections: Sequence[TcpConnection], ports: Collection[int]) -> None:
    """Raises: WorkersError if another user's process holds the other end of a connection.

    Args:
        ports: ports on which this process listens.
    """
    users: dict[str, int] = {}
    for _ in range(NUM_LOOKS):
        if all(one.other_end in users for one in connections):
            break
        users |= users_of_ends()
    for one in connections:
        user = users.get(one.other_end)  # None: of another machine, or closed
        if user is None and not (one.is_from_here and one.local[1] in ports):
            continue
        if user is None and one.own_end and one.own_end not in users:
            _LOG.warning("cannot check who is in a gloo group: %s lacks the connections of this process", TABLES[0])
            continue
        if user != os.geteuid():
            whose = "a process that has ended" if user is None else f"a process of the user with id {user}"
            raise WorkersError(
                f"{whose} took the place of a rank at port {one.local[1]} while the ranks of a group connected; "
                "nothing was sent to it. Start the run again, or on a machine without other users"
            )


def users_of_ends() -> dict[str, int]:
    """The user of each end of a TCP connection on this machine: `LOCAL REMOTE` -> user id."""
    users = {}
    for table in TABLES:
        with contextlib.suppress(FileNotFoundError):  # a system without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, remote, _, _, _, _, user, _, inode, *_ = line.split()
                if inode != "0":
                    users[f"{local.removeprefix(_MAPPED)} {remote.removeprefix(_MAPPED)}"] = int(user)
    return users


def _in_table(end: tuple[str, int]) -> str:
    """An end as in the kernel's table, where an address is 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(end[0]).packed
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}".removeprefix(_MAPPED)


def _sockets() -> dict[int, int]:
    """Inode -> descriptor of each socket of this process."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                descriptors[int(target[8:-1])] = int(name)
    return descriptors


def _tcp(descriptors: Sequence[int]) -> Iterator[socket.socket]:
    """The TCP sockets among the descriptors, as duplicates."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            one = socket.socket(fileno=os.dup(descriptor))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
            else:
                one.close()


def _is_used(one: socket.socket) -> bool:
    """Whether gloo has accepted a connection as that of a rank, since it then sets a read timeout. Other connections,
    which sent no rank number or one in use, stay open but are not read."""
    return any(one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES))


def _connection(one: socket.socket) -> TcpConnection:
    local = one.getsockname()
    try:
        remote = one.getpeername()
    except OSError:
        return TcpConnection((local[0], local[1]), None)
    return TcpConnection((local[0], local[1]), (remote[0], remote[1]))


def _close_port(listener: socket.socket) -> None:
    """Makes the kernel drop everything sent to a listening socket from now on; its connections stay open."""
    program = ctypes.create_string_buffer(_DROP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    except OSError as error:
        _LOG.warning("gloo's port stays open, since this system refuses the packet filter: %s", error)


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
