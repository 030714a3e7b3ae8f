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

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.sandbox_process import SandboxLimits, SandboxProcess

_GRACE_S = 10.0
"""Time that the sandbox itself may take beyond the wall time of the program."""

Ending = Literal["exited", "timeout", "memory", "output", "files", "killed"]


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
    process = SandboxProcess(
        files,
        ["-I", "-B", *arguments],
        limits=limits,
        stdin=stdin,
        readable=readable,
        namespaces=namespaces,
        landlock=landlock,
        allow_weak=allow_weak,
        channel=channel or (),
    )
    try:
        stdout, stderr, is_full = _exchange(process.process, limits)
    finally:
        report = process.end()
    if not report and process.process.returncode > 0:
        raise RewardError(f"the sandbox could not start: {stderr.decode('utf-8', 'replace')[-500:]}")
    return run_from_report(report, stdout, stderr, is_full, limits)


def _exchange(process: subprocess.Popen[bytes], limits: SandboxLimits) -> tuple[bytes, bytes, bool]:
    """Reads until both pipes close; returns stdout, stderr, and whether they were too large."""
    assert process.stdout and process.stderr, "both are pipes"
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


def run_from_report(
    report: dict[str, Any], stdout: bytes, stderr: bytes, is_full: bool, limits: SandboxLimits
) -> SandboxRun:
    """What the supervisor's report and the output say about the end of a program.

    Raises:
        RewardError: the sandbox could not run it.
    """
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
