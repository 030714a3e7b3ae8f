"""The conformance suite of launchers: functions that raise AssertionError. Each takes a factory and a folder for logs:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_launcher_conforms(check, tmp_path):
        check(MyLauncher, tmp_path)

`make` is a class or a function at the top of a module, because one check creates a launcher in another process.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rlinf_algos import path_of
from rlinf_workers import protocol
from rlinf_workers.errors import RemoteError, WorkerLost, WorkersError
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launchers.base import Identity, Launcher, WorkerSpec
from rlinf_workers.plugins import LAUNCHERS
from rlinf_workers.testing.toy_flow import Fault, Refusing, Scale
from rlinf_workers.testing.venvs import second_venv

Make = Callable[[], Launcher]
L = TypeVar("L", bound=Launcher)

START_S = 300.0
"""Time limit for a process to start and answer."""
NOTICE_S = 30.0
"""Time limit for detecting a death; it takes a few seconds on an idle machine."""


@contextmanager
def launched(make: Callable[[], L]) -> Iterator[L]:
    """Context with a launcher, which is shut down at the end."""
    launcher = make()
    try:
        yield launcher
    finally:
        launcher.shutdown()


def start(
    launcher: Launcher,
    folder: Path,
    worker_class: type = Fault,
    *arguments: Any,
    num_ranks: int = 1,
    num_ranks_per_replica: int = 1,
    python: str | None = None,
) -> WorkerGroup:
    """Starts the ranks of a worker; by default of one that breaks on demand, in this venv."""
    handles = []
    for rank in range(num_ranks):
        identity = Identity(
            role=worker_class.__name__.lower(),
            rank=rank,
            num_ranks=num_ranks,
            num_ranks_per_replica=num_ranks_per_replica,
            rendezvous=str(folder / "rendezvous"),
        )
        spec = WorkerSpec(
            identity=identity,
            worker_class=worker_class,
            arguments=arguments,
            log_path=folder / f"{identity.name}.log",
            env_vars={"OMP_NUM_THREADS": "1"},
            python=python,
        )
        handles.append(launcher.start(spec))
    return WorkerGroup(handles, launcher)


def check_calls(make: Make, folder: Path) -> None:
    """Calls return results: in order within a lane, concurrently across two lanes. Exceptions arrive with their
    traceback and end nothing."""
    with launched(make) as launcher:
        (handle,) = start(launcher, folder).handles
        counts = [future.result(START_S) for future in [handle.call("count") for _ in range(20)]]
        assert counts == list(range(20)), f"calls of one lane ran in another order: {counts}"
        error = handle.call("raise_error").exception(START_S)
        assert isinstance(error, RemoteError), f"an exception of a method came as {error!r}"
        assert "ValueError: broken on purpose" in str(error), str(error)
        assert "in raise_error" in error.remote_traceback, error.remote_traceback
        slow = handle.call("sleep", NOTICE_S)
        assert handle.call("process_id", lane=1).result(NOTICE_S / 2) > 0, "lane 1 waits for lane 0"
        assert not slow.done()


def check_ranks_meet(make: Make, folder: Path) -> None:
    """The ranks of a group connect for collectives."""
    with launched(make) as launcher:
        sums = start(launcher, folder, num_ranks=2).call("sum_of_ranks", timeout_s=2 * START_S)
        assert sums == [3.0, 3.0], sums


def check_services(make: Make, folder: Path) -> None:
    """Requests reach their handler with the worker's name, and replies reach the worker, including late ones and those
    to its constructor; waits are reported."""
    with launched(make) as launcher:
        requests: list[tuple[str, Any, Callable[[Any], None]]] = []
        launcher.serve("echo", lambda *request: requests.append(request))
        waiting = start(launcher, folder).handles[0].call("ask", "echo", 7)
        _until(lambda: any(wait.of == "echo" for wait in launcher.waits()), START_S, "no wait was reported")
        ((worker, value, reply),) = requests
        assert (worker, value) == ("fault/0", 7), requests
        assert not waiting.done()
        reply("seven")
        assert waiting.result(START_S) == "seven"
    with launched(make) as launcher:
        launcher.serve("echo", lambda worker, value, reply: reply(f"{worker} asks {value}"))
        asking = start(launcher, folder, Fault, "echo").handles[0]
        early = asking.call("process_id", lane=1)
        assert asking.call("first_reply").result(START_S) == "fault/0 asks 0"
        assert early.result(START_S) > 0


def check_deaths(make: Make, folder: Path) -> None:
    """A death is reported with role, rank, cause and the end of the log, and fails every present and later call."""
    with launched(make) as launcher:
        (handle,) = start(launcher, folder).handles
        pending = handle.call("sleep", 600.0, lane=1)
        handle.call("die")
        error = _loss(launcher, "fault/0", "7")
        assert "about to die" in error.log_tail, error.log_tail
        for call in (pending, handle.call("sleep", 0.0)):
            assert isinstance(call.exception(NOTICE_S), WorkerLost)


def check_a_killed_worker(make: Make, folder: Path) -> None:
    """A worker killed by the system is reported too."""
    with launched(make) as launcher:
        os.kill(start(launcher, folder).call("process_id", timeout_s=START_S)[0], signal.SIGKILL)
        _loss(launcher, "SIGKILL")


def check_a_failed_constructor(make: Make, folder: Path) -> None:
    """A worker that fails in its constructor reports why; refused settings are reported for the user."""
    with launched(make) as launcher:
        start(launcher, folder, Scale, "one too many")
        assert _loss(launcher, "TypeError").refusal is None
    with launched(make) as launcher:
        start(launcher, folder, Refusing, "the moon is too high")
        assert _loss(launcher, "the moon").refusal == "the moon is too high"


def check_another_environment(make: Make, folder: Path) -> None:
    """A worker runs in the venv of its spec, can import the user's own modules, and is watched like others. One with
    another protocol is not started, and the message names both versions."""
    python = second_venv(folder / "environment")
    (folder / "modules").mkdir()
    (folder / "modules" / "users_own.py").write_text(_USERS_OWN)
    sys.path.append(str(folder / "modules"))
    try:
        worker_class = importlib.import_module("users_own").Prefixed
        with launched(make) as launcher:
            (handle,) = start(launcher, folder, worker_class, python=python).handles
            prefix = handle.call("prefix").result(START_S)
            assert prefix == str(folder / "environment"), f"asked for {python}, ran in {prefix}"
            slow, pid = handle.call("sleep", 600.0), handle.call("process_id", lane=1).result(START_S)
            os.kill(pid, signal.SIGKILL)
            _loss(launcher, "SIGKILL")
            assert isinstance(slow.exception(NOTICE_S), WorkerLost)
            assert_gone([pid])
    finally:
        sys.path.remove(str(folder / "modules"))
        sys.modules.pop("users_own", None)
    other = protocol.PROTOCOL + 1
    python = second_venv(folder / "other", protocol=other)
    with launched(make) as launcher:
        start(launcher, folder, python=python)
        _loss(launcher, python, sys.executable, f"rlinf-workers: {other} against {protocol.PROTOCOL}")


def check_shutdown(make: Make, folder: Path) -> None:
    """Leaves nothing behind, however busy the workers are; may be called twice."""
    with launched(make) as launcher:
        group = start(launcher, folder, num_ranks=2)
        pids = group.call("process_id", timeout_s=START_S)
        group.start_call("sleep", 600.0)
        launcher.shutdown()
        assert_gone(pids)


def check_a_replacement(make: Make, folder: Path) -> None:
    """Lost or ended workers are forgotten, and others may be started under their names."""
    with launched(make) as launcher:
        (dying,) = start(launcher, folder).handles
        (living,) = start(launcher, folder, Scale).handles
        pid = dying.call("process_id").result(START_S)
        assert not dying.is_lost
        os.kill(pid, signal.SIGKILL)
        _loss(launcher, "fault/0")
        assert dying.is_lost and not living.is_lost
        launcher.forget_lost()
        assert not launcher.lost.done(), "what was forgotten is told again"
        (anew,) = start(launcher, folder).handles
        pid = anew.call("process_id").result(START_S)
        launcher.end(anew)
        assert_gone([pid])
        assert anew.is_lost and isinstance(anew.call("count").exception(START_S), WorkersError)
        assert not launcher.lost.done(), "whoever ends a worker knows of it"
        assert not living.is_lost


def check_a_killed_driver(
    make: Make, folder: Path, how: signal.Signals = signal.SIGKILL, python: str | None = None
) -> None:
    """Workers end with their driver, even if it could not shut down."""
    driver = subprocess.Popen(
        [sys.executable, "-m", __name__, path_of(make), str(folder), *([python] if python else [])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout
    pid = int(driver.stdout.readline())
    driver.send_signal(how)
    driver.wait(timeout=START_S)
    assert_gone([pid])


_USERS_OWN = """
import sys
from rlinf_workers.testing.venvs import second_venv
from rlinf_workers.testing.toy_flow import Fault

