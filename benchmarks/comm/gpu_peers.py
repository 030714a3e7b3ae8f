"""GPU: one bfloat16 tensor from peer to peer and back between two processes on one device, by IPC and by host memory.

Prints one JSON object. Medians of round trips, each until the tensor that came back is complete on the device; beside
them a device-to-device copy of as many bytes. A round trip by IPC copies four times.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rlinf_comm import Peer, PeerLost
from rlinf_comm.peers import job_secret

SIZES = (4 << 10, 1 << 20, 64 << 20, 1 << 30)
ROUNDS = 11
TIMEOUT_S = 60.0


def echo(pipe: Any, transport: str) -> None:
    torch.cuda.init()
    with Peer.listen("echo", transports=(transport,), capacity_bytes=SIZES[-1]) as me:
        pipe.send(me.address)
        try:
            while True:
                me.send("parent", me.receive("parent", timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
        except PeerLost:
            pipe.recv()


def median_us(call: Callable[[], object]) -> float:
    def timed() -> float:
        start_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) * 1e6

    call()
    return round(statistics.median(timed() for _ in range(ROUNDS)), 1)


def measure(transport: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=echo, args=(there, transport), daemon=True)
    child.start()
    round_trip_us: dict[int, float] = {}
    with Peer.listen("parent", transports=(transport,), capacity_bytes=SIZES[-1]) as me:
        chosen = me.connect(here.recv(), timeout_s=TIMEOUT_S)
        for num_bytes in SIZES:
            tensor = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device="cuda")

            def there_and_back(tensor: torch.Tensor = tensor) -> torch.Tensor:
                me.send("echo", tensor, timeout_s=TIMEOUT_S)
                return me.receive("echo", timeout_s=TIMEOUT_S).cuda()  # already there by IPC

            assert torch.equal(there_and_back().view(torch.int16), tensor.view(torch.int16))
            round_trip_us[num_bytes] = median_us(there_and_back)
    here.send("done")
    child.join(TIMEOUT_S)
    return {"transport": str(chosen), "round_trip_us": round_trip_us}


def main() -> None:
    job_secret()  # before there are children, which inherit it
    torch.cuda.init()
    sources = {num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for num_bytes in SIZES}
    copies = {num_bytes: torch.empty_like(source) for num_bytes, source in sources.items()}
    copy_us = {num_bytes: median_us(lambda n=num_bytes: copies[n].copy_(sources[n])) for num_bytes in SIZES}
    results = {"device_copy_us": copy_us, "ipc": measure("ipc"), "shared": measure("shared")}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
