"""Starts a confined program, watches it, ends it at its limits and reports how it ended."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Callable

from . import call_filter, landlock, users
from .namespaces import DEVICES, MAX_FILES, SYSTEM_PATHS
from .order import Confinement, Order
from .processes import ProcessorTime, memory_bytes
from .system import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl

WATCH_S = 0.02
"""Seconds between two looks at memory and files."""
CPU_MARGIN_S = 0.5
"""Margin with which a single process at its limit gets the kernel's signal before this supervisor ends it."""
MAX_LOCKS_BYTES = 1 << 16
"""Maximum size of the kernel's list of file locks, about a thousand locks."""
MAX_DEPTH = 64
"""Maximum depth of folders on a disk: walking them takes time quadratic in it."""
CHANNEL = (3, 4)
"""File descriptors of the program's channel: to read, to write."""
RLIMIT_MSGQUEUE = 12
"""Not defined by the module `resource`."""
RUN, PAUSE = b"r", b"p"
"""Bytes of the control pipe. A paused program does not run at all: every process of its namespace is stopped."""
NUM_OPEN_FILES, NUM_PENDING_SIGNALS = 64, 256
MFD_ALLOW_SEALING, ALL_SEALS = 2, 15
VISIBLE = (
    *(f"/proc/self/{name}" for name in ("fd", "status", "stat", "statm", "maps", "cmdline")),
    "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
)  # fmt: skip
"""What Python, the C library and numpy read; allowed under Landlock in addition to the folders of the system and the
interpreter."""


def supervise(
    order: Order, folder: str, confinement: Confinement, processes: Callable[[], list[int]]
) -> dict[str, object]:
    """Runs the program and returns the report.

    Args:
        folder: the working folder, as this process sees it.
        processes: lists the processes whose memory counts.
    """
    prctl(PR_SET_DUMPABLE, 0)  # so that a program of the same user cannot reach the status pipe through /proc
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        write_files(order.files, folder)
    except OSError:
        return {"ended_by": "files", "signal": None, "exit_code": None, "cpu_s": 0.0}
    if confinement.is_weak and confinement.user is not None:
        os.chown(folder, confinement.user, confinement.user)
    deadline = time.monotonic() + order.wall_limit_s
    child = os.fork()
    if child == 0:
        run_program(order, folder, confinement)
    ended_by, processor_time = None, ProcessorTime()
    while True:
        process, status, usage = os.wait4(child, os.WNOHANG)
        if process:
            break
        if ended_by is None:
            ended_by = limit_reached(order, folder, confinement, processes(), processor_time, deadline)
        if ended_by:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], WATCH_S)
        if order.control_fd is not None and not confinement.is_weak and ended_by is None:
            keep_paused(order.control_fd, deadline)
    if ended_by is None and confinement.is_weak and exceeds(folder, order.folder_limit_bytes):
        ended_by = "files"
    return {
        "ended_by": ended_by,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def keep_paused(control_fd: int, deadline: float) -> None:
    """If the last byte of the control pipe is PAUSE, stops the program until the next byte. A stopped program uses
    nothing, so it needs no looks, which cost processor time. Only in a namespace: there -1 is the program's processes.
    """
    control = select.poll()  # select.select refuses descriptors above 1023
    control.register(control_fd, select.POLLIN)
    last = b""
    while control.poll(0) and (received := os.read(control_fd, 4096)):
        last = received[-1:]
    if last == PAUSE:
        os.kill(-1, signal.SIGSTOP)  # all at once, so that none can escape by forking
        control.poll(max(deadline - time.monotonic(), 0) * 1000)
        os.kill(-1, signal.SIGCONT)


def limit_reached(
    order: Order,
    folder: str,
    confinement: Confinement,
    processes: list[int],
    processor_time: ProcessorTime,
    deadline: float,
) -> str | None:
    """The limit that these processes have reached, if any."""
    if time.monotonic() > deadline or processor_time.total_s(processes) > order.cpu_limit_s + CPU_MARGIN_S:
        return "timeout"
    if memory_bytes(processes) > order.memory_limit_bytes or (not confinement.is_weak and holds_many_locks()):
        return "memory"
    if confinement.is_weak and exceeds(folder, order.folder_limit_bytes):
        return "files"
    if len(processes) > order.num_processes:  # the kernel does not count processes of root
        return "killed"
    return None


def write_files(files: dict[str, str], folder: str) -> None:
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def holds_many_locks() -> bool:
    """Whether the program holds so many file locks that the kernel's records of them, which no limit covers, are large.
    In a separate namespace only the program's locks are listed."""
    with open("/proc/locks", "rb") as file:
        return len(file.read(MAX_LOCKS_BYTES)) == MAX_LOCKS_BYTES


def exceeds(folder: str, limit_bytes: int) -> bool:
    """Whether the files below the folder are too many, larger in total than the limit, or hidden in folders that are
    closed or very deep."""
    num_bytes, num_files, folders = 0, 0, [(folder, 0)]
    try:
        while folders:
            place, depth = folders.pop()
            with os.scandir(place) as entries:
                for entry in entries:
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    num_files += 1
                    if num_bytes > limit_bytes or num_files > MAX_FILES or depth > MAX_DEPTH:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
    except OSError:
        return True
    return False


def run_program(order: Order, folder: str, confinement: Confinement) -> None:
    """Body of the program's process; never returns."""
    try:
        os.setsid()  # so that signals to its process group reach no other process
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(folder)
        lay_descriptors(order.stdin, order.channel)
        set_limits(order)
        confine(order, folder, confinement)
        env_vars = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **order.env_vars}
        os.execve(order.command[0], order.command, env_vars)
    except BaseException as error:  # noqa: BLE001 - this process has no caller; the error goes to standard error
        os.write(2, f"sandbox: {error!r}".encode())
    finally:
        os._exit(127)


def confine(order: Order, folder: str, confinement: Confinement) -> None:
    """Drops the rights that the program must not have."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if confinement.landlock:
        landlock.restrict((*SYSTEM_PATHS, *order.readable, *VISIBLE), (*DEVICES, folder))
    if confinement.user is not None:
        users.become(confinement.user, confinement.capability)
    elif confinement.is_weak:
        users.drop_capabilities()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if call_filter.is_supported():
        is_open = confinement.shares_user and not (confinement.landlock and landlock.version() >= landlock.SIGNALS_FROM)
        own = os.getpid() if is_open else None
        call_filter.install(is_weak=confinement.is_weak, signals_itself_only=own)


def lay_descriptors(stdin: str, channel: tuple[int, ...]) -> None:
    """Sets up standard input, from memory that cannot be changed, and the channel at its descriptors."""
    memfd = os.memfd_create("stdin", MFD_ALLOW_SEALING)
    with open(memfd, "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "surrogatepass"))
    os.lseek(memfd, 0, os.SEEK_SET)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, ALL_SEALS)
    os.dup2(memfd, 0)
    if memfd > 2:
        os.close(memfd)
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in channel]
    for end, number in zip(ends, CHANNEL, strict=False):
        os.dup2(end, number)


def set_limits(order: Order) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, order.cpu_limit_s),
        (resource.RLIMIT_AS, order.memory_limit_bytes),
        (resource.RLIMIT_FSIZE, order.folder_limit_bytes),
        (resource.RLIMIT_NPROC, order.num_processes),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, NUM_PENDING_SIGNALS),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
        (RLIMIT_MSGQUEUE, 0),
    ):
        most = resource.getrlimit(limit)[1]
        if most == resource.RLIM_INFINITY or value < most:
            resource.setrlimit(limit, (value, value + 1 if limit == resource.RLIMIT_CPU else value))
