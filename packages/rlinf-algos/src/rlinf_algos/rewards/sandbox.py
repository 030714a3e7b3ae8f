"""Runs an untrusted program with limits, without access to the network or to other users' files.

The guarantees depend on the kernel. `SandboxRun.weaknesses` lists those that a run lacks; it is empty if user or root
namespaces work (Linux, unless the administrator or the container disables them).

| | with namespaces | without (the weak mode) |
|---|---|---|
| user | an unused one; in a user namespace that of this process | an unused one if root, else that of this process |
| network | none | no sockets |
| readable files | the system's and the interpreter's | the same with Landlock; without it, those of the user |
| writable files | a working folder in memory | a working folder on disk; without Landlock, those of the user |
| other processes | invisible | no signals, tracing or reading; as the same user without Landlock, readable |
| left-over processes | end with the run | end with the run |
| deleting | in the working folder | has no effect, since the folder's size is monitored |
| renaming, changing modes | in the working folder | refused |

Both limit wall and CPU time, total memory of all processes, number of processes, and size of the output; the program
has no env vars and inherits no file descriptors, and the working folder is removed. A filter of system calls (x86-64
and ARM, confinement/call_filter.py) refuses memory that no process is charged for. So the memory used is at most the
limit, what is allocated between two looks (20 ms), the working folder, and the buffers of pipes and local sockets (64
descriptors per process). Without namespaces and without Landlock (Linux 5.13), a program of the same user can read its
tests and forge its verdict; the weaknesses list this. There is no protection from kernel bugs or from side channels by
timing or CPU caches.
"""

import ast
import contextlib
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf_algos.errors import RewardError
from rlinf_algos.ranges import check_range

_ENTRY = Path(__file__).with_name("sandbox_entry.py")
_GRACE_S = 10.0
"""Time that the sandbox itself may take beyond the wall time of the program."""

Ending = Literal["exited", "timeout", "memory", "output", "files", "killed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Limits of a program's resources."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """Total CPU time of all processes, in whole seconds."""
    memory_bytes: int = 512 << 20
    """Limit of each process's address space, and of the total resident memory of all processes."""
    num_processes: int = 16
    """Maximum number of simultaneous processes and threads."""
    folder_bytes: int = 16 << 20
    """Limit of the total size of the files in the working folder."""
    output_bytes: int = 1 << 20
    """Limit of standard output, and of standard error separately."""

    def __post_init__(self) -> None:
        check_range("wall_s", self.wall_s, low=0.1, why="it includes the start of the interpreter")
        check_range("cpu_s", self.cpu_s, low=1, why="the kernel counts whole seconds")
        check_range("memory_bytes", self.memory_bytes, low=64 << 20, why="it includes the interpreter")
        check_range("num_processes", self.num_processes, low=1, why="the program itself is one process")
        check_range("folder_bytes", self.folder_bytes, low=4096, why="it includes the program's file")
        check_range("output_bytes", self.output_bytes, low=1, why="a program without output cannot be judged")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRun:
    """How a program ended.

    Example: SandboxRun(ending="exited", exit_code=0, stdout="5\\n", stderr="", cpu_s=0.02, weaknesses=())
    """

    ending: Ending
    """exited: by itself; timeout, memory, output, files: it reached that limit; killed: by a signal."""
    exit_code: int | None
    stdout: str
    stderr: str
    cpu_s: float
    weaknesses: tuple[str, ...]
    """What the sandbox could not protect with this kernel."""


def run_python(
    files: Mapping[str, str],
    arguments: Sequence[str],
    *,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    readable: Sequence[str] = (),
    namespaces: bool = True,
    landlock: bool = True,
    allow_weak: bool = True,
    channel: tuple[int, int] | None = None,
) -> SandboxRun:
    """Runs this interpreter in a sandbox.

    Args:
        files: name -> text of files in the working folder, which is the current folder of the program.
        arguments: the interpreter's arguments, for example a file name. They are preceded by `-I`, so that no env var
            and no folder of the user changes what is imported.
        stdin: the whole standard input.
        readable: folders that the program may read in addition to those of the system and the interpreter. If this
            process runs as root, the program runs as another user, and everyone must be able to read them.
        namespaces: False: do not use namespaces; for tests.
        landlock: False: do not use Landlock; for tests.
        allow_weak: False: the program does not run if the kernel allows no namespaces, and its ending is `killed`.
        channel: a file descriptor to read and one to write, which the program has as 3 and 4. Closed in this process.

    Raises:
        RewardError: the sandbox could not start the program.
    """
    limits = limits or SandboxLimits()
    prefixes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *readable))
    with _working_folder() as folder:
        status_read, status_write = os.pipe()
        order = {
            "command": [_interpreter(), "-I", "-B", *arguments],
            "files": dict(files),
            "stdin": stdin,
            "folder": folder,
            "readable": [path for path in prefixes if not path.startswith("/usr/")],
            "status_fd": status_write,
            "channel": channel or (),
            "namespaces": namespaces,
            "landlock": landlock,
            "allow_weak": allow_weak,
            "wall_limit_s": limits.wall_s,
            "cpu_limit_s": limits.cpu_s,
            "memory_limit_bytes": limits.memory_bytes,
            "num_processes": limits.num_processes,
            "folder_limit_bytes": limits.folder_bytes,
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_ENTRY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(status_write, *(channel or ())),
                start_new_session=True,
                env={},
            )
        finally:
            for fd in (status_write, *(channel or ())):
                os.close(fd)
        try:
            with open(status_read, "rb") as status:
                stdout, stderr, is_full = _exchange(process, marshal.dumps(order), limits)
                _end(process)
                report = status.read()
        except BaseException:
            _end(process)
            raise
    if not report and process.returncode > 0:
        raise RewardError(f"the sandbox could not start: {stderr.decode('utf-8', 'replace')[-500:]}")
    return _result(ast.literal_eval(report.decode()) if report else {}, stdout, stderr, is_full, limits)


