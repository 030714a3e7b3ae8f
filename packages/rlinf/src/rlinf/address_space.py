"""Checks `ulimit -v`: with too little address space, libraries fail during their import, some without a message.

The limit is checked before anything heavy is imported, and errors that it may have caused later get a hint.
"""

from __future__ import annotations

import errno
import resource

from rlinf.errors import UserError

LEAST_BYTES = 4 << 30
"""Address space for a driver, or a worker with a small model: torch's libraries, thread stacks, and 0.5 GiB of shared
memory."""
SIGNS = ("allocate memory", "bad_alloc", "failed to map", "exited with code", "killed by")
"""Parts of error messages that a lack of address space may have caused."""


def limit_bytes() -> int | None:
    """Returns the address space limit, in bytes, of this process and its children; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def check_address_space() -> None:
    """Raises: UserError if the limit is too low to import torch."""
    limit = limit_bytes()
    if limit is not None and limit < LEAST_BYTES:
        raise UserError(
            f"a process may have {limit / 2**30:.1f} GiB of address space here (ulimit -v); a run needs at least "
            f"{LEAST_BYTES / 2**30:.0f} GiB, most of which is mapped and never used",
            hint="ulimit -v unlimited, in the shell or the job's script; to limit memory use a cgroup",
        )


def address_space_hint(error: BaseException) -> str:
    """Returns a hint for an error that a limit may have caused, or an empty string."""
    limit = limit_bytes()
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if limit is None or not (ran_out or any(sign in str(error).lower() for sign in SIGNS)):
        return ""
    return f"\nhint: a process may have {limit / 2**30:.1f} GiB of address space here; ulimit -v unlimited lifts that"
