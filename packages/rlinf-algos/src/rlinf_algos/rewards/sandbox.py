"""Runs a program that nobody trusts, with limits, away from the network and from other people's files.

What is promised depends on the kernel; a run says what it could not have in `SandboxRun.weaknesses`, which is empty
where user or root namespaces work (Linux, not switched off by the administrator or the container):

| | with namespaces | without |
|---|---|---|
| network | none | no sockets but local ones (x86-64 and ARM: a filter of system calls) |
| files to read | the system's programs and libraries, the interpreter's folder | what this user may read |
| files to write | a working folder in memory, of limited size | what this user may write; each file limited |
| other processes | neither seen nor signalled | those of the same user |
| left-over processes | end with the run | ended with the run, unless they outrun it |
| number of files | limited | not limited |

In both: wall and CPU time, memory of all processes together, number of processes, size of the output; an empty
environment, no inherited file descriptors. A filter of system calls (x86-64 and ARM) refuses memory that no process is
charged for: memfd, shared mappings, System V segments and queues, and tmpfs of one's own. So the memory held is at most
the limit, what is allocated between two looks (20 ms), the working folder, and the buffers of pipes and local sockets
(64 descriptors a process). Not promised: protection from faults of the kernel, from timing, or of the CPU's caches.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlinf_algos.checks import check_range
from rlinf_algos.errors import RewardError

_ENTRY = Path(__file__).with_name("sandbox_entry.py")
_GRACE_S = 10.0
"""What the sandbox itself may take beyond the wall time of the program."""

Ending = Literal["exited", "timeout", "memory", "output", "killed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What a program may use."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """CPU time of each process, in whole seconds."""
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
    """exited: by itself; timeout, memory, output: at that limit; killed: by a signal of its own making."""
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
        channel: a file descriptor to read and one to write, which the program finds as 3 and 4. Closed here.

    Raises:
        RewardError: the sandbox itself failed.
    """
    limits = limits or SandboxLimits()
    prefixes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *readable))
    with tempfile.TemporaryDirectory(prefix="rlinf-sandbox-") as folder:
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
                stdout, stderr, is_full = _exchange(process, json.dumps(order).encode("ascii"), limits)
                _end(process)
                report = status.read()
        except BaseException:
            _end(process)
            raise
    return _result(json.loads(report) if report else {}, stdout, stderr, is_full, limits)


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


def _result(report: dict, stdout: bytes, stderr: bytes, is_full: bool, limits: SandboxLimits) -> SandboxRun:
    if "failed" in report or (not report and not is_full):
        why = report.get("failed") or stderr.decode("utf-8", "replace")[-500:] or "its process was killed"
        raise RewardError(f"the sandbox could not run the program: {why}")
    out, err = stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
    code, number = report.get("exit_code"), report.get("signal")
    if is_full:
        ending: Ending = "output"
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
