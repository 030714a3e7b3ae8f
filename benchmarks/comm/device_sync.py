"""GPU: a sync of weights between two processes of one GPU: `python -m benchmarks.comm.device_sync`.

A trainer holds Qwen2.5-0.5B's tensors whole, in bfloat16 or as float32 masters, and an engine serves them merged as
SGLang and vLLM do, in bfloat16: 988 MB. Sides of a round: a flat copy of as many bytes from device memory to device
memory in the engine's process; the device sync without digests and attested; and the one through host memory.
`critical` is what generation waits for, publishing and taking; `all` has the check of what is served too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmarks.comm.weight_sync import DENSE
from benchmarks.harness import compare, report

from rlinf_comm import WeightMismatchError, pack, unpack
from rlinf_comm.copies import CopyProgram
from rlinf_comm.weights import Layout, WeightStore, reshard_plan as reshard_plan
from rlinf_comm.weights.device import (
    CudaDevice,
    DeviceWeightReceiver,
    DeviceWeightSender,
    create_device_store,
    mailbox_bytes,
)
from rlinf_comm.weights.device.device import Copies
from rlinf_comm.weights.device.memory import ExportWords, read_export
from rlinf_comm.weights.device.side import DevicePrograms
from rlinf_comm.weights.layouts import merged_layout
from rlinf_workers.weight_sync import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

TIMEOUT_S = 60.0
ENGINE = merged_layout(DENSE, tp=1)
TRAINERS = {
    "bfloat16": Layout.replicated(DENSE.specs(), 1),
    "float32 masters": Layout.replicated(DENSE.specs(), 1, dtype="float32"),
}


class _NoDigests:
    """Copies alone."""

    def __init__(self, copies: Copies, num_digests: int) -> None:
        self.run, self._num_digests = copies.run, num_digests

    def run_with_digests(self, src_pointers: Any, dst_pointers: Any) -> list[int]:
        self.run(src_pointers, dst_pointers)
        return [0] * self._num_digests


class _Plain:
    def __init__(self, programs: DevicePrograms, num_digests: int) -> None:
        self._programs, self._num_digests = programs, num_digests

    def of(self, program: CopyProgram) -> _NoDigests:
        return _NoDigests(self._programs.of(program), self._num_digests)


class Sender(DeviceWeightSender):
    """Publishes with digests or without."""

    attests = True

    def _on_device(self, tensors: Any) -> Any:
        programs = super()._on_device(tensors)
        return programs if self.attests else _Plain(programs, len(self._own))


def contents(layout: Layout) -> dict[str, torch.Tensor]:
    """The buffers of a layout's only rank on the device; an element depends on its tensor's name and place alone."""
    rank = layout.ranks[0]
    buffers = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
        for name, spec in rank.buffers.items()
    }
    for block in rank.blocks:
        seed = int.from_bytes(block.name.encode()[-6:], "little")
        generator = torch.Generator(device="cuda").manual_seed(seed)
        values = torch.randn(layout.specs[block.name].shape, generator=generator, device="cuda")
        box = tuple(slice(at, at + n) for at, n in zip(block.box.start, block.box.shape, strict=True))
        tensor = buffers[block.buffer]
        view = tensor.as_strided(block.box.shape, block.strides, tensor.storage_offset() + block.offset)
        view.copy_(values[box])
    return buffers


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def port(side: Any, plan: Any, address: Any) -> WeightPort:
    return WeightPort(edge="sync", side=side, rank=0, reshard=plan, weight_sync="shared", address=address)


class Engine:
    """The serving rank; does what it is told by name."""

    def __init__(self, plan: bytes, device_address: Any, host_address: Any) -> None:
        reshard = unpack(plan)
        self.end = DeviceWeightReceiver(WeightStore.open(device_address), reshard, 0, CudaDevice())
        self.host = SharedWeightSync.open_receiver(port("receive", reshard, host_address))
        self.own = {name: torch.zeros_like(tensor) for name, tensor in contents(ENGINE).items()}
        self.flat = [torch.empty(reshard.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def flat_copy(self) -> float:
        return seconds(lambda: self.flat[0].copy_(self.flat[1]))

    def take(self, version: int, attests: bool) -> tuple[float, float]:
        """Seconds to take a version, and to check it."""
        self.end._attests = attests
        checks: list[Any] = []
        take_s = seconds(lambda: checks.append(self.end.take(self.own, version, TIMEOUT_S)))
        return take_s, seconds(checks[0])

    def take_through_host(self, version: int) -> tuple[float, float]:
        checks: list[Any] = []
        take_s = seconds(lambda: checks.append(self.host.receive(self.own, version, TIMEOUT_S)))
        return take_s, seconds(checks[0])

    def num_wrong(self) -> int:
        wrong = sum(int((self.own[name] != tensor).sum()) for name, tensor in contents(ENGINE).items())
        for tensor in self.own.values():
            tensor.zero_()
        return wrong

    def refusal(self, version: int) -> str:
        self.end._attests = True
        try:
            self.end.take(self.own, version, TIMEOUT_S)()
        except WeightMismatchError as error:
            return str(error)
        return "taken"


def serve(orders: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    engine = Engine(*arguments)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        orders.send(getattr(engine, order[0])(*order[1:]))


class Sync:
    """A trainer's rank here, and the engine in another process."""

    def __init__(self, trainer: Layout) -> None:
        self.plan = reshard_plan(trainer, ENGINE)
        self._store = create_device_store(self.plan, name="sync")
        self._link = SharedWeightSync("sync", self.plan)
        self.device = CudaDevice()
        self.end = Sender(self._store, self.plan, 0, self.device)
        self.host = SharedWeightSync.open_sender(port("send", self.plan, self._link.address))
        self.tensors = contents(trainer)
        spawn = get_context("spawn")
        self._pipe, there = spawn.Pipe()
        arguments = (there, pack(self.plan), self._store.address, self._link.address)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self.version = 0
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._pipe.poll(2 * TIMEOUT_S), "the engine does not answer"
        return self._pipe.recv()

    def order(self, *order: Any) -> Any:
        self._pipe.send(order)
        return self._answer()

    def round(self) -> dict[str, float]:
        spent = {"flat copy": self.order("flat_copy")}
        for way in ("plain", "attested"):
            self.version += 1
            self.end.attests = way == "attested"
            spent[f"{way}, publish"] = seconds(lambda: self.end.publish(self.tensors, self.version, TIMEOUT_S))
            spent[f"{way}, take"], spent[f"{way}, check"] = self.order("take", self.version, way == "attested")
        spent["host, publish"] = seconds(lambda: self.host.publish(self.tensors, self.version))
        spent["host, take"], spent["host, check"] = self.order("take_through_host", self.version)
        for way in ("plain", "attested", "host"):
            spent[f"{way}, critical"] = spent[f"{way}, publish"] + spent[f"{way}, take"]
            spent[f"{way}, all"] = spent[f"{way}, critical"] + spent[f"{way}, check"]
        return spent

    def findings(self) -> dict[str, Any]:
        """One more sync, slowly: memory, bits, and a flipped one."""
        self.end.attests = True
        self.version += 1
        self.end.publish(self.tensors, self.version, TIMEOUT_S)
        self.order("take", self.version, True)
        wrong = {"through the device": self.order("num_wrong")}
        self.host.publish(self.tensors, self.version)
        self.order("take_through_host", self.version)
        wrong["through the host"] = self.order("num_wrong")
        self.version += 1
        self.end.publish(self.tensors, self.version, TIMEOUT_S)
        self._flip()
        return {
            "num_bytes": self.plan.num_bytes,
            "mailbox_bytes": mailbox_bytes(self.plan, 0),
            "held_bytes": self.end.num_held_bytes(),
            "elements_that_differ": wrong,
            "refusal_of_a_flipped_bit": self.order("refusal", self.version),
        }

    def _flip(self) -> None:
        last = self.end._words.load(self.end._control.num_published(0)) - 1
        place = self.end._words.load(ExportWords(self.plan, 2).slot_place(0, last % 2))
        export = read_export(self._store, self.plan, 0, place)
        assert export is not None
        (handle,) = export.handles
        self.device.bytes_at(handle.pointer, handle.num_bytes)[12345] ^= 8
        torch.cuda.synchronize()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {}
    comparisons: list[Any] = []
    findings: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, trainer in TRAINERS.items():
        sync = Sync(trainer)
        for number in range(chosen.warmup + chosen.rounds):
            for side, spent_s in sync.round().items():
                if number >= chosen.warmup:
                    samples.setdefault(f"{name}: {side}", []).append(spent_s)
        findings[name] = sync.findings()
        print(name, findings[name], flush=True)
        sync.close()
        for above, below in (
            ("plain, critical", "flat copy"),
            ("attested, critical", "flat copy"),
            ("attested, all", "flat copy"),
            ("attested, all", "plain, critical"),
            ("attested, critical", "plain, critical"),
            ("host, critical", "attested, critical"),
            ("host, all", "attested, all"),
        ):
            comparisons.append(compare(samples, f"{name}: {above}", f"{name}: {below}"))
    report(
        "device-sync",
        settings={"rounds": chosen.rounds, "warmup": chosen.warmup, "processes": 2, "gpus": 1},
        samples_s=samples,
        comparisons=comparisons,
        findings=findings,
        output=chosen.output,
    )


if __name__ == "__main__":
    main()
