"""The echo between two processes, once for a pair: bytes through the very functions that transfers will use.

choice = probe(connection, device=0)             # in the sender
choice = answer_probe(connection, device=0)      # in the receiver; the same choice, with its reason
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from rlinf_comm.codec import pack, unpack
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.arena import IpcArena, IpcRecord
from rlinf_comm.ipc.driver import Driver, load_driver
from rlinf_comm.ipc.opened import OpenedArenas
from rlinf_comm.ipc.transport import Facts, IpcChoice, choose, facts_of

ECHO_BYTES = 4096
_ARENA_BYTES = 2 << 20  # a page of the virtual memory functions
_OFFSET = 64 << 10  # not at the base, so that a lost offset is noticed


class ProbeConnection(Protocol):
    """`multiprocessing.connection.Connection` is one. Its timeouts are the caller's."""

    def send_bytes(self, content: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...


def probe(connection: ProbeConnection, *, device: int, driver: Driver | None = None) -> IpcChoice:
    """Finds the way from this process (the sender) to the other one, which calls `answer_probe`."""
    driver = driver or load_driver()
    own = facts_of(driver, device)
    connection.send_bytes(pack(own))
    other: Facts = unpack(connection.recv_bytes())
    choice = choose(own, other, lambda kind: _echo(connection, driver, device, kind))
    connection.send_bytes(pack(choice))
    return choice


def answer_probe(connection: ProbeConnection, *, device: int, driver: Driver | None = None) -> IpcChoice:
    """The receiver's part of `probe`."""
    driver = driver or load_driver()
    connection.recv_bytes()
    connection.send_bytes(pack(facts_of(driver, device)))
    while True:
        message: Any = unpack(connection.recv_bytes())
        if isinstance(message, IpcChoice):
            return message
        assert isinstance(message, IpcRecord), "the probe's own messages"
        try:
            invert(driver, device, message)
        except (IpcError, OSError) as error:
            connection.send_bytes(pack(str(error)))
        else:
            connection.send_bytes(pack(None))


def _echo(connection: ProbeConnection, driver: Driver, device: int, kind: str) -> str | None:
    try:
        arena = IpcArena.create(device, _ARENA_BYTES, kind=kind, driver=driver)
    except IpcError as error:
        return str(error)
    try:
        content = os.urandom(ECHO_BYTES)
        driver.write(device, arena.handle.pointer + _OFFSET, content)
        connection.send_bytes(pack(IpcRecord(arena.handle, _OFFSET, (ECHO_BYTES,), (1,), "uint8")))
        refusal = unpack(connection.recv_bytes())
        if refusal is not None:
            return refusal
        if driver.read(device, arena.handle.pointer + _OFFSET, ECHO_BYTES) != inverted(content):
            return f"{ECHO_BYTES} bytes came back wrong"
        return None
    except OSError as error:
        return str(error.args[-1])
    finally:
        arena.close()


def invert(driver: Driver, device: int, record: IpcRecord) -> None:
    """Opens the record's bytes, inverts them, and closes them. Raises IpcError or OSError."""
    arenas = OpenedArenas(driver)  # closed before the sender frees the arena
    pointer = arenas.open(record.arena, device) + record.offset
    try:
        driver.write(device, pointer, inverted(driver.read(device, pointer, record.shape[0])))
    finally:
        arenas.close(record.arena, device)


def inverted(content: bytes) -> bytes:
    """What the sender finds after the receiver's invert()."""
    return bytes(255 - byte for byte in content)
