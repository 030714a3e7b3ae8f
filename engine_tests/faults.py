"""What can go wrong on the way of weights into SGLang or vLLM, done on purpose, and what the attestation says of it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import broken_loader
from rlinf_comm import WeightMismatchError
from rlinf_comm.weights.store.memory import NUM_SLOTS
from rlinf_workers.engines.sglang import engine as sglang_engine
from rlinf_workers.engines.vllm import arguments as vllm_arguments
from rlinf_workers.execution.frozen_weights import FROZEN_VERSION
from trained_engine import TrainedEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that goes wrong with one version.

    Example: Fault(kind="skipped tensor", line="skip model.norm.weight", tensors=frozenset({"model.norm.weight"}))
    """

    kind: str
    line: str = ""
    """For `broken_loader`; empty: the loader does what it should."""
    is_frozen: bool = False
    """It happens to the frozen weights beside an adapter."""
    is_on_the_way: bool = False
    """A bit flips in the weight sync's memory, after the trainer left it there and before the engine reads it."""
    tensors: frozenset[str] = frozenset()
    """What an error about it has to name, these and no others. Those of a bit on the way, and its ranks, are known when
    it has flipped."""
    ranks: frozenset[int] | None = None
    """The processes of the engine that it has to name; None: all that there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of a fault. An error that names too much does not count as one that names."""

    caught: bool = False
    names_tensors: bool = False
    names_process: bool = False
    names_version: bool = False


class FaultyEngine(TrainedEngine):
    """An engine with a loader that lies when it is told to, and weights that can be damaged on their way."""

    def __init__(self, name: str, folder: Path, *, tp: int = 1, engine: str = "sglang", **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fault_file = folder / "fault"
        self._fault_file.write_text("")
        self._patches = contextlib.ExitStack()
        environment = {broken_loader.FAULT_FILE: str(self._fault_file)}
        self._patches.enter_context(mock.patch.dict(os.environ, environment))
        self._patches.enter_context(mock.patch.object(sglang_engine, "LOADER", broken_loader.LOADER))
        own = {"worker_extension_cls": "broken_extension.BrokenExtension"}
        self._patches.enter_context(mock.patch.dict(vllm_arguments.FIXED, own))
        super().__init__(name, folder / "model", tp=tp, engine=engine, **settings)

    def close(self) -> None:
        super().close()
        self._patches.close()

    @contextlib.contextmanager
    def lying(self, line: str) -> Iterator[None]:
        """The loader does meanwhile what `broken_loader` says of the line."""
        self._fault_file.write_text(line)
        try:
            yield
        finally:
            self._fault_file.write_text("")

    def attempt(self, fault: Fault, choose: random.Random) -> Verdict:
        """Publishes a version, lets the fault happen to it, and looks at what the engine says of it."""
        if fault.line == "older":
            self.publish()  # and nobody takes it, so that it can still be had
        self.publish(frozen=fault.is_frozen)
        version = FROZEN_VERSION if fault.is_frozen else self.version
        if fault.is_on_the_way:
            self.finish_reads()
            tensors, ranks = self._flip_on_the_way(choose, version, frozen=fault.is_frozen)
            fault = replace(fault, tensors=tensors, ranks=ranks)
        try:
            with self.lying(fault.line):
                check = self.fill(frozen=fault.is_frozen)
            check()
        except WeightMismatchError as error:
            text = str(error)
            return Verdict(
                caught=True,
                names_tensors=frozenset(error.tensors) == fault.tensors,
                names_process=_ranks_in(text) == (self._all_ranks if fault.ranks is None else fault.ranks),
                names_version=f"version {version}" in text,
            )
        return Verdict()

    def recover(self, fault: Fault) -> None:
        """The next correct sync. Raises: WeightMismatchError, where what is right is refused."""
        if fault.line == "older":
            self.fill()()  # the same version, in the right way
        if fault.is_frozen:
            self.freeze()
        self.serve()

    @property
    def _all_ranks(self) -> frozenset[int]:
        return frozenset(range(len(self.layout.ranks)))

    def _flip_on_the_way(
        self, choose: random.Random, version: int, *, frozen: bool
    ) -> tuple[frozenset[str], frozenset[int]]:
        """One bit in the memory where the version waits for the engine. Returns: (the tensor that it belongs to, the
        processes that serve that part of it)."""
        sender = self._edge_of(frozen=frozen).sender._sender
        versions = [sender._words.load(sender._control.slot_version(0, slot)) for slot in range(NUM_SLOTS)]
        placed = choose.choice(sender._own)
        address = sender._slot_address(versions.index(version)) + placed.offset
        ctypes.c_uint8.from_address(address + choose.randrange(placed.num_bytes)).value ^= 1 << choose.randrange(8)
        part = (placed.piece.name, placed.piece.box)
        ranks = (rank for rank, held in enumerate(self.layout.ranks) if part in ((b.name, b.box) for b in held.blocks))
        return frozenset({placed.piece.name}), frozenset(ranks)


def flip_served(engine: TrainedEngine, choose: random.Random) -> Fault:
    """One bit of one tensor, in what a process of the engine serves."""
    rank = choose.randrange(len(engine.layout.ranks))
    held = engine.layout.ranks[rank]
    block = choose.choice([block for block in held.blocks if block.box.num_elements])
    index = [choose.randrange(length) for length in block.box.shape]
    place = block.offset + sum(i * stride for i, stride in zip(index, block.strides, strict=True))
    num_bits = 8 * getattr(torch, held.buffers[block.buffer].dtype).itemsize
    return Fault(
        kind="flipped bit, served",
        line=f"flip {rank} {block.buffer} {place * num_bits + choose.randrange(num_bits)}",
        tensors=frozenset({block.name}),
        ranks=frozenset({rank}),
        is_frozen=block.name not in engine.trained,
    )


def flip_on_the_way(*, is_frozen: bool = False) -> Fault:
    return Fault(kind="flipped bit, on the way", is_on_the_way=True, is_frozen=is_frozen)


def lies(engine: TrainedEngine) -> Iterator[Fault]:
    """Each parameter skipped, each two experts of a layer swapped, and every other lie of the loader."""
    held = engine.layout.ranks[0]
    tensors_of = {name: frozenset(block.name for block in held.blocks if block.buffer == name) for name in held.buffers}
    for name, tensors in tensors_of.items():
        is_frozen = not tensors <= engine.trained.keys()
        yield Fault(kind="skipped tensor", line=f"skip {name}", tensors=tensors, is_frozen=is_frozen)
    for name in tensors_of:
        if name.endswith(".w13_weight"):
            whole = [name, name.replace(".w13_weight", ".w2_weight")]
            for one, other in itertools.combinations(range(held.buffers[name].shape[0]), 2):
                for parts in (whole[:1], whole):
                    tensors = frozenset().union(*(tensors_of[part] for part in parts))
                    yield Fault(kind="swapped experts", line=f"swap {one} {other} {' '.join(parts)}", tensors=tensors)
    everything = frozenset(engine.trained)
    yield Fault(kind="old version kept", line="old", tensors=everything)
    yield Fault(kind="old version asked for", line="older")
    yield Fault(kind="nothing filled", line="nothing")
    for name, tensors in tensors_of.items():
        is_frozen = not tensors <= engine.trained.keys()
        line = f"replace {name}"
        yield Fault(kind="another tensor served", line=line, tensors=frozenset({name}), is_frozen=is_frozen)


def _ranks_in(text: str) -> frozenset[int]:
    return frozenset(int(rank) for rank in re.findall(r"engine process (\d+) \(pid \d+\)", text))
