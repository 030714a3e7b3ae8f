"""Runs a program as another user if this process is root and may change users."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable

from .system import PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_SET_KEEPCAPS, call, prctl

FIRST_USER = 0x4000_0000
"""User numbers from here on are unassigned."""
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 1, 2, 6, 7
KILLER_OFFSET = 0x1000_0000
NUM_CAPABILITIES = 64
CAPABILITY_VERSION = 0x20080522
MARGIN = 1024
"""The highest numbers of a small range, such as 65534, are in use."""


def unused_users(process: int) -> tuple[int, int] | None:
    """Two user numbers that are unassigned and not used by another current run: that of the program, and that of the
    process that ends it. None if there are none.

    Args:
        process: number of the calling process.
    """
    if os.geteuid() != 0 or not {CAP_SETUID, CAP_SETGID} <= capabilities():
        return None
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "deny":
            return None
    ranges = [range_of_numbers(kind) for kind in ("uid", "gid")]
    if all(FIRST_USER + KILLER_OFFSET + process in numbers for numbers in ranges):
        return FIRST_USER + process, FIRST_USER + KILLER_OFFSET + process
    num = min(map(len, ranges))  # usually 65,536 in a user namespace
    if any(numbers.start > 1 for numbers in ranges) or num < 16 * MARGIN:
        return None
    user = num // 2 + process % (num // 4 - MARGIN)
    return user, user + num // 4


def range_of_numbers(kind: str) -> range:
    """The largest range of user ("uid") or group ("gid") numbers that this user namespace has."""
    with open(f"/proc/self/{kind}_map") as file:
        rows = [tuple(map(int, line.split())) for line in file]
    return max((range(first, first + num) for first, _, num in rows), key=len, default=range(0))


def capabilities() -> set[int]:
    """The capabilities that this process has."""
    with open("/proc/self/status") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return {number for number in range(NUM_CAPABILITIES) if mask >> number & 1}


def capability_to_read(paths: Iterable[str], user: int) -> int | None:
    """The capability with which that user can read these paths: None if it needs none, -1 if root lacks it."""
    if not closed(paths, user):
        return None
    return next((one for one in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if one in capabilities()), -1)


def closed(paths: Iterable[str], user: int) -> list[str]:
    """The paths that the user cannot read."""
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(user, 0, 0)  # `access` checks the real user and group
    os.setresuid(user, 0, 0)
    try:
        return [path for path in paths if os.path.exists(path) and not os.access(path, os.R_OK | os.X_OK)]
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def become(user: int, capability: int | None) -> None:
    """Changes to that user permanently, keeping only that capability."""
    os.setgroups([])
    os.setresgid(user, user, user)
    if capability is not None:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setresuid(user, user, user)
    if capability is not None:
        _set_capabilities(1 << capability)
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)


def drop_capabilities() -> None:
    """Drops all capabilities, so that root without the right to change users is like any other user; no_new_privs keeps
    it so."""
    _set_capabilities(0)


def _set_capabilities(mask: int) -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    sets = struct.pack("6I", low, low, low, high, high, high)  # effective, permitted, inheritable
    call("capset", ctypes.c_char_p(header), ctypes.c_char_p(sets))


def end_processes_of(user: int, killer: int) -> None:
    """Kills all processes of `user` at once, as the user `killer`, which none of them can signal. They cannot escape by
    forking."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(user, user, user)
            os.setresuid(killer, user, killer)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no such process
        finally:
            os._exit(0)
    os.waitpid(child, 0)
