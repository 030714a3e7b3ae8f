"""A Python process in a sandbox that runs one cell after another, as a notebook does.

The walls are those of `run_python` (sandbox.py), for the whole life of the process. What is specific to sessions:
- a cell is a text; names, imports and files stay for the next one. A last expression is shown as a notebook shows it;
- a cell that reaches a limit or ends the process ends the session: its state is lost. One that raises does not;
- between two cells nothing runs in the sandbox (with namespaces): all its processes are stopped;
- `random` and the hashes of texts begin with a seed, so that the same cells in another session have the same effect
  unless they use the time, other random numbers, or addresses.
"""

import json
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.confinement.supervisor import PAUSE, RUN
from rlinf_algos.rewards.sandbox import run_from_report
from rlinf_algos.rewards.sandbox_process import SandboxLimits, SandboxProcess

CellEnding = Literal["done", "raised", "exited", "timeout", "memory", "output", "files", "killed", "garbled", "closed"]
SESSION_LIMITS = SandboxLimits(wall_s=24 * 3600.0, cpu_s=120)
"""Limits of a session. Time and output of a cell have limits of their own."""
START_LIMIT_S = 60.0
MAX_REPLY_BYTES = 4096
MAX_CODE_BYTES = 1 << 20
_SIDE = Path(__file__).with_name("sandboxed") / "session_side.py"
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Threads count as processes, and their stacks as address space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRun:
    """What a cell resulted in.

    Example: CellRun(ending="raised", output="Traceback ...\\nNameError: name 'x' is not defined\\n", error="NameError")
    """

    ending: CellEnding
    """done; raised: by an exception; after these two the session goes on. The state is lost after the others. exited,
    timeout, memory, output, files, killed: as in `SandboxRun`, where timeout is that of the cell or the processor time
    of the session; garbled: the cell replied in place of the session; closed: the session was closed meanwhile."""
    output: str
    """Standard output and standard error, in the order in which they were written."""
    error: str = ""
    """Name of the exception if the cell raised one."""

    @property
    def is_alive(self) -> bool:
        """Whether the session has kept its state."""
        return self.ending in ("done", "raised")


class PythonSession:
    """A Python process in a sandbox; see the module's docstring. Use it as a context manager, or call `close`.

    Args:
        limits: limits of the process; `output_bytes` are those of one cell.
        seed: seed of `random` and of the hashes of texts.
        readable, namespaces, landlock, allow_weak: as in `run_python`.

    Raises:
        RewardError: the sandbox could not start.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits = SESSION_LIMITS,
        seed: int = 0,
        readable: Sequence[str] = (),
        namespaces: bool = True,
        landlock: bool = True,
        allow_weak: bool = True,
    ) -> None:
        self._limits = limits
        self._lock, self._is_closing, self._number = threading.Lock(), False, 0
        request_read, self._requests = os.pipe()
        self._replies, reply_write = os.pipe()
        control_read, self._control = os.pipe()
        for fd in (self._requests, self._replies):
            os.set_blocking(fd, False)
        try:
            self._sandbox: SandboxProcess | None = _in_lasting_thread(
                lambda: SandboxProcess(
                    {_SIDE.name: _script()},
                    ["-s", "-B", _SIDE.name, str(seed)],
                    limits=limits,
                    readable=readable,
                    namespaces=namespaces,
                    landlock=landlock,
                    allow_weak=allow_weak,
                    channel=(request_read, reply_write),
                    control=control_read,
                    env_vars={"PYTHONHASHSEED": str(seed % 2**32), **_THREADS},
                    merge_output=True,
                )
            )
        except BaseException:
            self._close_pipes()
            raise
        assert self._sandbox.process.stdout is not None, "it is a pipe"
        os.set_blocking(self._sandbox.process.stdout.fileno(), False)
        self._start()

    def __enter__(self) -> "PythonSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether it can run another cell."""
        return self._sandbox is not None

    @property
    def process_id(self) -> int | None:
        """The process below which its sandbox is; None if it has ended."""
        return None if self._sandbox is None else self._sandbox.process.pid

    def run(self, code: str, *, time_limit_s: float = 10.0) -> CellRun:
        """Runs a cell and waits for its end.

        Raises:
            RewardError: the session has ended before, or its sandbox was ended from outside.
        """
        with self._lock:
            if self._sandbox is None:
                raise RewardError("the session has ended")
            self._number += 1
            request = json.dumps([self._number, code]).encode() + b"\n"
            if len(request) > MAX_CODE_BYTES:
                return CellRun(
                    ending="raised", output=f"more than {MAX_CODE_BYTES} bytes of code\n", error="ValueError"
                )
            _write(self._control, RUN)
            exchange = _Exchange(self._sandbox, self._requests, self._replies, self._limits.output_bytes)
            exchange.run(request, time_limit_s)
            if exchange.ending is None and (result := _cell_run(exchange, self._number)) is not None:
                _write(self._control, PAUSE)
                return result
            return self._ended(exchange)

    def close(self) -> None:
        """Ends the process. May be called by any thread, also while a cell runs, which then ends as `closed`."""
        self._is_closing = True
        sandbox = self._sandbox
        if sandbox is not None and sandbox.process.poll() is None:
            sandbox.process.terminate()
        with self._lock:
            if self._sandbox is not None:
                self._end()

    def _start(self) -> None:
        """Waits until the process is ready."""
        assert self._sandbox is not None, "it has been created"
        exchange = _Exchange(self._sandbox, self._requests, self._replies, self._limits.output_bytes)
        exchange.run(b"", START_LIMIT_S)
        if exchange.ending is not None or _cell_run(exchange, 0) is None:
            report = self._end()
            why = report.get("failed") or exchange.text[-500:] or f"it was not ready within {START_LIMIT_S:g} s"
            raise RewardError(f"the sandbox could not start: {why}")

    def _ended(self, exchange: "_Exchange") -> CellRun:
        """How a cell ended after which the session is not alive."""
        ending: CellEnding = exchange.ending or "garbled"
        report = self._end(patience_s=0.5 if ending == "exited" else 0.0)
        if self._is_closing:
            ending = "closed"
        elif ending == "exited":
            if not report:
                raise RewardError("the sandbox was killed from outside: it ended without a report")
            ending = run_from_report(report, bytes(exchange.output), b"", False, self._limits).ending
        return CellRun(ending=ending, output=exchange.text)

    def _end(self, *, patience_s: float = 0.0) -> dict[str, Any]:
        assert self._sandbox is not None, "it is ended once"
        sandbox, self._sandbox = self._sandbox, None
        self._close_pipes()
        return sandbox.end(patience_s=patience_s)

    def _close_pipes(self) -> None:
        for fd in (self._requests, self._replies, self._control):
            os.close(fd)


