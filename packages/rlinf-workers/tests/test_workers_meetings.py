"""Ranks of a group that share no file meet at the first one's address, and it listens there alone."""

import os
import socket
from pathlib import Path

import pytest

from rlinf_workers import addresses
from rlinf_workers.addresses import ADDRESS_VARIABLE, LOOPBACK, interface_of, own_address
from rlinf_workers.execution.meetings import Meetings
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launchers.base import Identity, WorkerSpec
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.testing.launchers import START_S, launched
from rlinf_workers.testing.toy_flow import Fault

pytestmark = pytest.mark.usefixtures("forked_workers")

LISTENS = "0A"
"""The state of a socket in /proc/net/tcp."""


class Listening(Fault):
    """Tells where it listens."""

    def addresses(self) -> list[str]:
        own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
        rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
        hex_addresses = [row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own]
        return [socket.inet_ntoa(bytes.fromhex(words)[::-1]) if len(words) == 8 else words for words in hex_addresses]

    def interfaces(self) -> list[str]:
        return [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]


def start(launcher, folder, rendezvous, environment):
    def spec(rank):
        identity = Identity(role="listening", rank=rank, num_ranks=2, rendezvous=rendezvous)
        log_path = folder / f"{identity.name}.log"
        return WorkerSpec(identity=identity, worker_class=Listening, log_path=log_path, env_vars=environment)

    return WorkerGroup([launcher.start(spec(rank)) for rank in range(2)], launcher)


@pytest.mark.parametrize(
    ("rendezvous", "environment"),
    [
        pytest.param("", {ADDRESS_VARIABLE: "127.0.0.2"}, marks=pytest.mark.slow),
        (LOOPBACK, {ADDRESS_VARIABLE: "192.0.2.1"}),
    ],
)
def test_ranks_meet_where_the_first_one_listens(rendezvous, environment, tmp_path):
    meetings = Meetings()
    with launched(LocalLauncher) as launcher:
        launcher.serve("meeting", meetings)
        meetings.begin("listening")
        group = start(launcher, tmp_path, rendezvous, environment)
        assert group.call("sum_of_ranks", timeout_s=2 * START_S) == [3.0, 3.0]
        listened = group.call("addresses", timeout_s=START_S)
        assert rendezvous or environment[ADDRESS_VARIABLE] in listened[0]
        assert {address for of_rank in listened for address in of_rank} <= {LOOPBACK, "127.0.0.2"}


def test_ranks_of_one_machine_stay_at_its_loopback_address(tmp_path):
    """Whatever address its name stands for, and with NCCL as with gloo."""
    with launched(LocalLauncher) as launcher:
        group = start(launcher, tmp_path, str(tmp_path / "meeting"), {})
        assert group.call("sum_of_ranks", timeout_s=2 * START_S) == [3.0, 3.0]
        assert group.call("interfaces", timeout_s=START_S) == [["lo", "lo"]] * 2
        assert {address for of_rank in group.call("addresses", timeout_s=START_S) for address in of_rank} == {LOOPBACK}


def test_whoever_asks_is_told_at_once_or_later_and_nothing_of_an_earlier_start():
    meetings, answers = Meetings(), []
    meetings.begin("actor")
    meetings("actor/1", None, answers.append)
    assert answers == []
    meetings("actor/0", ("here", 1), answers.append)
    meetings("actor/2", None, answers.append)
    assert answers == [("here", 1)] * 2
    meetings.begin("actor")
    meetings("actor/1", None, answers.append)
    meetings("actor/0", ("there", 2), answers.append)
    assert answers[2:] == [("there", 2)]


def test_the_launcher_says_which_address_is_ones_own(monkeypatch):
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda name: f"the one of {name}")
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    assert own_address() == f"the one of {socket.gethostname()}"
    monkeypatch.setenv(ADDRESS_VARIABLE, "192.0.2.7")
    assert own_address() == "192.0.2.7"


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.3") == "lo"
    assert interface_of("192.0.2.1") is None, "an address that nobody has"
