"""Other processes for the tests."""

import gc
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_comm import pack
from rlinf_comm.peers import job_secret

job_secret()  # for the processes that the tests start
sys.path.append(str(pathlib.Path(__file__).parent))  # for comm_references.py
PEERS = pathlib.Path(__file__).with_name("comm_peers.py")
HANG_S = 60.0


def pytest_collection_finish() -> None:
    """Many tests collect garbage; what the imports have made is none, and takes 0.1 s each time to look through."""
    gc.collect()
    gc.freeze()


class Peer:
    """comm_peers.py, or another script like it, in a role; killed at the end of a `with` block, or of the test."""

    def __init__(self, role: str, *arguments: Any, wait: bool = True, script: str = PEERS.name) -> None:
        command = [sys.executable, str(PEERS.with_name(script)), role, pack(arguments).hex()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if wait:
            assert self.process.stdout is not None and self.process.stderr is not None
            assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=HANG_S)

    def join(self) -> None:
        """Waits for its regular end."""
        _, text = self.process.communicate(timeout=HANG_S)
        assert self.process.returncode == 0, text


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """start_peer(role, *arguments, wait=True, script="comm_peers.py") -> Peer"""
    peers: list[Peer] = []

    def start(role: str, *arguments: Any, **options: Any) -> Peer:
        peers.append(Peer(role, *arguments, **options))
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.__exit__()
