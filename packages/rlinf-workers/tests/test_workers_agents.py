"""Workers that agents start: they conform as local ones do, on whichever node, and their logs reach the driver."""

import logging
import os
import signal
import socket
import threading
from dataclasses import replace

import pytest
from comm_callers import Called, disturb, nothing_grows
from workers_agents import GPUS, ProcessAgents

from rlinf_comm.wire import Connection, encode_hello, listener, this_host
from rlinf_workers import WorkerLost, WorkersError
from rlinf_workers.errors import InterpreterRefused
from rlinf_workers.launchers import agent_messages as messages, agents
from rlinf_workers.launchers.agents import AgentHandle
from rlinf_workers.launchers.base import Identity, WorkerSpec
from rlinf_workers.launchers.interpreter import own_hello
from rlinf_workers.testing.launchers import (
    CHECKS,
    NOTICE_S,
    START_S,
    assert_gone,
    check_calls,
    check_deaths,
    check_shutdown,
    launched,
)
from rlinf_workers.testing.toy_flow import Fault


class Where(Fault):
    """Tells which environment it was started in."""

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def parent(self) -> int:
        return os.getppid()

    def say(self, text: str) -> None:
        print(text, flush=True)


def spec_of(folder, rank=0, **more):
    identity = Identity(role="where", rank=rank, num_ranks=2)
    return WorkerSpec(identity=identity, worker_class=Where, log_path=folder / f"{identity.name}.log", **more)


def test_an_agent_says_whether_a_silent_worker_runs(tmp_path):
    with launched(lambda: ProcessAgents(heartbeat_timeout_s=2.0)) as launcher:
        handle = launcher.start(spec_of(tmp_path, node=1))
        pid = handle.call("process_id").result(START_S)
        handle.call("sleep_holding_the_interpreter", 5).result(START_S)
        assert not launcher.lost.done()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="silent after 2 s; killed"):
            launcher.lost.result(timeout=START_S)
        assert_gone([pid])


FAST = (check_calls, check_deaths, check_shutdown)


@pytest.mark.parametrize(
    "check",
    [check if check in FAST else pytest.param(check, marks=pytest.mark.slow) for check in CHECKS],
    ids=lambda check: check.__name__,
)
def test_they_conform(check, tmp_path):
    check(ProcessAgents, tmp_path)


def test_each_is_on_its_node_and_sees_the_gpus_that_the_cluster_gave(tmp_path):
    with launched(ProcessAgents) as launcher:
        handles = [
            launcher.start(spec_of(tmp_path, rank, node=rank, gpus=(1,), env_vars={"CUDA_VISIBLE_DEVICES": "1"}))
            for rank in range(2)
        ]
        assert [handle.call("parent").result(START_S) for handle in handles] == [
            process.pid for process in launcher.processes
        ]
        seen = [handle.call("variable", "CUDA_VISIBLE_DEVICES").result(START_S) for handle in handles]
        assert seen == [gpus[1] for gpus in GPUS]


def test_the_log_comes_whole_from_a_node_that_does_not_share_the_folder(tmp_path, monkeypatch):
    """Also its last lines, before the loss is told."""
    monkeypatch.setattr(agents, "_token", lambda folder: _nothing())
    with launched(ProcessAgents) as launcher:
        handle = launcher.start(spec_of(tmp_path))
        handle.call("say", "x" * 700_000).result(START_S)
        handle.call("die")
        error = launcher.lost.exception(START_S)
        assert isinstance(error, WorkerLost)
        assert "exited with code 7" in str(error) and "about to die" in error.log_tail
        assert "x" * 700_000 in (tmp_path / "where" / "0.log").read_text()


class _nothing:  # noqa: N801 - a context manager, as the function that it stands for
    def __enter__(self):
        return "no-such-file"

    def __exit__(self, *_):
        pass


def test_no_token_is_left_beside_the_logs(tmp_path):
    with launched(ProcessAgents) as launcher:
        launcher.start(spec_of(tmp_path)).call("process_id").result(START_S)
        assert [path.name for path in (tmp_path / "where").iterdir()] == ["0.log"]


def test_workers_of_a_lost_node_are_lost_and_end(tmp_path):
    with launched(ProcessAgents) as launcher:
        handle = launcher.start(spec_of(tmp_path, node=1))
        pid = handle.call("process_id").result(START_S)
        launcher.processes[1].send_signal(signal.SIGKILL)
        error = launcher.lost.exception(NOTICE_S)
        assert f"node 1 ({socket.gethostname()}) was lost" in str(error)
        assert_gone([pid])
        with pytest.raises(WorkersError, match=r"node 1 .* was lost"):
            launcher.start(spec_of(tmp_path, 1, node=1))


def test_an_interpreter_that_cannot_be_run_is_refused(tmp_path):
    with launched(ProcessAgents) as launcher, pytest.raises(InterpreterRefused, match="cannot be run"):
        launcher.start(spec_of(tmp_path, python=str(tmp_path / "none")))


def test_a_stranger_is_not_let_in(tmp_path):
    """One that says nothing holds nobody up, and one that talks is turned away."""
    with launched(ProcessAgents) as launcher:
        endpoint = launcher._settings_of(0).endpoint
        assert endpoint[0] == "127.0.0.1", "it listens where it is told to, and nowhere else"
        with socket.create_connection(endpoint), socket.create_connection(endpoint) as talking:
            talking.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(64))
            talking.settimeout(START_S)
            assert launcher.start(spec_of(tmp_path)).call("process_id").result(START_S) > 0
            try:
                assert talking.recv(100) == b""
            except ConnectionResetError:
                pass


@pytest.mark.parametrize("num_calls", [200, pytest.param(50_000, marks=pytest.mark.slow)])
def test_callers_that_talk_nonsense_change_nothing(num_calls, tmp_path, monkeypatch):
    """Strangers, and members who come twice, unasked, or with words that are none."""
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(repr(arguments.exc_value)))
    monkeypatch.setattr(listener, "_LOG", logging.Logger("unheard"))  # pytest would keep every line
    with launched(ProcessAgents) as launcher:
        agents_there = [launcher._arrival_of(node).result(START_S) for node in range(2)]
        rightful = [messages.CallerRole(agents_there[0].arrival), messages.CallerRole(messages.WorkerArrival(3))]
        called = Called(
            endpoint=launcher._settings_of(0).endpoint,
            key=launcher._key,
            messages=[encode_hello(own_hello("launcher", messages.encode(arrival))) for arrival in rightful],
        )
        disturb(called, 500, seed=10**6)
        with nothing_grows():
            disturb(called, num_calls, seed=0)
        assert [launcher._arrival_of(node).result() for node in range(2)] == agents_there
        assert len(launcher._agents) == 2
        assert launcher.start(spec_of(tmp_path)).call("process_id").result(START_S) > 0
    assert not failed, failed[:5]


def test_an_agent_that_says_what_is_no_report_is_given_up(caplog):
    near, far = Connection.pair()
    agent = AgentHandle(messages.AgentArrival(0, "here", this_host(), []), near)
    far.send_bytes(b"\xa2\xff\xff")
    agent._hearing.join(START_S)
    assert "the agent of node 0 (here) sent a malformed message" in caplog.text
    assert near.fileno() == -1


def test_nothing_is_left_when_it_was_shut_down(tmp_path):
    with launched(ProcessAgents) as launcher:
        launcher.start(spec_of(tmp_path))
        launcher.shutdown()
        assert_gone([process.pid for process in launcher.processes])
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("agent of")]
        with pytest.raises(WorkersError, match="was shut down"):
            launcher.start(replace(spec_of(tmp_path), node=1))
