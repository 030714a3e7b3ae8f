"""LocalLauncher: calls, failures, deaths, and that nothing stays behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlinf_workers import FlowDefinitionError, LocalLauncher, RemoteError, WorkerGroup, WorkerLost
from rlinf_workers.launcher.base import Identity, WorkerSpec
from rlinf_workers.launcher.cores import cores_of_slots
from rlinf_workers.testing.toy_flow import Fault, Scale


@pytest.fixture
def launcher():
    made = LocalLauncher()
    yield made
    made.shutdown()


def spec(tmp_path: Path, rank: int = 0, num_ranks: int = 1, **changes) -> WorkerSpec:
    rendezvous = str(tmp_path / "rendezvous")
    fields = {
        "identity": Identity(role="fault", rank=rank, num_ranks=num_ranks, rendezvous=rendezvous),
        "worker_class": Fault,
        "log_path": tmp_path / "fault" / f"{rank}.log",
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    return WorkerSpec(**(fields | changes))


def is_running(pid: int) -> bool:
    """A zombie has ended; only its parent has not looked yet."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_calls_return_results_and_remote_tracebacks(launcher, tmp_path):
    handle = launcher.start(spec(tmp_path))
    assert handle.call("sleep", 0.0).result(timeout=60) == 0.0
    with pytest.raises(RemoteError, match="fault/0: ValueError: broken on purpose") as caught:
        handle.call("raise_error").result(timeout=60)
    assert "in raise_error" in caught.value.remote_traceback
    assert re.fullmatch(r".*testing.*\.py:\d+", caught.value.raised_in or "")
    assert handle.call("sleep", 0.0).result(timeout=60) == 0.0, "an exception does not end the process"


def test_lanes_run_at_once(launcher, tmp_path):
    handle = launcher.start(spec(tmp_path))
    slow = handle.call("sleep", 30.0)
    assert handle.call("process_id", lane=1).result(timeout=60) > 0
    assert not slow.done()


def test_a_group_calls_all_ranks_some_ranks_and_scatters(launcher, tmp_path):
    handles = [launcher.start(spec(tmp_path, rank, 2)) for rank in range(2)]
    group = WorkerGroup("fault", handles, launcher)
    assert group.call("sum_of_ranks", timeout_s=60) == [3.0, 3.0]
    assert group.scatter("sleep", [0.0, 0.001]) == [0.0, 0.001]
    assert len(group.call("process_id", ranks=[1])) == 1
    with pytest.raises(FlowDefinitionError, match="1 parts for 2 ranks"):
        group.scatter("sleep", [0.0])


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_death_is_noticed_with_cause_and_log_tail(launcher, tmp_path, how):
    handle = launcher.start(spec(tmp_path))
    pid = handle.call("process_id").result(timeout=60)
    pending = handle.call("sleep", 60.0, lane=1)
    if how == "exit":
        handle.call("die")
    else:
        os.kill(pid, signal.SIGKILL)
    cause = "exited with code 7" if how == "exit" else "killed by SIGKILL"
    with pytest.raises(WorkerLost, match=f"worker fault/0 on .* was lost: {cause}") as caught:
        launcher.lost.result(timeout=30)
    if how == "exit":
        assert "about to die" in caught.value.log_tail
    with pytest.raises(WorkerLost):
        pending.result(timeout=30)
    with pytest.raises(WorkerLost):
        handle.call("sleep", 0.0).result(timeout=30)


def test_a_worker_that_cannot_be_made_says_why(launcher, tmp_path):
    launcher.start(spec(tmp_path, worker_class=Scale, arguments=("one too many",)))
    with pytest.raises(WorkerLost, match=r"could not start: TypeError: .*positional argument"):
        launcher.lost.result(timeout=60)


def test_a_frozen_worker_counts_as_lost(tmp_path):
    launcher = LocalLauncher(heartbeat_timeout_s=3.0)
    try:
        handle = launcher.start(spec(tmp_path))
        pid = handle.call("process_id").result(timeout=60)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"silent after \d+ s \(limit 3 s\); killed"):
            launcher.lost.result(timeout=60)
        assert wait_until_gone([pid])
    finally:
        launcher.shutdown()


def test_a_class_inside_a_function_is_refused(launcher, tmp_path):
    class Hidden(Fault):
        pass

    with pytest.raises(FlowDefinitionError, match="defined inside a function"):
        launcher.start(spec(tmp_path, worker_class=Hidden))


def test_shutdown_leaves_no_process(tmp_path):
    launcher = LocalLauncher()
    handles = [launcher.start(spec(tmp_path, rank, 2)) for rank in range(2)]
    pids = [handle.call("process_id").result(timeout=60) for handle in handles]
    handles[0].call("sleep", 600.0)
    launcher.shutdown()
    assert wait_until_gone(pids)
    launcher.shutdown()


DRIVER = """
    import sys, time
    from pathlib import Path
    from rlinf_workers import LocalLauncher
    from rlinf_workers.launcher.base import Identity, WorkerSpec
    from rlinf_workers.testing.toy_flow import Fault

    if __name__ == "__main__":
        launcher = LocalLauncher()
        log = Path(sys.argv[1]) / "0.log"
        identity = Identity(role="fault", rank=0, num_ranks=1)
        handle = launcher.start(WorkerSpec(identity=identity, worker_class=Fault, log_path=log))
        print(handle.call("process_id").result(), flush=True)
        handle.call("sleep", 600.0).result()  # nobody calls launcher.shutdown()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_driver(tmp_path, how):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout
    pid = int(driver.stdout.readline())
    driver.send_signal(how)
    driver.wait(timeout=60)
    assert wait_until_gone([pid])


@pytest.mark.parametrize(
    ("devices", "cores", "num_threads", "expected"),
    [
        (("cpu:0",), (0, 1), 1, {0}),
        (("cpu:1",), (2, 5), 1, {5}),
        (("cpu:2",), (0, 1), 1, {0}),
        (("cpu:1",), (0, 1, 2, 3), 2, {2, 3}),
        (("cpu:0", "cpu:1"), (0, 1, 2), 1, {0, 1}),
        (("cuda:1",), (0, 1), 1, set()),
        ((), (0, 1), 1, set()),
    ],
)
def test_a_slot_is_a_core_of_those_there_are(devices, cores, num_threads, expected):
    assert cores_of_slots(devices, cores, num_threads) == expected
