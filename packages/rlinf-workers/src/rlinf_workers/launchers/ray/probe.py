"""Inspects a node from within. Ray gets this module by value, so that it works where RLinf is missing or has another
version: it needs only Python, and returns dicts and lists.

A probe listens at its node's address, on a port chosen by the system, for the other probes. Connections that do not
begin with the token, which is sent through Ray, are closed; after it only byte counts are read, and nothing is stored.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

SHARED_MEMORY = "/dev/shm"
LOOK_AT_TORCH = """
import json, os, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(index) for index in range(count)]
print()
print(json.dumps({"gpus": [[one.name, one.total_memory] for one in found], "cuda": torch.version.cuda}))
"""
LOOK_TIMEOUT_S = 120.0
"""Time limit for importing torch on a busy machine."""
CALL_TIMEOUT_S = 5.0
"""Time limit for a connection to a node, and for each reply."""
NUM_PINGS = 50
FIRST_BYTES = 1 << 20
MAX_BYTES = 1 << 31
LONG_ENOUGH_S = 0.2
"""A transfer of this duration measures the bandwidth; shorter ones are repeated with twice the bytes."""
PIECE_BYTES = 1 << 20
COUNT_BYTES = 8


class NodeProbe:
    """Runs on one node, until Ray ends it."""

    def __init__(self, address: str, token: bytes) -> None:
        """Listens at the node's `address`; callers must begin with the 16-byte `token`."""
        self._token = token
        self._server = socket.create_server((address, 0), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return self._server.getsockname()[1]

    def now_s(self) -> float:
        """The node's clock, Unix time."""
        return time.time()

    def look(self, packages: Sequence[str]) -> dict[str, Any]:
        """What the node has; `packages` are the distributions whose versions are reported."""
        space = os.statvfs(SHARED_MEMORY)
        return {
            "python": platform.python_version(),
            "packages": {name: version for name in packages if (version := _version(name)) is not None},
            "shared_free_bytes": space.f_bavail * space.f_frsize,
            "shared_bytes": space.f_blocks * space.f_frsize,
            **look_at_torch(),
        }

    def measure(self, endpoint: tuple[str, int]) -> dict[str, Any]:
        """Connects to another node's probe: returns `round_trip_s` of a few bytes (median) and `bytes_per_s` of one
        connection, or `problem`."""
        try:
            with socket.create_connection(endpoint, timeout=CALL_TIMEOUT_S) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(self._token)
                round_trip_s = statistics.median(_seconds_for(line, 0) for _ in range(NUM_PINGS))
                num_bytes = FIRST_BYTES
                while (taken_s := _seconds_for(line, num_bytes)) < LONG_ENOUGH_S and num_bytes < MAX_BYTES:
                    num_bytes *= 2
                return {"round_trip_s": round_trip_s, "bytes_per_s": num_bytes / taken_s}
        except OSError as error:
            return {"problem": error.strerror or str(error)}

    def _accept(self) -> None:
        while True:
            caller, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        """Receives the announced number of bytes, acknowledges them, and repeats until the caller disconnects."""
        piece = bytearray(PIECE_BYTES)
        try:
            with caller:
                caller.settimeout(CALL_TIMEOUT_S)
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(caller.recv(len(self._token), socket.MSG_WAITALL), self._token):
                    return
                while len(count := caller.recv(COUNT_BYTES, socket.MSG_WAITALL)) == COUNT_BYTES:
                    left = int.from_bytes(count, "little")
                    while left and (received := caller.recv_into(piece, min(left, PIECE_BYTES))):
                        left -= received
                    caller.sendall(b".")
        except OSError:
            return  # the caller reports it


def _seconds_for(line: socket.socket, num_bytes: int) -> float:
    """Seconds until the other side has acknowledged this many bytes."""
    piece, start_s = bytes(PIECE_BYTES), time.perf_counter()
    line.sendall(num_bytes.to_bytes(COUNT_BYTES, "little"))
    for sent in range(0, num_bytes, PIECE_BYTES):
        line.sendall(memoryview(piece)[: num_bytes - sent])
    if not line.recv(1):
        raise ConnectionError("it hung up")
    return time.perf_counter() - start_s


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_torch() -> dict[str, Any]:
    """The GPUs that torch finds, as [name, bytes], in a process in which Ray hides none; `torch_problem` if torch
    cannot be used."""
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOOK_AT_TORCH],
            env=seen,
            capture_output=True,
            text=True,
            check=False,
            timeout=LOOK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"torch_problem": f"torch was not imported within {LOOK_TIMEOUT_S:.0f} s"}
    if done.returncode != 0:
        return {"torch_problem": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.rstrip().rpartition("\n")[2])