class _Exchange:
    """One request and its reply, and what the program prints meanwhile."""

    def __init__(self, sandbox: SandboxProcess, requests: int, replies: int, output_limit: int) -> None:
        assert sandbox.process.stdout is not None, "it is a pipe"
        self._stdout, self._status = sandbox.process.stdout.fileno(), sandbox.status.fileno()
        self._requests, self._replies, self._output_limit = requests, replies, output_limit
        self.output, self.reply = bytearray(), bytearray()
        self.ending: Literal["exited", "timeout", "output"] | None = None
        """exited: the program has ended, and the sandbox knows how; None: there is a reply."""

    @property
    def text(self) -> str:
        return self.output[: self._output_limit].decode("utf-8", "replace")

    def run(self, request: bytes, time_limit_s: float) -> None:
        """Sends the request and waits for the end of the reply, or for another ending."""
        deadline, left = time.monotonic() + time_limit_s, memoryview(request)
        with selectors.DefaultSelector() as selector:
            for fd in (self._stdout, self._replies, self._status):
                selector.register(fd, selectors.EVENT_READ)
            if left:
                selector.register(self._requests, selectors.EVENT_WRITE)
            while self.ending is None and not self._has_reply:
                events = selector.select(max(deadline - time.monotonic(), 0))
                ready = [key.fd for key, _ in events]
                if not ready and time.monotonic() >= deadline:
                    self.ending = "timeout"
                if self._requests in ready:
                    left = left[_write(self._requests, left) :]
                    if not left:
                        selector.unregister(self._requests)
                if self._stdout in ready and not self._read_output():
                    selector.unregister(self._stdout)
                if self._replies in ready:
                    piece = os.read(self._replies, MAX_REPLY_BYTES)
                    self.reply += piece
                    if not piece:
                        selector.unregister(self._replies)
                if self._status in ready and not self._has_reply:
                    self.ending = "exited"
                if len(self.output) > self._output_limit:
                    self.ending = "output"
        while self._read_output():
            pass  # what was printed before the reply or before the end

    @property
    def _has_reply(self) -> bool:
        return b"\n" in self.reply or len(self.reply) >= MAX_REPLY_BYTES

    def _read_output(self) -> bool:
        """Whether there was output, and may be more."""
        if len(self.output) > self._output_limit:
            return False
        try:
            piece = os.read(self._stdout, 1 << 16)
        except BlockingIOError:
            return False
        self.output += piece
        return bool(piece)


def _write(fd: int, data: bytes | memoryview) -> int:
    """Number of bytes that were written, or that nobody reads any more."""
    try:
        return os.write(fd, data)
    except BrokenPipeError:
        return len(data)


def _cell_run(exchange: _Exchange, number: int) -> CellRun | None:
    """What the reply says; None if it is not a reply to this request."""
    try:
        replied, ending, error = json.loads(exchange.reply)
    except (ValueError, TypeError, RecursionError):
        return None
    if replied != number or ending not in ("done", "raised") or not isinstance(error, str):
        return None
    return CellRun(ending=ending, output=exchange.text, error=error)


def _in_lasting_thread(make: Callable[[], SandboxProcess]) -> SandboxProcess:
    """Calls `make` in a thread that lasts as long as this process: the kernel ends a sandbox with its thread."""
    return _starter(os.getpid()).submit(make).result()


@lru_cache(maxsize=1)
def _starter(process: int) -> ThreadPoolExecutor:
    """Its thread. A forked process has none of its parent's threads, so it gets another."""
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox starter")


@lru_cache(maxsize=1)
def _script() -> str:
    return _SIDE.read_text(encoding="utf-8")
