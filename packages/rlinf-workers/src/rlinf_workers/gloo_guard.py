"""Keeps other users of this machine out of the groups that gloo connects.

Gloo asks nobody who he is. Each rank of a group listens at a TCP port, which every user of the machine can see, until
the group goes; whoever connects first and sends a small number is taken for another rank: he is sent its share of the
gradients, and his numbers are added to them. Connections that nobody uses are kept, too, until the process has no
descriptors left and is aborted.

So whenever a group is made, before anything is sent through it, each rank looks up in the kernel's table to whom the
other ends of its new connections belong, and refuses the group where one is another user's. Then it closes its port:
a filter drops whatever else is sent there. What is left to a stranger is to connect while the ranks meet, which ends
the run with an error that says so. Connections from other machines are not judged: their network has to be closed.
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
"""Reads of a table, because one that changes while it is read may miss a line."""
NUM_DESCRIPTORS = 1 << 16
"""Files and sockets that a process with groups may have open, as far as the system lets it: 1,024, the usual limit, are
few while anybody may connect."""
_MAPPED = "0000000000000000FFFF0000"
"""Prefix of an IPv4 address in the table of IPv6."""
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program for the kernel's packet filter (struct sock_filter) of one instruction: return 0 bytes of the packet."""
_TIMEVAL_BYTES = 16
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """One of this process's, with both ends as (address, port)."""

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
    """Makes every gloo group that this process creates from now on accept only processes of this user."""
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
            if len(used) < group.size() - 1:  # a gloo that does not limit them
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
        user = users.get(one.other_end)  # None: it is another machine's, or gone
        if user is None and not (one.is_from_here and one.local[1] in ports):
            continue
        if user is None and one.own_end and one.own_end not in users:
            _LOG.warning("whose processes are in a gloo group is not known: %s lacks this one's connections", TABLES[0])
            continue
        if user != os.geteuid():
            whose = "a process that has gone" if user is None else f"a process of the user with id {user}"
            raise WorkersError(
                f"{whose} has taken the place of a rank at port {one.local[1]} while the ranks of a group met; nothing "
                "was sent to it. Start the run again, or where nobody else may run programs"
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
    """The kernel writes an address as words of 32 bits in the machine's byte order."""
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
    """The TCP sockets among them, under duplicated descriptors."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            one = socket.socket(fileno=os.dup(descriptor))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
            else:
                one.close()


def _is_used(one: socket.socket) -> bool:
    """Whether gloo has accepted a connection as that of a rank: it then sets a read timeout. Other connections, which
    sent no rank number or a taken one, stay open but unread."""
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
        _LOG.warning("gloo's port stays open, since this system takes no packet filter: %s", error)


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, NUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
