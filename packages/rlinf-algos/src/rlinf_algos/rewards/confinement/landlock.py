"""Landlock: which files a process may reach, without namespaces and without root (Linux 5.13 on).

It also prevents a process from tracing processes that it did not start, and so from reading their memory or env vars;
from version 6 on (Linux 6.12) also from signalling them. Not covered: the existence of a file, its mode, owner, times
and attributes; before version 3 (Linux 6.2), truncating a file by its path.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from .system import PR_SET_NO_NEW_PRIVS, prctl, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_DIR, MAKE_REG, MAKE_SYM, TRUNCATE = 1 << 7, 1 << 8, 1 << 12, 1 << 14
NUM_RIGHTS = (13, 14, 15, 15, 16)
"""Number of rights on files in versions 1, 2, ...; later versions have as many as the last."""
ALL_TCP, ALL_SCOPES = 3, 3
"""Binding and connecting (version 4); abstract sockets and signals (version 6)."""
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that a rule about one file may have."""
READ = EXECUTE | READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | TRUNCATE
SIGNALS_FROM, TRUNCATION_FROM = 6, 3
"""Versions that cover signals, and truncation."""


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none or a container forbids it."""
    try:
        return system_call(CREATE_RULESET, 0, 0, 1)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restricts this process and all that it starts to these files and to what is below these folders; missing ones are
    ignored."""
    supported = version()
    handled = (1 << NUM_RIGHTS[min(supported, len(NUM_RIGHTS)) - 1]) - 1
    fields = (handled, *((ALL_TCP,) if supported >= 4 else ()), *((ALL_SCOPES,) if supported >= 6 else ()))
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = system_call(CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0)
    try:
        for rights, paths in ((READ, readable), (WRITE, writable)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        system_call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= FILE_RIGHTS
        system_call(ADD_RULE, ruleset, 1, ctypes.c_char_p(struct.pack("=Qi", rights, place)), 0)
    finally:
        os.close(place)
