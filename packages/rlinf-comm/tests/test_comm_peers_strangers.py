"""Callers that do not know the secret of the job: they learn nothing, take no name, and hold up nobody."""

import logging
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch

from rlinf_comm import _C, Channel, CommError, NotTrusted, PeerLost, PeerNameTaken
from rlinf_comm.channel import native_of
from rlinf_comm.peers import Peer
from rlinf_comm.wire import connection, listener, secret
from rlinf_comm.wire.handshake import GREETING, MAGIC, PROOF_BYTES, VERSION
from rlinf_comm.wire.limited_log import LimitedLog
from rlinf_comm.wire.secret import SECRET_VARIABLE

HANG_S = 30.0
NOBODY = 65534
GREETED = GREETING.pack(MAGIC, VERSION, bytes(16))


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def trainer(endpoint):
    with Peer.join(endpoint, "trainer/0", transports=("tcp",)) as peer:
        yield peer


def call(endpoint: tuple[str, int], source: str = "127.0.0.1") -> socket.socket:
    connected = socket.create_connection(endpoint, timeout=HANG_S, source_address=(source, 0))
    connected.settimeout(HANG_S)
    return connected


def everything_from(connected: socket.socket) -> bytes:
    received = b""
    try:
        while more := connected.recv(1000):
            received += more
    except ConnectionResetError:
        pass  # closed before all that was said was read
    return received


def after_the_greeting(stranger: socket.socket, message: bytes) -> bytes:
    """What comes for `message`, once the other side has greeted."""
    stranger.sendall(GREETED)
    assert len(stranger.recv(GREETING.size, socket.MSG_WAITALL)) == GREETING.size
    stranger.sendall(message)
    return everything_from(stranger)


def servers_of(trainer: Peer, endpoint: str) -> list[tuple[str, int]]:
    """The directory, and the peer."""
    return [("127.0.0.1", int(endpoint.rpartition(":")[2])), trainer.address.endpoint]


# --- what they get ----------------------------------------------------------------------------------------------------


