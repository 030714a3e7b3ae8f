"""Callers that know no secret, for checks.py: idle, slow, half-open and garbled ones, as long as they are let run."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Step

from rlinf_comm import Peer

NUM_IDLE = 50
NUM_SLOW = 10
NUM_FLOODING = 500
"""Connections that a flood holds at a time."""
TIMEOUT_S = 30.0


def _call(server: tuple[str, int]) -> socket.socket:
    stranger = socket.create_connection(server, timeout=TIMEOUT_S, source_address=("127.0.0.2", 0))
    stranger.setblocking(False)
    return stranger


def _is_gone(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1000) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(stranger: socket.socket, message: bytes) -> None:
    try:
        stranger.send(message)
    except OSError:
        pass  # it has been turned away


def _besiege(servers: list[tuple[str, int]]) -> None:
    """Each stranger that is turned away comes back; 20 a second talk of something else."""
    strangers = {server: [_call(server) for _ in range(NUM_IDLE + NUM_SLOW)] for server in servers}
    while True:
        for server, callers in strangers.items():
            callers[:] = [_call(server) if _is_gone(caller) else caller for caller in callers]
            for slow in callers[:NUM_SLOW]:
                _say(slow, b"r")  # as a greeting starts, ten bytes a second
            _say(_call(server), b"GET / HTTP/1.1\r\n\r\n")
            _say(_call(server), b"rlpeer" + bytes(100))
        time.sleep(0.1)


def _flood(server: tuple[str, int]) -> None:
    """Connects as fast as one process can, from the address that members have, and says nothing."""
    strangers: list[socket.socket] = []
    while True:
        try:
            strangers.append(socket.create_connection(server, timeout=TIMEOUT_S))
        except OSError:
            continue
        if len(strangers) > NUM_FLOODING:
            strangers.pop(0).close()


def _free_endpoint() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@contextmanager
def contacts() -> Iterator[dict[str, Step]]:
    """Steps that join a directory, meet a peer for the first time and hand it a value: with and without strangers, and
    while one process floods the directory with connections."""
    besieged, quiet, flooded = _free_endpoint(), _free_endpoint(), _free_endpoint()
    trainers = {
        server: Peer.join(f"{server[0]}:{server[1]}", "trainer/0", transports=("tcp",))
        for server in (besieged, quiet, flooded)
    }

    def step_for(server: tuple[str, int]) -> Step:
        def step(index: int) -> float:
            start_s = time.perf_counter()
            name = f"engine/{index}"
            with Peer.join(f"{server[0]}:{server[1]}", name, serve=False, transports=("tcp",)) as engine:
                engine.send("trainer/0", index, timeout_s=TIMEOUT_S)
                trainers[server].receive(name, timeout_s=TIMEOUT_S)
                return time.perf_counter() - start_s

        return step

    spawn = multiprocessing.get_context("spawn")
    attacks = [
        spawn.Process(target=_besiege, args=([besieged, trainers[besieged].address.endpoint],)),
        spawn.Process(target=_flood, args=(flooded,)),
    ]
    for attack in attacks:
        attack.start()
    time.sleep(2.0)  # for all of them to be there
    try:
        yield {
            "contact, strangers": step_for(besieged),
            "contact, no strangers": step_for(quiet),
            "contact, flood": step_for(flooded),
        }
    finally:
        for attack in attacks:
            attack.kill()
            attack.join()
        for trainer in trainers.values():
            trainer.close()
