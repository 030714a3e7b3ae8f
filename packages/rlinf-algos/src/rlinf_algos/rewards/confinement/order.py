"""What `sandbox_entry.py` is to run, and how the program is confined."""

from __future__ import annotations


class Order:
    """Sent by `sandbox.run_python`; plain data."""

    command: list[str]
    files: dict[str, str]
    """Name -> text of files in the working folder."""
    stdin: str
    folder: str
    """An empty folder that the caller made and removes."""
    readable: list[str]
    status_fd: int
    """Where the report goes."""
    channel: tuple[int, ...]
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
    """What keeps the program apart, beside namespaces."""

    def __init__(
        self, *, is_weak: bool, user: int | None, capability: int | None = None, landlock: bool = False
    ) -> None:
        self.is_weak = is_weak
        """Whether there are no namespaces."""
        self.user = user
        """The program's user; None where it has this process's."""
        self.capability = capability
        """The one capability that it keeps: to read the interpreter, in a folder that is closed to others."""
        self.landlock = landlock

    @property
    def shares_user(self) -> bool:
        """Whether the program could signal others by its user number."""
        return self.is_weak and self.user is None
