"""The process of a sandbox: how it is started, what it is limited to, and how it ends."""

import ast
import contextlib
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_algos.ranges import check_range
from rlinf_algos.rewards.working_folder import working_folder

_ENTRY = Path(__file__).with_name("sandbox_entry.py")


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


class SandboxProcess:
    """A running sandbox. `end` must be called.

    Args:
        interpreter_arguments: the interpreter's arguments.
        channel: a file descriptor to read and one to write, which the program has as 3 and 4. Closed in this process.
        control: a file descriptor from which the supervisor reads RUN and PAUSE; see confinement/supervisor.py. Closed
            in this process.
        env_vars: the program has these, in addition to those that every program has.
        merge_output: whether standard error goes to the pipe of standard output.

    The other arguments are those of `run_python`. The kernel ends a sandbox when the thread that started it has ended.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        interpreter_arguments: Sequence[str],
        *,
        limits: SandboxLimits,
        stdin: str = "",
        readable: Sequence[str] = (),
        namespaces: bool = True,
        landlock: bool = True,
        allow_weak: bool = True,
        channel: tuple[int, ...] = (),
        control: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        merge_output: bool = False,
    ) -> None:
        prefixes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *readable))
        ours = (*channel, *(() if control is None else (control,)))
        self._resources = contextlib.ExitStack()
        try:
            folder = self._resources.enter_context(working_folder())
            status_read, status_write = os.pipe()
            ours = (status_write, *ours)
            self.status = self._resources.enter_context(os.fdopen(status_read, "rb"))
            """Receives the report; at its end all processes of the sandbox have ended."""
            order = {
                "command": [_interpreter(), *interpreter_arguments],
                "files": dict(files),
                "stdin": stdin,
                "folder": folder,
                "readable": [path for path in prefixes if not path.startswith("/usr/")],
                "status_fd": status_write,
                "channel": channel,
                "control_fd": control,
                "env_vars": dict(env_vars or {}),
                "namespaces": namespaces,
                "landlock": landlock,
                "allow_weak": allow_weak,
                "wall_limit_s": limits.wall_s,
                "cpu_limit_s": limits.cpu_s,
                "memory_limit_bytes": limits.memory_bytes,
                "num_processes": limits.num_processes,
                "folder_limit_bytes": limits.folder_bytes,
            }
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_ENTRY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merge_output else subprocess.PIPE,
                pass_fds=ours,
                start_new_session=True,
                env={},
            )
        except BaseException:
            self._resources.close()
            raise
        finally:
            for fd in ours:
                os.close(fd)
        assert self.process.stdin, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(marshal.dumps(order))
            self.process.stdin.close()

    def end(self, *, patience_s: float = 0.2) -> dict[str, Any]:
        """Waits for the sandbox to end, or else ends it with all its processes; returns its report. Empty: it has none,
        since it was ended or killed."""
        with self._resources:
            _end(self.process, patience_s)
            report = self.status.read()
        return ast.literal_eval(report.decode()) if report else {}


def _interpreter() -> str:
    """The interpreter's path without links to folders and without `..`, as it is in the sandbox's root; a venv's link
    to the interpreter is kept."""
    return os.path.join(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable))


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Waits for the entry process to end, or else ends it with all processes below it."""
    try:
        if process.poll() is None:
            try:
                process.wait(timeout=patience_s)
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
