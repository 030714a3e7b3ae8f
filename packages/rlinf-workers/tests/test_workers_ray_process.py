"""The process that takes part in a Ray cluster: what it runs, how it ends, which clusters are refused in one line."""

import os
import signal
import socket
import time

import pytest

from rlinf_workers.errors import ClusterRefused, NodeLost, WorkersError

pytest.importorskip("ray", reason="pip install 'rlinf-workers[ray]'")

from rlinf_workers.launchers.ray.launcher import RayLauncher
from rlinf_workers.launchers.ray.process import RayProcess

WAIT_S = 60.0


@pytest.fixture
def process():
    started = RayProcess({**os.environ, "RLINF_TEST": "a value"})
    yield started
    started.close()


def fail(kind):
    os.write(2, b"what Ray says\n")
    raise {"ours": ClusterRefused, "other": KeyError}[kind]("why")


def test_it_runs_functions_with_its_own_variables(process, tmp_path):
    assert process.call("getenv", "RLINF_TEST", module="os") == "a value"
    with pytest.raises(ClusterRefused, match=r"^why$"):
        process.call("fail", "ours", module=__name__)
    with pytest.raises(WorkersError, match=r"^Ray: KeyError: 'why'$"):
        process.call("fail", "other", module=__name__)
    process.log_to(tmp_path / "ray.log")
    with pytest.raises(ClusterRefused):
        process.call("fail", "ours", module=__name__)
    assert (tmp_path / "ray.log").read_text().count("what Ray says") == 3, "also what came before the folder was there"
    process.log_to(tmp_path / "next.log")
    with pytest.raises(ClusterRefused):
        process.call("fail", "ours", module=__name__)
    assert (tmp_path / "next.log").read_text() == "what Ray says\n"


def test_its_end_is_reported_with_its_last_line(process):
    pid = process.call("getpid", module="os")
    process.call("write", 2, b"raylet died\n", module="os")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(NodeLost, match="has ended, as it does with its Ray node: raylet died"):
        process.call("getpid", module="os")
    assert not process.is_alive


def test_it_ends_with_the_driver(process):
    pid = process.call("getpid", module="os")
    process._connection.close()
    deadline = time.monotonic() + WAIT_S
    while process._process.poll() is None:
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


def test_an_address_that_nobody_answers_is_refused_at_once(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterRefused, match=rf"address=127\.0\.0\.1:{port}: no Ray cluster answers there; `ray start"):
        RayLauncher.nodes(address=f"127.0.0.1:{port}")
    with pytest.raises(ClusterRefused, match=r"address=nowhere: .*`ray start"):
        RayLauncher.nodes(address="nowhere")
    assert capfd.readouterr() == ("", ""), "Ray's own lines do not reach the screen"


def test_a_cluster_without_a_token_is_not_started(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterRefused, match=r"RAY_AUTH_MODE=disabled: .* unset the variable"):
        RayLauncher.nodes()
