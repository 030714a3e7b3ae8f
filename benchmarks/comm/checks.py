"""What digests of values catch and cost: `python -m benchmarks.comm.checks`.

Flips 1,000 bits on each way (flipped_bits.py). Looks how much longer a first contact takes while strangers besiege the
peer and its directory (strangers.py). Then measures hashes over the same memory, and hand-overs with and
without digests in turn: between two processes over TCP, where they are on by default, and through a channel and a pool,
where `checked=True` asks for them. "Without" is the same code with a digest that looks at nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.comm.flipped_bits import TIMEOUT_S, count_caught
from benchmarks.comm.strangers import contacts
from benchmarks.harness import Step, compare, interleave, report

from rlinf_comm import _C, Channel, Peer, SharedPool
from rlinf_comm.peers import PeerAddress
from rlinf_comm.wire import values as frames

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
REPEATS = {"4 KB": 1000, "1 MB": 60, "64 MB": 2}
"""Hand-overs in one sample."""
DIGESTS = ("with", "without")


class _NoDigest:
    """Stands for the native module in frames.py, and looks at nothing."""

    @staticmethod
    def bytes_digest(pieces: object) -> bytes:
        return bytes(16)


def _receive_all(parent: PeerAddress, digests: str) -> None:
    """The other process: acknowledges each value."""
    if digests == "without":
        frames._C = _NoDigest  # type: ignore[assignment]
    with Peer.listen(f"receiver {digests}", transports=("tcp",)) as me:
        me.connect(parent)
        me.send("sender", "ready")
        while me.receive("sender", timeout_s=TIMEOUT_S * 20) is not None:
            me.send("sender", 1)


def _tcp_steps(sender: Peer) -> dict[str, Step]:
    def step_for(size: str, digests: str) -> Step:
        array = np.ones(SIZES[size], np.uint8)

        def step(_: int) -> float:
            frames._C = _C if digests == "with" else _NoDigest  # type: ignore[assignment]
            start_s = time.perf_counter()
            for _ in range(REPEATS[size]):
                sender.send(f"receiver {digests}", array, timeout_s=TIMEOUT_S)
                sender.receive(f"receiver {digests}", timeout_s=TIMEOUT_S)
            return (time.perf_counter() - start_s) / REPEATS[size]

        return step

    return {f"TCP, {size}, {digests}": step_for(size, digests) for size in SIZES for digests in DIGESTS}


def _local_steps() -> dict[str, Step]:
    """One thread puts and takes: what the digests add is the same in two."""
    pool = SharedPool.create("values", capacity_bytes=160 << 20, prefault=True)

    def step_for(way: str, size: str, digests: str) -> Step:
        channel = Channel.create(f"{way}", capacity_bytes=160 << 20, prefault=True, checked=digests == "with")
        tensor = torch.ones(SIZES[size], dtype=torch.uint8)
        tensor = pool.copy_of(tensor) if way == "pool" else tensor

        def step(_: int) -> float:
            start_s = time.perf_counter()
            for _ in range(REPEATS[size]):
                channel.put(tensor)
                channel.take()
            return (time.perf_counter() - start_s) / REPEATS[size]

        return step

    return {
        f"{way}, {size}, {digests}": step_for(way, size, digests)
        for way in ("channel", "pool")
        for size in SIZES
        for digests in DIGESTS
    }


def _hash_steps(num_bytes: int) -> dict[str, Step]:
    array = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    copy = np.empty_like(array)
    data = array.data
    hashes: dict[str, Callable[[], Any]] = {
        "digest, 128 bits": lambda: _C.bytes_digest([data]),
        "crc32 of zlib": lambda: zlib.crc32(data),
        "blake2b": lambda: hashlib.blake2b(data).digest(),
        "sha256": lambda: hashlib.sha256(data).digest(),
        "numpy's copy": lambda: np.copyto(copy, array),
    }

    def step_for(call: Callable[[], Any]) -> Step:
        def step(_: int) -> float:
            start_s = time.perf_counter()
            for _ in range(4):
                call()
            return (time.perf_counter() - start_s) / 4

        return step

    return {name: step_for(call) for name, call in hashes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    findings: dict[str, Any] = {"flips": count_caught()}
    with contacts() as steps:
        contacts_s = interleave(steps, num_warmup=5, num_rounds=10 * arguments.rounds)
    for name, attack in (("slower_contact_ms", "strangers"), ("slower_contact_in_a_flood_ms", "flood")):
        pairs = zip(contacts_s[f"contact, {attack}"], contacts_s["contact, no strangers"], strict=True)
        slower_s = sorted(attacked - quiet for attacked, quiet in pairs)
        findings[name] = {"median": 1e3 * slower_s[len(slower_s) // 2], "most": 1e3 * slower_s[-1]}
    hash_bytes = 16 << 20
    hashes_s = interleave(_hash_steps(hash_bytes), num_warmup=1, num_rounds=arguments.rounds)
    findings["hash_gb_per_s"] = {
        name: hash_bytes / sorted(times)[len(times) // 2] / 1e9 for name, times in hashes_s.items()
    }
    with Peer.listen("sender", transports=("tcp",)) as sender:
        spawn = multiprocessing.get_context("spawn")
        receivers = [spawn.Process(target=_receive_all, args=(sender.address, digests)) for digests in DIGESTS]
        for digests, receiver in zip(DIGESTS, receivers, strict=True):
            receiver.start()
            sender.receive(f"receiver {digests}", timeout_s=TIMEOUT_S)
        samples_s = interleave(_tcp_steps(sender), num_warmup=2, num_rounds=arguments.rounds)
        frames._C = _C
        for digests in DIGESTS:
            sender.send(f"receiver {digests}", None)
        for receiver in receivers:
            receiver.join(TIMEOUT_S)
    samples_s |= interleave(_local_steps(), num_warmup=2, num_rounds=arguments.rounds)
    cases = [f"{way}, {size}" for way in ("TCP", "channel", "pool") for size in SIZES]
    report(
        "comm-checks",
        settings={"sizes_bytes": SIZES, "rounds": arguments.rounds, "hash_bytes": hash_bytes},
        samples_s=samples_s | hashes_s | contacts_s,
        comparisons=[compare(samples_s, f"{case}, with", f"{case}, without") for case in cases],
        findings=findings,
        output=arguments.output,
    )


if __name__ == "__main__":
    main()
