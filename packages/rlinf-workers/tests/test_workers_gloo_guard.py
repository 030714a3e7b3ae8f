"""Other users of the machine and the ports of gloo groups."""

import os
import resource
import socket
import struct
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlinf_workers import gloo_guard
from rlinf_workers.addresses import ON_ONE_MACHINE
from rlinf_workers.collectives import connect, connect_alone
from rlinf_workers.engines import server_processes
from rlinf_workers.engines.sglang import child
from rlinf_workers.errors import WorkersError
from rlinf_workers.gloo_guard import TcpConnection, guard_gloo, refuse_strangers, users_of_ends
from rlinf_workers.launchers.base import Identity
from rlinf_workers.spans import WaitTable

NOBODY = 65534
OWN = TcpConnection(("127.0.0.1", 4000), ("127.0.0.1", 5000))
END = "0100007F:1388 0100007F:0FA0"
"""The other end of it, as the table has it on a machine with little-endian words."""
OWN_END = "0100007F:0FA0 0100007F:1388"


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """The guard is taken off afterwards."""
    for variable, value in ON_ONE_MACHINE.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    guard_gloo()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Ranks:
    """Ranks of a group, each made in a thread of this process when it is started."""

    def __init__(self, folder, size=2):
        self._folder, self._size = folder, size
        self.groups, self.errors, self._threads = {}, [], []

    def start(self, rank):
        self._threads.append(threading.Thread(target=self._make, args=(rank,), daemon=True))
        self._threads[-1].start()

    def _make(self, rank):
        store = dist.FileStore(str(self._folder / "store"), self._size)
        try:
            self.groups[rank] = dist.ProcessGroupGloo(store, rank, self._size, timedelta(seconds=10))
        except (WorkersError, RuntimeError) as error:  # the latter where another rank has refused its group
            self.errors.append(str(error))

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def ports():
    """At which this process listens."""
    listening_ports = set()
    for one in gloo_guard._tcp(list(gloo_guard._sockets().values())):
        with one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening_ports.add(one.getsockname()[1])
    return listening_ports


def test_a_group_of_this_user_computes_and_its_ports_take_nobody_else(tmp_path):
    before, ranks = ports(), Ranks(tmp_path)
    for rank in (0, 1):
        ranks.start(rank)
    ranks.join()
    assert not ranks.errors
    new = ports() - before
    assert len(new) == 2
    for port in new:
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    works = [ranks.groups[rank].allreduce([tensors[rank]]) for rank in (0, 1)]
    for work in works:
        work.wait()
    assert tensors == [3.0, 3.0]


def as_nobody(endpoints, pipe, says):
    """A child of this process that calls each port four times."""
    if child := os.fork():
        return child
    os.closerange(3, pipe)  # the ports of the ranks among them
    os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    lines = [(number, socket.create_connection(("127.0.0.1", port))) for port in endpoints for number in range(4)]
    for number, line in lines:
        line.sendall(says(number))
    os.write(pipe, b"\0")
    time.sleep(60)
    os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("takes_a_place", [True, False])
def test_another_user_who_takes_the_place_of_a_rank_is_refused_before_anything_is_sent(tmp_path, takes_a_place):
    """One who says nothing that gloo understands disturbs nobody."""
    before, ranks = ports(), Ranks(tmp_path, size=3)
    for rank in (0, 1):  # which wait for the third: one of them will be called by the other
        ranks.start(rank)
    deadline = time.monotonic() + 60
    while len(new := ports() - before) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    reader, writer = os.pipe()
    child = as_nobody(new, writer, (lambda number: struct.pack("q", number)) if takes_a_place else (lambda _: b"?"))
    try:
        assert os.read(reader, 1)
        ranks.start(2)
        ranks.join()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    assert len(ranks.groups) + len(ranks.errors) == 3 and bool(ranks.errors) == takes_a_place
    whose = f"a process of the user with id {NOBODY} took the place of a rank at port "
    assert any(error.startswith(whose) for error in ranks.errors) == takes_a_place


