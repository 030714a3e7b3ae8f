"""The program of one slot of a `ProcessPool`: keeps one checking process running and always replies for it.

Runs as a separate script, so that it imports neither torch nor the caller's main module: it loads the checker's module
once, and each checking process is a fork of it, ready in milliseconds. The kernel ends the checking process once a
single check has used its CPU time (a timer of the process, with which no library can interfere); this program ends it
if it exceeds its memory or its wall time. A check that hangs keeps nothing alive: this program ends as soon as its
caller does, and the kernel ends the checking process with it.

Frames on every pipe: 4 bytes length (big endian), then JSON in ASCII. Requests are lists of argument lists; for each
argument list one frame [outcome, detail] is sent back, in order.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

POLL_S = 0.05
"""Seconds between two checks of a busy process's memory."""
RECYCLE_AFTER = 2000
"""Number of checks after which a fresh fork replaces the process, so that the checker's caches stay small."""
PR_SET_PDEATHSIG = 1


def read_frame(fd: int) -> "Any":
    """The next frame, or None at the end of the pipe."""
    head = _read_exactly(fd, 4)
    if head is None:
        return None
    body = _read_exactly(fd, struct.unpack(">I", head)[0])
    return None if body is None else json.loads(body)


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def write_frame(fd: int, value: object):
    body = json.dumps(value).encode("ascii")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


class CallerGone(Exception):
    """The caller has closed its pipe or ended."""


class Checker:
    """The checking process: a fork of this one that calls `check` for each request.

    requests, replies: this slot's own pipes, which the checking process closes, so that the pool sees them close when
    its keeper dies.
    """

    def __init__(
        self,
        check: "Callable[..., list[Any]]",
        time_limit_s: float,
        wall_limit_s: float,
        memory_limit_bytes: int,
        requests: int,
        replies: int,
    ):
        self._time_limit_s = time_limit_s
        self._wall_limit_s = wall_limit_s
        self._memory_limit_bytes = memory_limit_bytes
        self._num_checks = 0
        self._caller = select.poll()
        self._caller.register(requests, 0)  # reports a hang-up only
        keeper = os.getpid()
        request_read, self._request_write = os.pipe()
        self._reply_read, reply_write = os.pipe()
        pid = os.fork()
        self._pid: int | None = pid
        if pid == 0:
            os.close(self._request_write)
            os.close(self._reply_read)
            os.close(requests)
            os.close(replies)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(1)
            _check_forever(check, request_read, reply_write, time_limit_s, memory_limit_bytes)
        os.close(request_read)
        os.close(reply_write)
        self._answered = select.poll()
        self._answered.register(self._reply_read, select.POLLIN)

    def is_worn(self):
        return self._num_checks >= RECYCLE_AFTER

    def ask(self, arguments: list[str]):
        """[outcome, detail] of one check; ["died", why] if the process ended during it. Then `end` must be called.

        Raises CallerGone.
        """
        self._num_checks += 1
        try:
            write_frame(self._request_write, arguments)
        except BrokenPipeError:
            return ["died", describe(self._wait())]
        deadline = time.monotonic() + self._wall_limit_s
        while not self._answered.poll(POLL_S * 1000):
            if self._caller.poll(0):
                raise CallerGone
            if self._resident_bytes() > self._memory_limit_bytes:
                return ["memory", f"more than {self._memory_limit_bytes >> 20} MiB"]
            if time.monotonic() > deadline:
                return ["timeout", f"no answer in {self._wall_limit_s:g} s"]
        reply = read_frame(self._reply_read)
        if reply is not None:
            return reply
        status = self._wait()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU):
            return ["timeout", f"more than {self._time_limit_s:g} s of CPU time"]
        return ["died", describe(status)]

    def end(self):
        """Kills the process if it lives, and waits for it."""
        for fd in (self._request_write, self._reply_read):
            os.close(fd)
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None

    def _wait(self):
        """The status of the process, which has ended."""
        assert self._pid is not None, "a process is waited for once"
        status = os.waitpid(self._pid, 0)[1]
        self._pid = None
        return status

    def _resident_bytes(self):
        try:
            with open(f"/proc/{self._pid}/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except (OSError, IndexError):
            return 0


def describe(status: int):
    """A status of waitpid in words."""
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with {os.WEXITSTATUS(status)}"


def _check_forever(
    check: "Callable[..., list[Any]]", requests: int, replies: int, time_limit_s: float, memory_limit_bytes: int
):
    """Body of the checking process; never returns."""
    try:
        os.dup2(0, 2)  # /dev/null
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        address_space = _address_space_bytes() + 2 * memory_limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))  # bounds growth between two checks
        while True:
            arguments = read_frame(requests)
            if arguments is None:
                os._exit(0)
            signal.setitimer(signal.ITIMER_PROF, time_limit_s)
            try:
                reply = check(*arguments)
            except MemoryError:
                reply = ["memory", "out of memory"]
            except RecursionError:
                reply = ["memory", "nested too deeply"]
            except Exception as e:  # noqa: BLE001 - an exception of the checker is its reply to the caller
                reply = ["crashed", f"{type(e).__name__}: {e}"[:500]]
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(replies, reply)
    finally:
        os._exit(1)


def _address_space_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def load_check(path: str) -> "Callable[..., list[Any]]":
    """The function `check` of the module at `path`."""
    spec = importlib.util.spec_from_file_location("pool_checker", path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


def main():
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    hello = read_frame(requests)
    if hello is None:
        return
    sys.path[:] = hello["sys_path"]
    try:
        check = load_check(hello["checker"])
    except Exception as e:  # noqa: BLE001 - sent to the pool, which raises it
        write_frame(replies, ["failed", f"{type(e).__name__}: {e}"])
        return
    gc.collect()
    gc.freeze()  # forks must not scan what is loaded, which would copy its pages
    gc.set_threshold(50_000)  # parsers make many small cycles
    write_frame(replies, ["ready", str(os.getpid())])
    limits = hello["time_limit_s"], hello["wall_limit_s"], hello["memory_limit_bytes"]
    checker = None
    while True:
        batch = read_frame(requests)
        if batch is None:
            break
        for arguments in batch:
            for attempt in (1, 2):
                if checker is None:
                    checker = Checker(check, *limits, requests=requests, replies=replies)
                outcome, detail = checker.ask(arguments)
                if outcome in ("died", "timeout", "memory") or checker.is_worn():
                    checker.end()
                    checker = None
                if outcome != "died":
                    break
                detail = f"{detail}, {'once' if attempt == 1 else 'twice'}"
            write_frame(replies, ["crashed" if outcome == "died" else outcome, detail])
    if checker is not None:
        checker.end()


if __name__ == "__main__":
    with contextlib.suppress(CallerGone):
        main()