class Prefixed(Fault):
    def prefix(self):
        return sys.prefix
"""

CHECKS: tuple[Callable[[Make, Path], None], ...] = (
    check_calls,
    check_ranks_meet,
    check_services,
    check_deaths,
    check_a_killed_worker,
    check_a_failed_constructor,
    check_another_environment,
    check_a_replacement,
    check_shutdown,
    check_a_killed_driver,
)


def assert_gone(pids: Sequence[int]) -> None:
    """The processes end within seconds. A zombie counts as ended; its parent has not reaped it yet."""

    def runs(pid: int) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    _until(lambda: not any(map(runs, pids)), NOTICE_S, f"processes of {pids} are left")


def _until(condition: Callable[[], bool], timeout_s: float, message: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


def _loss(launcher: Launcher, *words: str) -> WorkerLost:
    """The launcher's report about a worker that is gone."""
    error = launcher.lost.exception(START_S + NOTICE_S)
    assert isinstance(error, WorkerLost) and all(word in str(error) for word in words), f"{error!r} lacks {words}"
    return error


if __name__ == "__main__":  # the driver of `check_a_killed_driver`, which never shuts its launcher down
    ranks = start(LAUNCHERS.get(sys.argv[1])(), Path(sys.argv[2]), python=next(iter(sys.argv[3:]), None))
    print(*ranks.call("process_id"), flush=True)
    ranks.call("sleep", 600.0)
