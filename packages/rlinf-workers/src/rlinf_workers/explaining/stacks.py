"""Stacks of the threads of a process: from py-spy if it is installed, otherwise from faulthandler, which writes to the
process's log on SIGUSR1 (launchers/child.py)."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_workers.explaining.processes import handles_usr1, has_open
from rlinf_workers.explaining.snapshot import ProcessRecord

PY_SPY_LIMIT_S = 10.0
DUMP_LIMIT_S = 3.0
"""Time limit for a process to write its stacks. Its interpreter may be busy, but a process in a system call is late."""
_SERVES = ("_receive", "_beat")
"""Functions of launchers/child.py whose threads serve the driver at all times."""
_WAITS = (("_serve_lane", "child.py"), ("_worker", "thread.py"))
"""Functions, and suffixes of their files, that wait for the next call or task: a thread with nothing above them is
idle."""
_COLLECTIVES = re.compile(r"/torch/distributed/(fsdp/|(distributed_c10d|c10d_logger|_functional_collectives)\.py$)")
"""Files whose functions wait for other ranks."""
_NATIVE_COLLECTIVES = ("c10d::", "gloo::", "nccl")
_DISPATCH = "/torch/_ops.py"
"""Dispatches to C++ operations by name."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.+)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A function that has not returned."""

    function: str
    file: str
    line: int
    """0 if unknown, for native code."""

    @property
    def name(self) -> str:
        """The function's name without its class."""
        return self.function.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack:
    """The stack of a thread."""

    thread: str
    """Its name; empty if unknown."""
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def is_idle(self) -> bool:
        """Whether it serves the driver or waits for its next call or task, so its stack is uninformative."""
        python = [frame for frame in self.frames if frame.file.endswith(".py")]
        serves = any(frame.name in _SERVES and frame.file.endswith("child.py") for frame in python)
        waits = any(frame.name == name and frame.file.endswith(file) for frame in python[:1] for name, file in _WAITS)
        return serves or waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """The stacks of all threads of a process."""

    source: str
    """`py-spy --native`, `py-spy`, `faulthandler`; or the reason why there are no stacks."""
    threads: tuple[ThreadStack, ...] = ()


def stacks_of(record: ProcessRecord, *, is_stopped: bool) -> Stacks:
    """Takes about a second. Does not disturb the process.

    Args:
        is_stopped: a stopped process handles no signal, so only py-spy can inspect it.
    """
    program = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.get_exec_path()[0]]))
    program = program or shutil.which("py-spy")
    if program is not None:
        for options in (["--native"], [], ["--nonblocking"]):
            stacks = _by_py_spy(program, record.pid, options)
            if stacks is not None:
                return stacks
    if is_stopped:
        return Stacks(source="no stack: a stopped process does not answer; py-spy (pip install py-spy) may look at it")
    return _by_faulthandler(record)


def backend_collective(stacks: Stacks) -> str | None:
    """The function in or below torch.distributed in which a thread waits for other ranks; None: no thread does."""
    for thread in stacks.threads:
        native = [*itertools.takewhile(lambda frame: not frame.file.endswith(".py"), thread.frames)]
        python = (frame for frame in thread.frames[len(native) :] if not frame.file.endswith(_DISPATCH))
        innermost = next(python, None)
        if thread.is_idle or innermost is None:
            continue
        if _COLLECTIVES.search(innermost.file):
            return innermost.name
        if below := [frame for frame in native if any(part in frame.function for part in _NATIVE_COLLECTIVES)]:
            return below[-1].function
    return None


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Parses stacks from faulthandler's output, which may be mixed with other lines."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            threads.append((match[1] or "", []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append(Frame(function=match[3], file=match[1], line=int(match[2])))
    return tuple(ThreadStack(thread=name, frames=tuple(frames)) for name, frames in threads)


def _by_py_spy(program: str, pid: int, options: Sequence[str]) -> Stacks | None:
    """None: py-spy is not allowed to inspect the process, or cannot in this mode."""
    command = [program, "dump", "--json", "--pid", str(pid), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_LIMIT_S, check=True)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    stacks = tuple(
        ThreadStack(
            thread=thread["thread_name"] or "",
            frames=tuple(
                Frame(function=frame["name"], file=frame["filename"], line=frame["line"]) for frame in thread["frames"]
            ),
        )
        for thread in threads
    )
    return Stacks(source=" ".join(["py-spy", *options]), threads=stacks) if stacks else None


def _by_faulthandler(record: ProcessRecord) -> Stacks:
    log = Path(record.log_path)
    if not record.log_path or not handles_usr1(record.pid):
        return Stacks(
            source="no stack: the process does not answer SIGUSR1, and there is no py-spy (pip install py-spy)"
        )
    if not has_open(record.pid, log):  # the process id may have been reused
        return Stacks(source=f"no stack: process {record.pid} does not write {log}")
    try:
        offset = log.stat().st_size
        os.kill(record.pid, signal.SIGUSR1)
    except OSError as error:
        return Stacks(source=f"no stack: {error.strerror or error}; py-spy (pip install py-spy) may see more")
    return Stacks(source="faulthandler", threads=parse_faulthandler(_written_since(log, offset)))


def _written_since(log: Path, offset: int) -> str:
    """Returns what is appended to the log, once it stops growing."""
    text, deadline = "", time.monotonic() + DUMP_LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with log.open("rb") as file:
            file.seek(offset)
            now = file.read().decode(errors="replace")
        if now and now == text:
            break
        text = now
    return text
