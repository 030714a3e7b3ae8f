"""Functions of the C library that Python does not provide."""

from __future__ import annotations

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 8, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 36, 38, 47, 2


def call(name: str, *arguments: object) -> int:
    """Calls a function of the C library; raises OSError if it returns a negative number."""
    result = getattr(LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, argument: int = 0, value: int = 0) -> None:
    """`prctl` with up to two arguments, the others 0."""
    call("prctl", option, *(ctypes.c_ulong(number) for number in (argument, value, 0, 0)))


def system_call(number: int, *arguments: object) -> int:
    """A system call that older C libraries have no function for. Integers are passed in full width."""
    wide = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return call("syscall", ctypes.c_long(number), *wide)
