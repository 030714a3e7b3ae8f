"""Runs a program that nobody trusts, with limits, away from the network and from other people's files.

What is promised depends on the kernel; a run says what it could not have in `SandboxRun.weaknesses`, which is empty
where user or root namespaces work (Linux, not switched off by the administrator or the container).

| | with namespaces | without (the weak mode) |
|---|---|---|
| user | an unused one; in a user namespace this process's | an unused one as root, else this process's |
| network | none | no sockets |
| files to read | the system's and the interpreter's | the same by Landlock; without it what the user may read |
| files to write | a working folder in memory | a working folder on disk; without Landlock what the user may write |
| other processes | not seen | not signalled, traced or read; as one user without Landlock they can be read |
| left-over processes | end with the run | end with the run |
| deleting | in the working folder | has no effect: the folder's size is watched |
| renaming, changing modes | in the working folder | refused |

In both: wall and CPU time, memory of all processes together, number of processes, size of the output; an empty
environment, no inherited file descriptors, nothing left in the working folder. A filter of system calls (x86-64 and
ARM, confinement/call_filter.py) refuses memory that no process is charged for. So the memory held is at most the limit,
what is allocated between two looks (20 ms), the working folder, and the buffers of pipes and local sockets (64
descriptors a process). As one user, without namespaces and without Landlock (Linux 5.13), a program can read its tests
and forge its verdict; the weaknesses say so. Not promised: protection from faults of the kernel, from timing, or of the
CPU's caches.
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
"""What the sandbox itself may take beyond the wall time of the program."""

Ending = Literal["exited", "timeout", "memory", "output", "files", "killed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What a program may use."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """CPU time of all processes together, in whole seconds."""
    memory_bytes: int = 512 << 20
    """Limit of each process's address space, and of the resident memory of all processes together."""
    num_processes: int = 16
    """Most processes at once; threads count as well."""
    folder_bytes: int = 16 << 20
    """Limit of all files in the working folder together."""
    output_bytes: int = 1 << 20
    """Limit of standard output, and of standard error separately."""

    def __post_init__(self) -> None:
        check_range("wall_s", self.wall_s, low=0.1, why="starting an interpreter takes a part of it")
        check_range("cpu_s", self.cpu_s, low=1, why="the kernel counts whole seconds")
        check_range("memory_bytes", self.memory_bytes, low=64 << 20, why="an interpreter needs some of it")
        check_range("num_processes", self.num_processes, low=1, why="the program is one")
        check_range("folder_bytes", self.folder_bytes, low=4096, why="the program's own file is in it")
        check_range("output_bytes", self.output_bytes, low=1, why="a program without output says nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRun:
    """How a program ended.

    Example: SandboxRun(ending="exited", exit_code=0, stdout="5\\n", stderr="", cpu_s=0.02, weaknesses=())
    """

    ending: Ending
    """exited: by itself; timeout, memory, output, files: at that limit; killed: by a signal."""
    exit_code: int | None
    stdout: str
    stderr: str
    cpu_s: float
    weaknesses: tuple[str, ...]
    """What the kernel did not let the sandbox protect."""


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
        arguments: the interpreter's arguments, for example a file's name. `-I` goes before them: no environment
            variable and no folder of the user's changes what is imported.
        stdin: all of standard input.
        readable: folders that the program may read besides the system's and the interpreter's; when this process is
            root's, the program is another user, and they must be readable by all.
        namespaces: False for the weaker kind; for tests.
        landlock: False for kernels without it; for tests.
        allow_weak: False where the program must not run if the kernel has no namespaces for it; then it is `killed`.
        channel: a file descriptor to read and one to write, which the program finds as 3 and 4. Closed here.

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
    """A new folder, which is removed with all that is in it, however deep."""
    folder = tempfile.mkdtemp(prefix="rlinf-sandbox-")
    try:
        yield folder
    finally:
        if os.listdir(folder):
            _empty(folder)
        os.rmdir(folder)


def _empty(folder: str) -> None:
    """Goes down and up by descriptors, since paths may be too long."""
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
    """The name of a folder in it, if there is one."""
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
    """Its path without links to folders and without `..`, as the sandbox's own root has it; a virtual environment's own
    link to the interpreter is kept."""
    return os.path.join(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable))


def _exchange(process: subprocess.Popen[bytes], order: bytes, limits: SandboxLimits) -> tuple[bytes, bytes, bool]:
    """Sends the order, takes the output until both pipes close; True when there was too much of it."""
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
    """Lets the entry end on its own, or else ends it with all that is below it."""
    try:
        if process.poll() is None:
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                process.terminate()  # without namespaces it now ends what has left its process group
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
