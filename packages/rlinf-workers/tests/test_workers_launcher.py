"""LocalLauncher: it conforms, and what is its own."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_workers import FlowDefinitionError, LocalLauncher, RemoteError, WorkerLost
from rlinf_workers.errors import WorkersError
from rlinf_workers.launchers.child import cores_of_slots
from rlinf_workers.launchers.messages import Returned
from rlinf_workers.launchers.served import ServedWorker
from rlinf_workers.testing.launchers import (
    CHECKS,
    assert_gone,
    check_a_killed_driver,
    check_another_environment,
    check_calls,
    check_deaths,
    check_shutdown,
    launched,
    start,
)
from rlinf_workers.testing.toy_flow import Fault
from rlinf_workers.testing.venvs import second_venv

SPAWNED = (check_calls, check_deaths, check_shutdown, check_a_killed_driver, check_another_environment)
"""Those that every run of the tests does with workers of an interpreter each, which take seconds of a core to start."""


@pytest.mark.parametrize(
    "check",
    [check if check in SPAWNED else pytest.param(check, marks=pytest.mark.slow) for check in CHECKS],
    ids=lambda check: check.__name__,
)
def test_it_conforms(check, tmp_path):
    check(LocalLauncher, tmp_path)


def forking() -> LocalLauncher:
    return LocalLauncher(forks=True)


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check not in (check_a_killed_driver, check_another_environment)],
    ids=lambda check: check.__name__,
)
def test_forked_workers_conform(check, tmp_path):
    """The two checks left out start interpreters in any case."""
    check(forking, tmp_path)


def test_workers_end_with_a_driver_that_is_interrupted(tmp_path):
    check_a_killed_driver(LocalLauncher, tmp_path, signal.SIGINT)


def test_workers_of_another_environment_end_with_their_driver(tmp_path):
    check_a_killed_driver(LocalLauncher, tmp_path, python=second_venv(tmp_path / "environment"))


def test_roles_with_and_without_an_environment_of_their_own_run_beside_each_other(tmp_path):
    """Where workers are forked, those of another environment are not."""
    python = second_venv(tmp_path / "environment")
    with launched(lambda: LocalLauncher(forks=True)) as launcher:
        pids = [
            start(launcher, tmp_path / name, python=path).call("process_id")[0]
            for name, path in (("own", None), ("other", python))
        ]
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in pids]
        assert commands == [sys.executable, python]
        assert [os.getsid(pid) for pid in pids] == pids, "a Ctrl-C at the terminal is the driver's"
        launcher.shutdown()
        assert_gone(pids)


def test_a_class_from_a_notebook_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Fault, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    refusal = r"Fault is defined in the program.*`%%writefile my_module\.py`"
    with launched(LocalLauncher) as launcher, pytest.raises(FlowDefinitionError, match=refusal):
        start(launcher, tmp_path)


@pytest.mark.usefixtures("fork_server")
def test_a_group_calls_all_ranks_or_some(tmp_path):
    with launched(forking) as launcher:
        group = start(launcher, tmp_path, num_ranks=2)
        every = group.call("process_id")
        assert len(set(every)) == 2
        assert group.call("process_id", ranks=[1]) == every[1:]
        with pytest.raises(RemoteError) as caught:
            group.call("raise_error")
        assert "toy_flow.py:" in (caught.value.raised_in or ""), "file and line"


def test_a_result_that_cannot_be_decoded_fails_its_call():
    """Other versions of a record in two environments: the call ends, and nobody waits for it."""
    spec: Any = SimpleNamespace(identity=SimpleNamespace(name="env/0"), log_path=Path())
    connection: Any = SimpleNamespace(send_bytes=lambda _: None)
    worker = ServedWorker(spec, connection, connection)
    call = worker.call("look")
    worker.finish_call(Returned(0, b"\xc1"))
    with pytest.raises(WorkersError, match=r"env/0 returned what cannot be decoded here: .*same version"):
        call.result(timeout=0)


def test_a_frozen_worker_counts_as_lost(tmp_path):
    with launched(lambda: LocalLauncher(heartbeat_timeout_s=3.0)) as launcher:
        (pid,) = start(launcher, tmp_path).call("process_id", timeout_s=600)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="silent after 3 s; killed"):
            launcher.lost.result(timeout=600)
        assert_gone([pid])


def test_a_worker_whose_heartbeat_cannot_run_is_not_lost(tmp_path, caplog):
    """One call keeps the interpreter for three times the limit. Stopped, the worker is lost as ever."""
    with launched(lambda: LocalLauncher(heartbeat_timeout_s=2.0)) as launcher:
        (handle,) = start(launcher, tmp_path).handles
        pid = handle.call("process_id").result(600)
        handle.call("sleep_holding_the_interpreter", 6).result(600)
        assert handle.call("process_id").result(600) == pid
        assert not launcher.lost.done()
        assert caplog.text.count("worker fault/0 has sent no heartbeat for 2 s, but its process runs") == 1
        handle.call("sleep_holding_the_interpreter", 600)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="silent after 2 s; killed"):
            launcher.lost.result(timeout=600)
        assert_gone([pid])


def test_a_second_ctrl_c_kills_workers_that_were_given_time_to_end():
    """A reward that hangs does not end when it is told to; a reader presses Ctrl-C twice."""
    killed = []

    def join(timeout: float | None = None) -> None:
        if timeout is not None:
            raise KeyboardInterrupt

    worker: Any = SimpleNamespace(
        name="reward/0",
        process=SimpleNamespace(is_alive=lambda: True, join=join, kill=lambda: killed.append("reward/0")),
        send=lambda _: None,
        fail=lambda _: None,
        watcher=threading.current_thread(),
    )
    launcher = LocalLauncher()
    launcher._workers.append(worker)
    with pytest.raises(KeyboardInterrupt):
        launcher.shutdown()
    launcher._workers.clear()
    launcher.shutdown()
    assert killed == ["reward/0"]


def test_a_class_inside_a_function_is_refused(tmp_path):
    class Hidden(Fault):
        pass

    with (
        launched(LocalLauncher) as launcher,
        pytest.raises(FlowDefinitionError, match="defined inside a function"),
    ):
        start(launcher, tmp_path, Hidden)


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
