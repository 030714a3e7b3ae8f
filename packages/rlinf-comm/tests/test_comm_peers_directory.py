"""rlinf_comm.peers by name."""

import gc
import socket
from collections.abc import Iterator

import pytest

from rlinf_comm import CommError, PeerLost, PeerNameTaken, PeerTimeout
from rlinf_comm.peers import Peer

HANG_S = 20.0


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Of a directory that is served."""
    free = free_endpoint()
    with Peer.join(free, "server", serve=True):
        yield free


def test_peers_find_each_other_in_any_order(endpoint):
    with Peer.join(endpoint, "a") as a, Peer.join(endpoint, "b") as b:
        a.send("b", 1, timeout_s=HANG_S)
        assert b.receive("a", timeout_s=HANG_S) == 1
        b.send("a", 2, timeout_s=HANG_S)
        assert a.receive("b", timeout_s=HANG_S) == 2


def test_a_wait_for_somebody_who_never_joins_says_who_has(endpoint):
    with Peer.join(endpoint, "a") as a, Peer.join(endpoint, "b"):
        Peer.join(endpoint, "gone").close()
        for call in (a.receive, a.transport_to, a.wait_for):
            with pytest.raises(PeerTimeout, match=r"no .*'c'.* the directory .*\(in it: a, b, server\)"):
                call("c", timeout_s=0.1)


def test_a_living_name_is_taken(endpoint):
    with Peer.join(endpoint, "a") as a:
        with pytest.raises(
            PeerNameTaken, match=f"'a' is taken .* process {a.address.pid} on this host, which is alive"
        ):
            Peer.join(endpoint, "a")
        a.close()
        Peer.join(endpoint, "a").close()


def test_a_dead_name_is_taken_over_and_the_replacement_is_reached(endpoint):
    with Peer.join(endpoint, "a") as a:
        b = Peer.join(endpoint, "b", transports=("tcp",))
        a.send("b", 1, timeout_s=HANG_S)
        b._end(farewell=False)
        with pytest.raises(PeerLost):
            [a.send("b", 2, timeout_s=HANG_S) for _ in range(100_000)]
        with pytest.raises(PeerLost, match="'b'"):  # nobody has taken the name yet
            a.send("b", 2, timeout_s=HANG_S)
        with pytest.raises(PeerLost, match="'b'"):
            a.receive("b", timeout_s=HANG_S)
        with Peer.join(endpoint, "b", transports=("tcp",)) as replacement:
            assert a.wait_for("b", timeout_s=HANG_S) == replacement.address
            a.send("b", 3, timeout_s=HANG_S)
            assert replacement.receive("a", timeout_s=HANG_S) == 3


def test_the_first_to_come_serves_an_endpoint():
    endpoint = free_endpoint()
    with Peer.join(endpoint, "a") as a, Peer.join(endpoint, "b") as b:
        a.send("b", 1, timeout_s=HANG_S)
        assert b.receive("a", timeout_s=HANG_S) == 1
        assert a.address.endpoint[0] == "127.0.0.1", "a peer of a loopback directory listens on loopback only"


def test_a_directory_that_nobody_serves_is_named():
    endpoint = free_endpoint()
    with pytest.raises(PeerTimeout, match=f"nobody serves the directory {endpoint} within timeout_s=0.1"):
        Peer.join(endpoint, "a", serve=False, timeout_s=0.1)
    with pytest.raises(ValueError, match="directory='nonsense'; give 'host:port'"):
        Peer.join("nonsense", "a")


def test_claims_come_back_when_the_directory_is_served_again():
    endpoint = free_endpoint()
    server = Peer.join(endpoint, "server", serve=True)
    with Peer.join(endpoint, "a", serve=False) as a:
        server.close()
        del server
        gc.collect()
        with pytest.raises(CommError, match=f"the directory {endpoint} does not answer any more"):
            a.wait_for("anybody", timeout_s=1.0)
        with Peer.join(endpoint, "server", serve=True) as server:
            a.send("server", 1, timeout_s=HANG_S)  # finds it, and claims its own name again
            assert server.receive("a", timeout_s=HANG_S) == 1
            assert server.wait_for("a", timeout_s=HANG_S) == a.address
