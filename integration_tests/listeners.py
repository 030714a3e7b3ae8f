"""At which sockets a run can be called by others, read from /proc while it is under way."""

from __future__ import annotations

import ipaddress
import os
import stat
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

MARK = "RLINF_TEST_RUN"
"""Env var by which the processes of a run are told from all others."""
PERIOD_S = 0.2
_TCP_LISTENS, _UDP_BOUND, _UNIX_LISTENS = "0A", "07", "00010000"
CHECKED = "@rlinf-comm/"
"""Begin of the names of abstract Unix sockets that ask the kernel for their caller's user."""


class Listeners:
    """Watches the processes of a run from a thread.

    Attributes:
        num_loopback: sockets seen that listen at the loopback address.
        exposed: `HOST:PORT of PROGRAM` for each that listens at another, `NAME of PROGRAM` for Unix sockets that other
            users can call.
    """

    def __init__(self, mark: str) -> None:
        self.num_loopback = 0
        self.exposed: set[str] = set()
        self._mark = f"{MARK}={mark}".encode()
        self._known = {inode for inode, *_ in _listening()}
        """Those seen, and those of others that were there before."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def look(self) -> None:
        """Takes in what listens now."""
        with self._lock:
            new = {inode: (name, is_open) for inode, name, is_open in _listening() if inode not in self._known}
            for inode, program in self._owners(set(new)).items() if new else ():
                name, is_open = new[inode]
                if is_open:
                    self.exposed.add(f"{name} of {program}")
                elif "/" not in name:
                    self.num_loopback += 1
            self._known |= set(new)

    def _watch(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.look()

    def _owners(self, inodes: set[int]) -> dict[int, str]:
        """Of these sockets, those of the run's processes, with the program's name."""
        owners = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                links = [os.readlink(link) for link in (process / "fd").iterdir()]
                program = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
            except OSError:
                continue  # it has ended, or is another user's
            for link in links:
                if link.startswith("socket:[") and (inode := int(link[8:-1])) in inodes:
                    owners[inode] = program
        return owners


def _listening() -> list[tuple[int, str, bool]]:
    """(inode, name, whether others reach it) of each socket of this machine that takes calls."""
    sockets = []
    for table in (*Path("/proc/net").glob("tcp*"), *Path("/proc/net").glob("udp*")):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == (_TCP_LISTENS if table.name.startswith("tcp") else _UDP_BOUND):
                address, port = fields[1].split(":")
                host = _host(address)
                sockets.append((int(fields[9]), f"{host}:{int(port, 16)}", not host.is_loopback))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[3] == _UNIX_LISTENS and len(fields) == 8:
            sockets.append((int(fields[6]), fields[7], _is_open(fields[7])))
    return sockets


def _is_open(name: str) -> bool:
    """Whether other users can call a Unix socket."""
    if name.startswith("@"):
        return not name.startswith(CHECKED)
    path = Path(name)
    try:
        folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.absolute().parents)
        return folders and bool(path.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False  # it is gone


def _host(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes an address as words of 32 bits in the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    host = ipaddress.ip_address(b"".join(words))
    return getattr(host, "ipv4_mapped", None) or host


@contextmanager
def nothing_exposed(environment):
    """Around a run with these env vars, to which it adds one: fails where a process of the run listened at another
    address than loopback, or at a Unix socket that other users can call. Gives what it sees."""
    environment[MARK] = uuid.uuid4().hex
    listeners = Listeners(environment[MARK])
    try:
        yield listeners
    finally:
        listeners.stop()
    assert not listeners.exposed, f"reachable by others: {sorted(listeners.exposed)}"