def test_nothing_listens_at_another_address_than_was_given(trainer, endpoint):
    for _, port in servers_of(trainer, endpoint):
        with pytest.raises(ConnectionRefusedError):
            call(("127.0.0.2", port))


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize(
    ("message", "num_answered"),
    [(b"", 0), (b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n", 0), (GREETED, GREETING.size)],
    ids=["nothing", "http", "greeting"],
)
def test_they_are_told_nothing_but_a_greeting(trainer, endpoint, source, message, num_answered):
    for server in servers_of(trainer, endpoint):
        with call(server, source) as stranger:
            stranger.sendall(message)
            if message[:1] != b"G":
                stranger.shutdown(socket.SHUT_WR)
            assert len(everything_from(stranger)) == num_answered
        with call(server, source) as stranger:
            assert after_the_greeting(stranger, secrets.token_bytes(PROOF_BYTES)) == b""


def test_they_cannot_join_and_take_no_name(trainer, endpoint, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))
    for name in ("trainer/0", "engine/0"):
        with pytest.raises(NotTrusted, match=f"{endpoint} is no directory of this job: .*ended before"):
            Peer.join(endpoint, name)
    not_of_this_job = pytest.raises(PeerLost, match="is gone, or of another job")
    with Peer.listen("engine/0", transports=("tcp",)) as stranger, not_of_this_job:
        stranger.connect(trainer.address)
    monkeypatch.undo()
    with pytest.raises(PeerNameTaken):
        Peer.join(endpoint, "trainer/0")


def test_who_serves_the_endpoint_first_without_the_secret_is_not_believed(monkeypatch):
    """It answers with what the caller has said, which is the caller's proof of something else."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:

        def reflect() -> None:
            connected, _ = squatter.accept()
            with connected:
                for num_bytes in (GREETING.size, PROOF_BYTES):
                    connected.sendall(connected.recv(num_bytes, socket.MSG_WAITALL))

        threading.Thread(target=reflect, daemon=True).start()
        with pytest.raises(NotTrusted, match="is no directory of this job: it does not know the secret"):
            Peer.join(f"127.0.0.1:{squatter.getsockname()[1]}", "trainer/0", serve=False)


class Recorder:
    """Between a caller and a server: keeps what goes by."""

    def __init__(self, called: tuple[str, int]) -> None:
        self._called = called
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self._server.getsockname()
        self.said = {"caller": b"", "called": b""}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        caller, _ = self._server.accept()
        called = socket.create_connection(self._called)
        threading.Thread(target=self._pass_on, args=("called", called, caller), daemon=True).start()
        self._pass_on("caller", caller, called)

    def _pass_on(self, side: str, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.said[side] += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_recorded_call_cannot_be_replayed_and_holds_no_secret(trainer, endpoint):
    server, _ = servers_of(trainer, endpoint)
    recorder = Recorder(server)
    with Peer.join(f"127.0.0.1:{recorder.endpoint[1]}", "engine/0", serve=False) as engine:
        assert trainer.wait_for("engine/0", timeout_s=HANG_S) == engine.address
    traffic = recorder.said["caller"] + recorder.said["called"]
    secrets_of_the_job = (secret.job_secret(), secret.key_for("directory"), secret.key_for("peer", b""))
    assert len(traffic) > 200
    assert not any(key in traffic for key in secrets_of_the_job)
    with call(server) as stranger:
        stranger.sendall(recorder.said["caller"][: GREETING.size])
        assert len(stranger.recv(GREETING.size, socket.MSG_WAITALL)) == GREETING.size
        stranger.sendall(recorder.said["caller"][GREETING.size :])
        assert everything_from(stranger) == b""


def test_a_message_that_was_changed_on_its_way_is_refused(trainer, endpoint, caplog):
    """Somebody between two peers lets them prove who they are, and then speaks for one of them."""
    server, _ = servers_of(trainer, endpoint)
    recorder = Recorder(server)
    real = Recorder._pass_on

    def change(self, side: str, source: socket.socket, target: socket.socket) -> None:
        if side == "called":
            return real(self, side, source, target)
        target.sendall(source.recv(GREETING.size, socket.MSG_WAITALL))
        target.sendall(source.recv(PROOF_BYTES, socket.MSG_WAITALL))
        data = bytearray(source.recv(1 << 16))
        data[-20] ^= 1
        target.sendall(data)

    recorder._pass_on = change.__get__(recorder)
    with caplog.at_level(logging.WARNING), pytest.raises(CommError, match="does not answer any more"):
        Peer.join(f"127.0.0.1:{recorder.endpoint[1]}", "engine/0", serve=False, timeout_s=1.0)
    assert any("its tag is wrong" in record.getMessage() for record in caplog.records)


# --- whom they hold up ------------------------------------------------------------------------------------------------


def is_there(stranger: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    stranger.setblocking(False)
    try:
        return stranger.recv(1000) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_strangers_who_hang_on_delay_nobody(trainer, endpoint, monkeypatch):
    """However long they are borne with: a contact is made while all of them are still there."""
    monkeypatch.setattr(listener, "PROOF_TIMEOUT_S", 10 * HANG_S)
    idle = [call(server, "127.0.0.2") for server in servers_of(trainer, endpoint) for _ in range(50)]
    for number, stranger in enumerate(idle):
        stranger.sendall(GREETED[: number % (GREETING.size + 1)])  # nothing, a part, or all of a greeting
    with Peer.join(endpoint, "engine/0", serve=False, transports=("tcp",)) as engine:
        engine.send("trainer/0", "hello", timeout_s=HANG_S)
        assert trainer.receive("engine/0", timeout_s=HANG_S) == "hello"
        trainer.send("engine/0", "hello too", timeout_s=HANG_S)
        assert engine.receive("trainer/0", timeout_s=HANG_S) == "hello too"
    assert all(is_there(stranger) for stranger in idle)
    for stranger in idle:
        stranger.close()


def test_more_strangers_than_are_borne_with_take_each_other_s_place(trainer, endpoint, monkeypatch):
    monkeypatch.setattr(listener, "PROOF_TIMEOUT_S", 10 * HANG_S)
    server, _ = servers_of(trainer, endpoint)
    other = call(server, "127.0.0.3")
    strangers = [call(server, "127.0.0.2") for _ in range(listener._MAX_UNPROVEN + 20)]
    with Peer.join(endpoint, "engine/0", serve=False):
        pass
    for stranger in strangers[:20]:
        assert everything_from(stranger) == b""  # turned away, the oldest first
    assert is_there(other), "the only one from its address"
    for stranger in (*strangers, other):
        stranger.close()


def test_a_burst_of_strangers_leaves_room_for_a_peer():
    """Before any of them is accepted: where there is no room the kernel lets a peer try again after a second."""
    with open("/proc/sys/net/core/somaxconn") as limit:
        num_calls = min(800, int(limit.read()) - 1)
    listening = listener.Listener(("127.0.0.1", 0), b"key", lambda line: None, "a listener that is busy")
    lines = [socket.create_connection(("127.0.0.1", listening.port), timeout=0.9) for _ in range(num_calls)]
    for line in lines:
        line.close()
    listening.close()


def test_a_flood_of_silent_strangers_drives_out_none_who_has_greeted(trainer, endpoint, monkeypatch):
    """Though he came before them, from the same address, as on one machine all do."""
    monkeypatch.setattr(listener, "PROOF_TIMEOUT_S", 10 * HANG_S)
    for server in servers_of(trainer, endpoint):
        greeting = call(server)
        greeting.sendall(GREETED)
        assert greeting.recv(GREETING.size).startswith(MAGIC)
        silent = [call(server) for _ in range(2 * listener._MAX_UNPROVEN)]
        assert everything_from(silent[0]) == b""
        assert is_there(greeting)
        for stranger in (greeting, *silent):
            stranger.close()


def test_who_does_not_prove_himself_in_time_is_turned_away_with_a_line(trainer, endpoint, monkeypatch, caplog):
    monkeypatch.setattr(listener, "PROOF_TIMEOUT_S", 0.05)
    with caplog.at_level(logging.WARNING):
        for server, message in zip(servers_of(trainer, endpoint), (b"", GREETED), strict=True):
            with call(server, "127.0.0.2") as stranger:
                stranger.sendall(message)
                everything_from(stranger)  # until it is closed
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("the directory 127.0.0.1:") and lines[1].startswith("peer 'trainer/0'")
    for line in lines:
        assert line.endswith("a caller from 127.0.0.2 was turned away: it has not proven who it is within 0.05 s"), line


@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "in a crowd"])
def test_a_caller_of_the_job_who_was_turned_away_calls_again(is_slow, trainer, endpoint, monkeypatch):
    """Its first proof comes too late, as on a machine that is very busy, or it had to go for others."""

    if is_slow:
        monkeypatch.setattr(connection, "PROOF_TIMEOUT_S", 0.0)  # whatever fails counts as slow
        monkeypatch.setattr(connection, "_MAX_TURNED_AWAY", 0)
    calls = []
    real = connection.proof

    def wrong_once(key: bytes, greetings: bytes, side: bytes) -> bytes:
        calls.append(side)
        return real(key, greetings, side) if len(calls) > 1 else bytes(PROOF_BYTES)

    monkeypatch.setattr(connection, "proof", wrong_once)
    with Peer.join(endpoint, "engine/0", serve=False):
        assert len(calls) == 2


def test_the_log_has_so_many_lines_and_then_a_sum(caplog):
    clock = [0.0]
    complaints = LimitedLog(logging.getLogger("strangers"), lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            complaints.warn(f"stranger {number}")
        assert [record.getMessage() for record in caplog.records] == [f"stranger {number}" for number in range(20)]
        clock[0] = 60.0
        complaints.warn("another")
    assert [record.getMessage() for record in caplog.records][20:] == [
        "980 more callers were turned away within 60 s",
        "another",
    ]


# --- another user -----------------------------------------------------------------------------------------------------


def as_nobody(attack: Callable[[], None]) -> None:
    """Runs it in a child of user `nobody` who knows no secret; its assertions count."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ.pop(SECRET_VARIABLE, None)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            signal.alarm(int(2 * HANG_S))
            attack()
        except BaseException:  # noqa: BLE001 - the end of a process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the user nobody")


@needs_root
def test_nobody_learns_no_secret_and_cannot_join(trainer, endpoint):
    parent = os.getpid()

    def attack() -> None:
        with pytest.raises(PermissionError):
            pathlib.Path(f"/proc/{parent}/environ").read_bytes()
        with pytest.raises(NotTrusted):
            Peer.join(endpoint, "trainer/0", serve=False)
        for server in servers_of(trainer, endpoint):
            with call(server) as stranger:
                assert after_the_greeting(stranger, bytes(PROOF_BYTES)) == b""

    as_nobody(attack)
    with Peer.join(endpoint, "engine/0", serve=False, transports=("tcp",)) as engine:
        trainer.send("engine/0", "weights", timeout_s=HANG_S)
        assert engine.receive("trainer/0", timeout_s=HANG_S) == "weights"


def own_socket_names() -> list[str]:
    """The names of the sockets of this process's segment server, as every user of the machine sees them."""
    mine = f"@rlinf-comm/{os.getpid()}-"
    return [line.split()[-1] for line in pathlib.Path("/proc/net/unix").read_text().splitlines() if mine in line]


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on: state, ..., start time in ticks."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@needs_root
def test_nobody_gets_no_segment_and_holds_up_nobody():
    channel = Channel.create("private")
    (name,) = set(own_socket_names())
    pid, ticks = _C.current_process()
    _, _, fd, nonce = native_of(channel).address()
    assert name == f"@rlinf-comm/{pid}-{ticks}-{nonce >> 32:08x}"
    request = fd.to_bytes(8, "little") + nonce.to_bytes(8, "little")

    def attack() -> None:
        rude = []
        for _ in range(50):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.settimeout(HANG_S)
            client.connect("\0" + name[1:])
            rude.append(client)
        try:
            rude[-1].send(request)
            assert socket.recv_fds(rude[-1], 4, 1)[:2] == (b"", [])
        except (BrokenPipeError, ConnectionResetError):
            pass  # hung up before the request was sent, or before it was read

    as_nobody(attack)
    assert Channel.open(channel.address).name == "private"


@needs_root
def test_nobody_opens_what_this_process_shares():
    """Neither a channel's memory nor tensors that are lent, by the descriptors that its own user's processes use."""
    channel, parent = Channel.create("private"), os.getpid()
    lent = torch.zeros(1 << 20).share_memory_()
    kinds = ("/memfd:", "/dev/shm/")
    shared = [fd for fd in os.listdir("/proc/self/fd") if _link(fd).startswith(kinds)]
    assert shared and lent.is_shared()

    def attack() -> None:
        with pytest.raises(PermissionError):
            os.listdir(f"/proc/{parent}/fd")
        for descriptor in shared:
            with pytest.raises(PermissionError):
                os.open(f"/proc/{parent}/fd/{descriptor}", os.O_RDONLY)
        with pytest.raises(PermissionError):
            pathlib.Path(f"/proc/{parent}/maps").read_text()

    as_nobody(attack)
    assert Channel.open(channel.address).name == "private"


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""  # that of the listing itself


@needs_root
def test_nobody_cannot_take_a_name_that_will_be_needed():
    """A child's pid and start time are known before it makes a channel; its server's name is not."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        try:
            Channel.create("made in spite of it")
        except BaseException:  # noqa: BLE001 - the end of a process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ticks = int(stat_of(pid)[19])

    def attack() -> None:
        taken = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        taken[0].bind(f"\0rlinf-comm/{pid}-{ticks}")
        taken[1].bind(f"\0rlinf-comm/{pid}-{ticks}-00000000")
        os.write(write_end, b"g")
        while stat_of(pid)[0] != "Z":  # its parent is busy with waiting for this process
            time.sleep(0.01)

    as_nobody(attack)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(read_end)
    os.close(write_end)


# --- another host -----------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
def test_from_another_host_members_are_let_in_and_nobody_else():
    script = pathlib.Path(__file__).with_name("comm_other_network.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=10 * HANG_S)
    if done.returncode == 77:
        pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "stranger as trainer/0: NotTrusted",
        "stranger as engine/0: NotTrusted",
        "member: weights over 10.99.0.2",
        "member: PeerTimeout",  # the directory is served on 127.0.0.1 now
    ]
