"""The order for `sandbox_entry.py`: what to run, and how to confine it."""

from __future__ import annotations


class Order:
    """Sent by `sandbox.run_python`; plain data."""

    command: list[str]
    files: dict[str, str]
    """Name -> text of files in the working folder."""
    stdin: str
    folder: str
    """An empty folder that the caller created and will remove."""
    readable: list[str]
    status_fd: int
    """Receives the report."""
    channel: tuple[int, ...]
    control_fd: int | None
    """From here the supervisor reads RUN and PAUSE."""
    env_vars: dict[str, str]
    """Of the program, in addition to those that every program has."""
    namespaces: bool
    landlock: bool
    allow_weak: bool
    """Whether the program may run without namespaces."""
    wall_limit_s: float
    cpu_limit_s: int
    memory_limit_bytes: int
    num_processes: int
    folder_limit_bytes: int

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Confinement:
    """How the program is confined in addition to namespaces."""

    def __init__(
        self, *, is_weak: bool, user: int | None, capability: int | None = None, landlock: bool = False
    ) -> None:
        self.is_weak = is_weak
        """True without namespaces."""
        self.user = user
        """The program's user; None if it is that of this process."""
        self.capability = capability
        """The only capability that it keeps, to read an interpreter in a folder that is closed to others."""
        self.landlock = landlock

    @property
    def shares_user(self) -> bool:
        """Whether the program could signal other processes, since they have the same user number."""
        return self.is_weak and self.user is None
