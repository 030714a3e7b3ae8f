"""What a launcher has to do, as functions that raise AssertionError. Each takes what makes one and a folder for logs:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_launcher_conforms(check, tmp_path):
        check(MyLauncher, tmp_path)

`make` is a class or a function at the top of a module, since one check makes a launcher in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_workers.errors import RemoteError, WorkerLost
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launcher.base import Identity, Launcher, WorkerSpec
from rlinf_workers.testing.toy_flow import Fault, Scale

Make = Callable[[], Launcher]

START_S = 60.0
"""For a process to start and answer."""
NOTICE_S = 30.0
"""For a death to be noticed; far more than the few seconds it takes on a machine that is not busy."""


def worker_spec(folder: Path, rank: int = 0, num_ranks: int = 1, **changes: Any) -> WorkerSpec:
    """A worker that breaks on demand."""
    identity = Identity(role="fault", rank=rank, num_ranks=num_ranks, rendezvous=str(folder / "rendezvous"))
    fields: dict[str, Any] = {
        "identity": identity,
        "worker_class": Fault,
        "log_path": folder / "fault" / f"{rank}.log",
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    return WorkerSpec(**(fields | changes))


@contextmanager
def launched(make: Make) -> Iterator[Launcher]:
    """A launcher that is shut down at the end."""
    launcher = make()
    try:
        yield launcher
    finally:
        launcher.shutdown()


def check_calls(make: Make, folder: Path) -> None:
    """Calls return results, those of one lane in order, those of two lanes at once; exceptions come with their
    traceback and end nothing."""
    with launched(make) as launcher:
        handle = launcher.start(worker_spec(folder))
        assert handle.name == "fault/0", handle.name
        assert handle.call("sleep", 0.0).result(START_S) == 0.0
        futures = [handle.call("count") for _ in range(20)]
        found = [future.result(START_S) for future in futures]
        assert found == list(range(20)), f"calls of one lane ran in another order: {found}"
        error = _raised(handle.call("raise_error"), START_S)
        assert isinstance(error, RemoteError), f"an exception of a method came as {error!r}"
        assert "ValueError: broken on purpose" in str(error), str(error)
        assert "in raise_error" in error.remote_traceback, error.remote_traceback
        slow = handle.call("sleep", NOTICE_S)
        assert handle.call("process_id", lane=1).result(NOTICE_S / 2) > 0, "lane 1 waits for lane 0"
        assert not slow.done()


def check_ranks_meet(make: Make, folder: Path) -> None:
    """The ranks of a group find each other for collectives."""
    with launched(make) as launcher:
        group = WorkerGroup("fault", [launcher.start(worker_spec(folder, rank, 2)) for rank in range(2)], launcher)
        found = group.call("sum_of_ranks", timeout_s=2 * START_S)
        assert found == [3.0, 3.0], found


def check_services(make: Make, folder: Path) -> None:
    """Requests reach their handler with the worker's name, and replies the worker, also late ones; waits are told."""
    with launched(make) as launcher:
        asked: list[tuple[str, Any]] = []
        replies: list[Callable[[Any], None]] = []

        def handler(worker: str, request: Any, reply: Callable[[Any], None]) -> None:
            asked.append((worker, request))
            replies.append(reply)

        launcher.serve("echo", handler)
        handle = launcher.start(worker_spec(folder))
        waiting = handle.call("ask", "echo", 7)
        _until(lambda: any(wait.target == "echo" for wait in launcher.waits()), START_S, "no wait was told")
        assert asked == [("fault/0", 7)], asked
        assert not waiting.done()
        replies[0]("seven")
        assert waiting.result(START_S) == "seven"


def check_deaths(make: Make, folder: Path) -> None:
    """A death is reported with role, rank, cause and the end of the log, and fails every present and later call."""
    with launched(make) as launcher:
        handle = launcher.start(worker_spec(folder))
        pending = handle.call("sleep", 600.0, lane=1)
        handle.call("die")
        error = _raised(launcher.lost, START_S + NOTICE_S)
        assert isinstance(error, WorkerLost), f"a death came as {error!r}"
        assert "fault/0" in str(error) and "7" in str(error), str(error)
        assert "about to die" in error.log_tail, error.log_tail
        for call in (pending, handle.call("sleep", 0.0)):
            assert isinstance(_raised(call, NOTICE_S), WorkerLost)


def check_a_killed_worker(make: Make, folder: Path) -> None:
    """A worker that the system kills is reported too."""
    with launched(make) as launcher:
        handle = launcher.start(worker_spec(folder))
        os.kill(handle.call("process_id").result(START_S), signal.SIGKILL)
        error = _raised(launcher.lost, NOTICE_S)
        assert isinstance(error, WorkerLost) and "SIGKILL" in str(error), repr(error)


def check_a_failed_constructor(make: Make, folder: Path) -> None:
    """A worker that cannot be made says why."""
    with launched(make) as launcher:
        launcher.start(worker_spec(folder, worker_class=Scale, arguments=("one too many",)))
        error = _raised(launcher.lost, START_S)
        assert isinstance(error, WorkerLost) and "TypeError" in str(error), repr(error)


def check_shutdown(make: Make, folder: Path) -> None:
    """Nothing is left behind, however busy; twice does no harm."""
    launcher = make()
    try:
        handles = [launcher.start(worker_spec(folder, rank, 2)) for rank in range(2)]
        pids = [handle.call("process_id").result(START_S) for handle in handles]
        handles[0].call("sleep", 600.0)
    finally:
        launcher.shutdown()
    assert_gone(pids)
    launcher.shutdown()


def check_a_killed_driver(make: Make, folder: Path, how: signal.Signals = signal.SIGKILL) -> None:
    """Workers end with their driver, even one that could not shut down."""
    path = f"{make.__module__}:{make.__qualname__}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    driver = subprocess.Popen(
        [sys.executable, "-m", __name__, path, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout
    pid = int(driver.stdout.readline())
    driver.send_signal(how)
    driver.wait(timeout=START_S)
    assert_gone([pid])


CHECKS: tuple[Callable[[Make, Path], None], ...] = (
    check_calls,
    check_ranks_meet,
    check_services,
    check_deaths,
    check_a_killed_worker,
    check_a_failed_constructor,
    check_shutdown,
    check_a_killed_driver,
)


def assert_gone(pids: Sequence[int]) -> None:
    """The processes end within seconds. A zombie has ended; only its parent has not looked yet."""

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


def _raised(future: Any, timeout_s: float) -> BaseException | None:
    return future.exception(timeout=timeout_s)


def _drive(path: str, folder: Path) -> None:
    """The driver of `check_a_killed_driver`: never shuts its launcher down."""
    from rlinf_workers.registry import LAUNCHERS

    handle = LAUNCHERS.get(path)().start(worker_spec(folder))
    print(handle.call("process_id").result(), flush=True)
    handle.call("sleep", 600.0).result()


if __name__ == "__main__":
    _drive(sys.argv[1], Path(sys.argv[2]))
