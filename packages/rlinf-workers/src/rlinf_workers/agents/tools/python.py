"""The tool `python`: each episode has a sandboxed Python process, which keeps its state like a notebook's.

The walls are those of rlinf_algos.rewards.sandbox. A process starts with the first call (about 60 ms), and nothing runs
in it between calls. A program that raises keeps the state. One that reaches a limit or ends its process loses it, and
the text says so; both are failures of the policy. A sandbox that cannot start, or that is killed from outside, is a
failure of the service.

A branch recreates the state by running the calls so far again in a new process, so it costs as much time as they took.
`random` and hashes of texts have the same seed there; programs that use the time, other random numbers or addresses may
differ, and the result of `restore` counts the calls that printed something else.
"""

from __future__ import annotations

import asyncio
import os
import resource
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_algos import AlgosError
from rlinf_algos.rewards import SESSION_LIMITS, CellRun, PythonSession, SandboxLimits, run_python
from rlinf_workers.agents.tools.base import ToolResult, ToolSpec, ToolUnavailable
from rlinf_workers.agents.tools.limits import check_limits
from rlinf_workers.plugins import OptionError, Spec

DESCRIPTORS, OTHER_DESCRIPTORS = 8, 512
"""File descriptors that a sandbox needs in this process, while it starts; and those of everything else."""
REPLAY_FACTOR = 3
"""A call that is run again for a branch may take this many times the time limit, since the machine may be busier."""
STATE_LOST = "Variables, imports and files are lost; the next call starts a new process."
ENDINGS = {
    "exited": "The program ended its process.",
    "killed": "The process was ended by a signal.",
    "timeout": "The program took longer than {time_limit_s:g} s, or all calls more than {cpu_s} s of CPU time.",
    "memory": "The program needed more than {memory_mib} MiB of memory.",
    "output": "The program printed more than {output_bytes} bytes.",
    "files": "The files are too many, or larger than {folder_bytes} bytes together.",
    "garbled": "The program wrote to the descriptors that its process needs.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonOptions:
    """The tool's options."""

    time_limit_s: float = 10.0
    """Wall time of a call in seconds, without the start of the process."""
    cpu_s: int = SESSION_LIMITS.cpu_s
    """CPU time of all calls of an episode together, in whole seconds."""
    memory_bytes: int = SESSION_LIMITS.memory_bytes
    """Memory of an episode's processes."""
    num_processes: int = SESSION_LIMITS.num_processes
    """Maximum number of processes and threads of an episode."""
    folder_bytes: int = SESSION_LIMITS.folder_bytes
    """Size of an episode's working folder, which is in memory."""
    max_characters: int = 8000
    """Longer output is cut in the middle."""
    max_sandboxes: int = 256
    """Maximum number of episodes that have a process, each of about 13 MB; others wait until one is closed."""
    max_running: int | None = None
    """Maximum number of calls that run at once, so that they do not exceed their time since they share CPUs; others
    wait. null: the number of CPUs, at least 4."""
    wait_limit_s: float = 600.0
    """A call that waits longer for one of `max_sandboxes` fails as a failure of the service."""
    readable: tuple[str, ...] = ()
    """Folders that programs may read in addition to those of the system and the interpreter."""
    allow_weak_isolation: bool = False
    """Use the weak sandbox if the kernel does not allow namespaces."""

    def __post_init__(self) -> None:
        check_limits(self.time_limit_s, self.max_characters)
        for option in ("max_sandboxes", "max_running"):
            if (value := getattr(self, option)) is not None and value < 1:
                raise OptionError(option, f"={value!r} must be at least 1")
        try:
            self.limits()
        except AlgosError as error:
            option, equals, text = str(error).partition("=")
            raise OptionError(option, equals + text) from error

    def limits(self) -> SandboxLimits:
        """Limits of a sandbox. Raises: AlgosError."""
        return SandboxLimits(
            wall_s=SESSION_LIMITS.wall_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_bytes,
            num_processes=self.num_processes,
            folder_bytes=self.folder_bytes,
        )


SPEC = Spec(name="python", implementation="rlinf_workers.agents.tools.python:PythonTool", options=PythonOptions)
FUNCTION_SPEC = ToolSpec(
    name="python",
    description=(
        "Runs Python code and returns what it prints, and the value of its last expression. Variables, imports and "
        "files stay for later calls. There is no network."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the code to run"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)


class PythonTool:
    """A sandboxed Python process for each episode; see the module's docstring."""

    keeps_state = True
    time_limit_s: float | None = None
    """The sandbox limits calls, and who exceeds its limit is the policy."""
    specs = (FUNCTION_SPEC,)

    def __init__(self, options: PythonOptions | None = None) -> None:
        self.options = options or PythonOptions()
        self.max_characters = self.options.max_characters
        self.limits = self.options.limits()
        self.weaknesses: tuple[str, ...] = ()
        """What the sandbox cannot protect on this machine, after `start`."""
        num_threads = self.options.max_running or max(4, len(os.sched_getaffinity(0)))
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tool python")
        self.places = asyncio.Semaphore(self.options.max_sandboxes)

    async def start(self) -> None:
        """Raises: ToolUnavailable: the sandbox does not work here, only the weak one does and it is not allowed, or
        this process may not have enough file descriptors."""
        _allow_descriptors(self.options.max_sandboxes)
        try:
            run = await asyncio.to_thread(run_python, {}, ["-c", "pass"], readable=self.options.readable)
        except (AlgosError, OSError) as error:
            raise ToolUnavailable(f"the tool python has no sandbox: {error}") from error
        self.weaknesses = run.weaknesses
        if self.weaknesses and not self.options.allow_weak_isolation:
            raise ToolUnavailable(
                f"the sandbox for the tool python is weak on this machine: {'; '.join(self.weaknesses)}. Allow user "
                "namespaces (sysctl user.max_user_namespaces, or the container's settings), or accept it with "
                "allow_weak_isolation"
            )

    def open(self, episode: str) -> PythonToolSession:
        """A session whose random numbers have a seed from the episode's name."""
        return PythonToolSession(self, seed=zlib.crc32(episode.encode("utf-8", "surrogatepass")))

    async def close(self) -> None:
        self.threads.shutdown(wait=False)


class PythonSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that led to a state."""

    seed: int
    cells: list[str]
    checksums: list[int]
    """Of the output of each cell."""


class PythonToolSession:
    """The process of one episode."""

    def __init__(self, tool: PythonTool, *, seed: int) -> None:
        self._tool, self._seed = tool, seed
        self._process: PythonSession | None = None
        self._cells: list[tuple[str, int]] = []
        self._has_place, self._is_closed = False, False
        self._lock = asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises: ToolUnavailable."""
        return await self.call_cell(arguments["code"])

    async def call_cell(self, code: str, time_limit_s: float | None = None) -> ToolResult:
        """Runs code. Raises: ToolUnavailable.

        Args:
            time_limit_s: None: that of the tool.
        """
        async with self._lock:
            run = await self._run(code, self._tool.options.time_limit_s if time_limit_s is None else time_limit_s)
        if run.ending == "closed":
            raise ToolUnavailable("the session was closed during the call")
        if run.ending == "done":
            return ToolResult(text=run.output or "(no output)")
        if run.ending == "raised":
            return ToolResult(text=run.output, failure="policy", detail=run.error)
        return ToolResult(text=f"{run.output}\n[{self._why(run)} {STATE_LOST}]", failure="policy", detail=run.ending)

    def snapshot(self) -> bytes:
        """The calls so far. A process that has ended has no state."""
        cells, checksums = [cell for cell, _ in self._cells], [checksum for _, checksum in self._cells]
        return msgspec.msgpack.encode(PythonSnapshot(seed=self._seed, cells=cells, checksums=checksums))

    async def restore(self, snapshot: bytes) -> ToolResult:
        """Runs the calls of a snapshot again. Raises: ToolUnavailable: one did not end as it did before."""
        original = msgspec.msgpack.decode(snapshot, type=PythonSnapshot)
        self._seed, num_different = original.seed, 0
        async with self._lock:
            for number, (cell, checksum) in enumerate(zip(original.cells, original.checksums, strict=True), start=1):
                run = await self._run(cell, REPLAY_FACTOR * self._tool.options.time_limit_s)
                if not run.is_alive:
                    raise ToolUnavailable(f"run again for a branch, call {number} ended: {self._why(run)}")
                num_different += _checksum(run) != checksum
        if not num_different:
            return ToolResult(text="")
        return ToolResult(
            text="", detail=f"{num_different} of {len(original.cells)} calls printed something else when run again"
        )

    async def close(self) -> None:
        """Ends the process, also while a call runs."""
        self._is_closed = True
        await self._end()

    async def _run(self, code: str, time_limit_s: float) -> CellRun:
        """Runs a cell, in a new process if there is none."""
        if self._process is None and self._cells:
            raise ToolUnavailable("the process of the tool python was lost with its state")
        process = self._process or await self._start()
        try:
            run = await asyncio.get_running_loop().run_in_executor(
                self._tool.threads, lambda: process.run(code, time_limit_s=time_limit_s)
            )
        except AlgosError as error:
            await self._end()
            raise ToolUnavailable(f"the sandbox of the tool python failed: {error}") from error
        except BaseException:  # cancelled: the cell may have run in part
            await asyncio.shield(asyncio.ensure_future(self._end()))
            raise
        if run.is_alive:
            self._cells.append((code, _checksum(run)))
        else:
            self._cells.clear()
            await self._end()
        return run

    async def _start(self) -> PythonSession:
        await self._take_place()
        starting = asyncio.get_running_loop().run_in_executor(self._tool.threads, self._create)
        try:
            process = await asyncio.shield(starting)
        except BaseException as error:
            starting.add_done_callback(_close_started)
            self._release()
            if isinstance(error, AlgosError | OSError):
                raise ToolUnavailable(f"the tool python has no sandbox: {error}") from error
            raise
        self._process = process
        if self._is_closed:
            await self._end()
            raise ToolUnavailable("the session is closed")
        return process

    async def _take_place(self) -> None:
        places, limit_s = self._tool.places, self._tool.options.wait_limit_s
        waiting = asyncio.ensure_future(places.acquire())
        try:  # asyncio.wait_for can miss that this call is cancelled
            await asyncio.wait({waiting}, timeout=limit_s)
            self._has_place = waiting.done()
        except asyncio.CancelledError:
            if waiting.done():
                places.release()
            raise
        finally:
            waiting.cancel()
        if not self._has_place:
            raise ToolUnavailable(
                f"all {self._tool.options.max_sandboxes} sandboxes were in use for {limit_s:g} s; raise max_sandboxes, "
                "or run fewer episodes at once"
            )

    def _create(self) -> PythonSession:
        return PythonSession(
            limits=self._tool.limits,
            seed=self._seed,
            readable=self._tool.options.readable,
            allow_weak=bool(self._tool.weaknesses),
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.to_thread(process.close)
            finally:
                self._release()

    def _release(self) -> None:
        if self._has_place:
            self._has_place = False
            self._tool.places.release()

    def _why(self, run: CellRun) -> str:
        limits = self._tool.limits
        return ENDINGS.get(run.ending, run.ending).format(
            time_limit_s=self._tool.options.time_limit_s,
            cpu_s=limits.cpu_s,
            memory_mib=limits.memory_bytes >> 20,
            output_bytes=limits.output_bytes,
            folder_bytes=limits.folder_bytes,
        )


def _allow_descriptors(num_sandboxes: int) -> None:
    """Raises this process's soft limit of file descriptors if that many sandboxes need it."""
    needed = DESCRIPTORS * num_sandboxes + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ToolUnavailable(
            f"max_sandboxes={num_sandboxes} of the tool python needs {needed} file descriptors, this process may have "
            f"{hard} (ulimit -Hn); use at most {(hard - OTHER_DESCRIPTORS) // DESCRIPTORS}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _checksum(run: CellRun) -> int:
    return zlib.crc32(f"{run.ending}\n{run.output}".encode("utf-8", "surrogatepass"))


def _close_started(starting: asyncio.Future[PythonSession]) -> None:
    """Ends a process that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, starting.result().close)