@contextlib.contextmanager
def _working_folder() -> Generator[str]:
    """A new folder, which is removed with its contents, however deep they are."""
    folder = tempfile.mkdtemp(prefix="rlinf-sandbox-")
    try:
        yield folder
    finally:
        if os.listdir(folder):
            _empty(folder)
        os.rmdir(folder)


def _empty(folder: str) -> None:
    """Deletes the contents; walks by descriptors, since paths may be too long."""
    here, path = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), list[str]()
    try:
        while True:
            below = _remove_files(here)
            if below is not None:
                os.chmod(below, 0o700, dir_fd=here)
                here = _moved(here, below)
                path.append(below)
            elif path:
                here = _moved(here, "..")
                os.rmdir(path.pop(), dir_fd=here)
            else:
                return
    finally:
        os.close(here)


def _remove_files(folder: int) -> str | None:
    """Removes the files in a folder; returns the name of a subfolder if there is one."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=folder)
    return None


def _moved(folder: int, name: str) -> int:
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return below


def _interpreter() -> str:
    """The interpreter's path without links to folders and without `..`, as it is in the sandbox's root; a venv's link
    to the interpreter is kept."""
    return os.path.join(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable))


def _exchange(process: subprocess.Popen[bytes], order: bytes, limits: SandboxLimits) -> tuple[bytes, bytes, bool]:
    """Sends the order and reads until both pipes close; returns stdout, stderr, and whether they were too large."""
    assert process.stdin and process.stdout and process.stderr, "all are pipes"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(order)
        process.stdin.close()
    received = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + limits.wall_s + _GRACE_S
    is_full = False
    with selectors.DefaultSelector() as selector:
        for pipe in received:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and not is_full and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(timeout=left_s):
                piece = os.read(key.fd, 1 << 16)
                buffer = received[key.fileobj]  # type: ignore[index]
                buffer += piece
                if not piece:
                    selector.unregister(key.fileobj)
                is_full |= len(buffer) > limits.output_bytes
    return bytes(received[process.stdout]), bytes(received[process.stderr]), is_full


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the entry process to end, or else ends it with all processes below it."""
    try:
        if process.poll() is None:
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                process.terminate()  # without namespaces it then ends processes that left its process group
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2.0)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _result(report: dict[str, Any], stdout: bytes, stderr: bytes, is_full: bool, limits: SandboxLimits) -> SandboxRun:
    if "failed" in report:
        raise RewardError(f"the sandbox could not run the program: {report['failed']}")
    out, err = stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
    code, number = report.get("exit_code"), report.get("signal")
    if is_full:
        ending: Ending = "output"
    elif not report:
        ending, err = "killed", err or "the process that watches the program was killed"
    elif report["ended_by"]:
        ending = report["ended_by"]
    elif number == signal.SIGXCPU or (number == signal.SIGKILL and report["cpu_s"] >= limits.cpu_s):
        ending = "timeout"
    elif code and "MemoryError" in err[-200:]:
        ending = "memory"
    else:
        ending = "killed" if number else "exited"
    return SandboxRun(
        ending=ending,
        exit_code=code,
        stdout=out,
        stderr=err,
        cpu_s=report.get("cpu_s", 0.0),
        weaknesses=tuple(report.get("weaknesses", ())),
    )
