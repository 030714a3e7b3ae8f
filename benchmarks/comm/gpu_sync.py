"""GPU: 15.2 GB of weights from a trainer to a server in another process on the same GPU, beside a flat copy of as many
bytes in the same rounds: `python benchmarks/comm/gpu_sync.py`, as `benchmarks.gpu_check` runs it. Prints one JSON line.

A trainer holds Qwen2.5-7B's tensors in bfloat16, or with `--trained float32` in float32, which the copy casts; a server
holds them in bfloat16, merged as SGLang and vLLM do. Ways:

packed   processes that do not wait for each other: publishing copies a version into an arena, from where the server
         copies it, so that the trainer's tensors may change at once
lent     trainer and server take turns: the server copies from the trainer's own tensors, and casts while it copies

`publish`, `take` and `check` are seconds in the median. `all` is their sum, from publishing to weights that may be
served, attested; `critical` is without the check, which runs beside generation where an engine allows it. `maps` and
`allocations` count those of all rounds but the first four, and are 0 where nothing is mapped or allocated anew.

    --fake   host memory stands for the device's and the tensors are tiny: tries the script without a GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlinf_comm import pack, unpack
from rlinf_comm.weights import Layout, WeightStore, reshard_plan as reshard_plan
from rlinf_comm.weights.device import CudaDevice, DeviceWeightReceiver, DeviceWeightSender, create_device_store
from rlinf_comm.weights.layouts import TransformerShape, merged_layout

TIMEOUT_S = 60.0
WARMUP = 4
"""Rounds in which memory is allocated and mapped: the first version is packed, and when the next three were lent its
memory is given back."""
SHAPES = {
    "Qwen2.5-7B": TransformerShape(
        num_layers=28, hidden=3584, num_heads=28, num_kv_heads=4, head_dim=128, vocab=152064, intermediate=18944,
        qkv_bias=True,
    ),
    "tiny": TransformerShape(num_layers=2, hidden=64, num_heads=2, num_kv_heads=1, head_dim=32, vocab=512,
                             intermediate=128, qkv_bias=True),
}  # fmt: skip
TARGETS = {"packed": 2.0, "lent": 1.3}
"""Flat copies from publishing to serving."""


class Side:
    """One process's device and tensors.

    Args:
        fake: host memory instead of a GPU's.
    """

    def __init__(self, layout: Layout, *, fake: bool) -> None:
        self.device, self._fake = self._make_device(fake), fake
        self.tensors = self._tensors(layout)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        """(seconds until the device has done it, what the call returned)"""
        self._wait()
        start_s = time.perf_counter()
        returned = call(*arguments)
        self._wait()
        return time.perf_counter() - start_s, returned

    def _wait(self) -> None:
        if not self._fake:
            torch.cuda.synchronize()

    @staticmethod
    def _make_device(fake: bool) -> Any:
        if not fake:
            return CudaDevice()
        sys.path.append(str(Path(__file__).parents[2] / "packages/rlinf-comm/tests"))
        from comm_host_device import HostDevice

        return HostDevice(lends=True)

    def _tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        on = "cpu" if self._fake else "cuda"
        (rank,) = layout.ranks
        tensors = {
            name: torch.randn(spec.shape, device=on).to(getattr(torch, spec.dtype))
            for name, spec in rank.buffers.items()
        }
        return self.device.lasting(tensors) if self._fake else tensors


def copy_four_times(target: torch.Tensor, source: torch.Tensor) -> None:
    """A quarter of the bytes at a time, since memory is short beside three copies of the weights."""
    for _ in range(4):
        target.copy_(source)


def serve(orders: Connection, plan: bytes, shape: str, addresses: Mapping[str, Any], fake: bool) -> None:
    """Takes the versions that it is told, and does flat copies of as many bytes."""
    torch.set_num_threads(1)
    reshard, side = unpack(plan), Side(merged_layout(SHAPES[shape], tp=1), fake=fake)
    ends = {
        way: DeviceWeightReceiver(WeightStore.open(address), reshard, 0, side.device)
        for way, address in addresses.items()
    }
    quarter = [torch.empty(reshard.num_bytes // 4, dtype=torch.uint8, device=side.device.type) for _ in range(2)]
    orders.send("open")
    while (order := orders.recv()) is not None:
        way, version = order
        if way == "flat":
            orders.send(side.timed(copy_four_times, *quarter)[0])
            continue
        take_s, check = side.timed(ends[way].take, side.tensors, version, TIMEOUT_S)
        check_s, report = side.timed(check)
        orders.send((take_s, check_s, report.num_maps))


class Trainer:
    """The trainer's process, with a store for each way.

    Args:
        dtype: of its tensors.
    """

    def __init__(self, shape: str, *, dtype: str, fake: bool) -> None:
        own = Layout.replicated(SHAPES[shape].specs(), 1, dtype)
        self.side = Side(own, fake=fake)
        self.plan = reshard_plan(own, merged_layout(SHAPES[shape], tp=1))
        stores = {way: create_device_store(self.plan, name=way) for way in TARGETS}
        self.ends = {way: DeviceWeightSender(store, self.plan, 0, self.side.device) for way, store in stores.items()}
        spawn = get_context("spawn")
        self._pipe, there = spawn.Pipe()
        arguments = (there, pack(self.plan), shape, {way: store.address for way, store in stores.items()}, fake)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self._stores = stores
        assert self._answer() == "open"

    def order(self, *order: Any) -> Any:
        self._pipe.send(order)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(2 * TIMEOUT_S), "the server does not answer"
        return self._pipe.recv()

    def sync(self, way: str, version: int) -> dict[str, float]:
        end = self.ends[way]
        end.finish_reads()
        publish = end.publish if way == "packed" else end.publish_by_reference
        publish_s, report = self.side.timed(publish, self.side.tensors, version, TIMEOUT_S)
        take_s, check_s, num_maps = self.order(way, version)
        return {
            "publish": publish_s,
            "take": take_s,
            "check": check_s,
            "critical": publish_s + take_s,
            "all": publish_s + take_s + check_s,
            "maps": num_maps,
            "allocations": report.num_allocations,
        }

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def measure(shape: str, num_rounds: int, *, dtype: str, fake: bool) -> dict[str, Any]:
    trainer = Trainer(shape, dtype=dtype, fake=fake)
    flat: list[float] = []
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in TARGETS}
    for number in range(WARMUP + num_rounds):
        flat_s = trainer.order("flat", 0)
        rows = {way: trainer.sync(way, number) for way in TARGETS}
        if number >= WARMUP:
            flat.append(flat_s)
            for way, row in rows.items():
                samples[way].append(row)
    held_bytes = {way: end.num_held_bytes() for way, end in trainer.ends.items()}
    trainer.close()
    measured: dict[str, Any] = {"num_bytes": trainer.plan.num_bytes, "flat copy": statistics.median(flat)}
    for way, rows in samples.items():
        times = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        counts = {name: int(sum(row[name] for row in rows)) for name in ("maps", "allocations")}
        in_copies = {
            f"{name}, flat copies": statistics.median(
                row[name] / flat_s for row, flat_s in zip(rows, flat, strict=True)
            )
            for name in ("critical", "all")
        }
        more = {"held_bytes": held_bytes[way], "wanted, at most": TARGETS[way]}
        measured[way] = times | counts | in_copies | more
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trained", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--fake", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    device = "host memory" if chosen.fake else torch.cuda.get_device_name()
    shape = "tiny" if chosen.fake else "Qwen2.5-7B"
    measured = measure(shape, chosen.rounds, dtype=chosen.trained, fake=chosen.fake)
    print(json.dumps({"device": device, "unit": "s, median", "trained": chosen.trained, **measured}))


if __name__ == "__main__":
    main()