@pytest.mark.parametrize(
    ("users", "whose"),
    [
        ({END: os.geteuid() + 1}, f"the user with id {os.geteuid() + 1}"),
        ({OWN_END: os.geteuid()}, "a process that has ended"),
        ({END: os.geteuid()}, None),
    ],
)
def test_only_ends_of_this_user_pass(monkeypatch, users, whose):
    monkeypatch.setattr(gloo_guard, "users_of_ends", lambda: users)
    if whose is None:
        return refuse_strangers([OWN], {4000})
    with pytest.raises(WorkersError, match=whose):
        refuse_strangers([OWN], {4000})


def test_connections_that_did_not_come_in_and_those_of_other_machines_are_not_judged(monkeypatch):
    monkeypatch.setattr(gloo_guard, "users_of_ends", lambda: {})
    refuse_strangers([OWN, TcpConnection(("10.0.0.1", 4001), ("10.0.0.2", 5000))], {4001})


def test_without_a_table_of_sockets_groups_stay_as_they_are(monkeypatch, tmp_path):
    original = dist.ProcessGroupGloo.__init__.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", original)
    monkeypatch.setattr(gloo_guard, "TABLES", (str(tmp_path / "tcp"),))
    guard_gloo()
    assert dist.ProcessGroupGloo.__init__ is original


def test_a_system_whose_table_lacks_our_own_sockets_is_not_refused(monkeypatch, caplog):
    monkeypatch.setattr(gloo_guard, "users_of_ends", lambda: {})
    refuse_strangers([OWN], {4000})
    assert "cannot check who is in a gloo group" in caplog.text


def test_a_line_that_the_table_lacked_is_looked_for_again(monkeypatch):
    looks = iter([{OWN_END: os.geteuid()}, {END: os.geteuid()}])
    monkeypatch.setattr(gloo_guard, "users_of_ends", lambda: next(looks))
    refuse_strangers([OWN], {4000})


@pytest.mark.parametrize(
    ("listens_at", "called"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")]
)
def test_ends_are_named_as_the_kernel_does(listens_at, called):
    """Whoever calls an address of IPv4 from a socket of IPv6 is in the other table."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in (listens_at, called)]
    try:
        server = socket.create_server((listens_at, 0), family=families[0])
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, socket.socket(families[1]) as caller:
        caller.connect((called, server.getsockname()[1]))
        taken, _ = server.accept()
        with taken:
            assert users_of_ends()[gloo_guard._connection(taken).other_end] == os.geteuid()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whatever_connects_ranks_is_guarded(monkeypatch, tmp_path, num_ranks):
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__.__wrapped__)
    inits = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever an earlier test left
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: inits.append(dist.ProcessGroupGloo.__init__))
    identity = Identity(role="actor", rank=0, num_ranks=num_ranks, devices=("cpu:0",), rendezvous=f"{tmp_path}/meet")
    if num_ranks == 1:
        connect_alone(identity)
    else:
        connect(identity, WaitTable("actor/0"), lambda *_, **__: Future())
    assert hasattr(inits[0], "__wrapped__")


def test_a_scheduler_process_of_sglang_is_guarded(monkeypatch, tmp_path):
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__.__wrapped__)
    inits = []
    scheduler = SimpleNamespace(run_scheduler_process=lambda: inits.append(dist.ProcessGroupGloo.__init__))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", scheduler)
    loading = SimpleNamespace(load_model_utils=SimpleNamespace(get_model_loader=None))
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.model_runner_components", loading)
    monkeypatch.setenv(child.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(server_processes.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(server_processes.os, "getppid", lambda: 2)
    monkeypatch.setattr(server_processes.faulthandler, "register", lambda *_, **__: None)
    monkeypatch.setattr(server_processes.logging.getLogger("sglang"), "handlers", [])
    child.run_scheduler()
    assert hasattr(inits[0], "__wrapped__")


def test_the_guard_stays_one_and_lets_a_process_open_more_files():
    init = dist.ProcessGroupGloo.__init__
    guard_gloo()
    assert dist.ProcessGroupGloo.__init__ is init
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= min(hard, gloo_guard.NUM_DESCRIPTORS) or hard == resource.RLIM_INFINITY
