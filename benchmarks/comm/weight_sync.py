"""What a sync of weights costs in shared memory: `python -m benchmarks.comm.weight_sync`.

Trainers as FSDP2, Megatron TP2 PP2 and Megatron TP2 EP2 hold weights, an engine with TP2 as SGLang and vLLM hold them,
a gigabyte in bfloat16; each rank is a process with one thread, and ranks of a side work at the same time. Sides of a
round: a flat copy of the bytes that the engine serves, the sync of lent weights, which the engine copies from the
trainer's tensors, and the sync through the store with and without digests. `critical` is what generation waits for:
publishing and the copy into the engine's tensors. `all` has the check too, which runs beside the first chunk: it reads
the engine's tensors again and, where the weights were lent, the trainer's. Neither of them is digested before, so the
critical path of lent weights is what it is without digests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.comm.sync_ranks import STORE, serve
from benchmarks.harness import compare, report

from rlinf_comm import pack
from rlinf_comm.weights import Layout, WeightStore, reshard_plan as reshard_plan
from rlinf_comm.weights.layouts import TransformerShape, megatron_layout, merged_layout

DENSE = TransformerShape(
    num_layers=24, hidden=896, num_heads=14, num_kv_heads=2, head_dim=64, vocab=151936, intermediate=4864,
    qkv_bias=True, tied_embeddings=True,
)  # fmt: skip
"""Qwen2.5-0.5B."""
MOE = TransformerShape(
    num_layers=6, hidden=1024, num_heads=16, num_kv_heads=4, head_dim=64, vocab=32768, num_experts=64,
    expert_intermediate=384, qk_norm=True,
)  # fmt: skip
"""Qwen3-MoE's kinds of tensors, 1,152 of them of experts."""


WAYS = ("lent", "stored", "stored, plain")


@dataclass(frozen=True)
class Case:
    trainer: Layout
    engine: Layout


def cases() -> dict[str, Case]:
    dense, moe = merged_layout(DENSE, tp=2), merged_layout(MOE, tp=2)
    return {
        "FSDP2 x 2": Case(Layout.sharded(DENSE.specs(), 2), dense),
        "FSDP2 x 2, float32": Case(Layout.sharded(DENSE.specs(), 2, dtype="float32"), dense),
        "Megatron TP2 PP2": Case(megatron_layout(DENSE, tp=2, pp=2), dense),
        "Megatron TP2 EP2, MoE": Case(megatron_layout(MOE, tp=2, ep=2), moe),
    }


class Ranks:
    """The processes of one side."""

    def __init__(self, side: str, layout: Layout) -> None:
        spawn = get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(layout.num_ranks):
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve, args=(side, layout, rank, there))
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def order(self, *order: Any) -> tuple[float, list[Any]]:
        """(seconds until all have answered, their answers)"""
        start_s = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(order)
        answers = [pipe.recv() for pipe in self._pipes]
        return time.perf_counter() - start_s, answers

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)


def measure(case: Case, num_warmup: int, num_rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(seconds of each side and part in every round, what else was found)"""
    start_s = time.perf_counter()
    reshard = reshard_plan(case.trainer, case.engine)
    plan_s = time.perf_counter() - start_s
    packed = pack(reshard)
    store = WeightStore.create(reshard, name=STORE)
    trainer, engine = Ranks("send", case.trainer), Ranks("receive", case.engine)
    samples: dict[str, list[float]] = {}
    try:
        open_s = max(trainer.order("open", packed, store.address)[0], engine.order("open", packed, store.address)[0])
        extra_bytes = {}
        for version, what in enumerate(("copied", "moved", "lent")):
            trainer.order("publish_by_reference", version)
            engine.order("take", version, True)
            engine.order("check")
            trainer.order("finish_reads")
            extra_bytes |= {f"trainer, {what}": trainer.order("extra_bytes")[1]}
            extra_bytes |= {f"engine, {what}": engine.order("extra_bytes")[1]}
        for number in range(num_warmup + num_rounds):
            spent = {"flat copy": engine.order("flat_copy")[0]}
            for way in WAYS if number % 2 else reversed(WAYS):
                version += 1
                publish = ("publish_by_reference", version) if way == "lent" else ("publish", version, way == "stored")
                spent[f"{way}, publish"] = trainer.order(*publish)[0]
                spent[f"{way}, take"] = engine.order("take", version, way != "stored, plain")[0]
                spent[f"{way}, check"] = engine.order("check")[0]
                spent[f"{way}, settle"] = trainer.order("finish_reads")[0]
                spent[f"{way}, critical"] = spent[f"{way}, publish"] + spent[f"{way}, take"]
                spent[f"{way}, all"] = spent[f"{way}, critical"] + spent[f"{way}, check"]
            if number >= num_warmup:
                for name, seconds in spent.items():
                    samples.setdefault(name, []).append(seconds)
        wrong = engine.order("num_wrong")[1]  # needs memory of its own
        findings = {
            "num_bytes": reshard.num_bytes,
            "elements_that_differ": sum(wrong),
            "num_moves": len(reshard.moves),
            "num_pieces": len(reshard.pieces),
            "plan_s": plan_s,
            "packed_plan_bytes": len(packed),
            "open_s": open_s,
            "extra_bytes_of_ranks": extra_bytes,
            "store_bytes_at_most": 2 * reshard.num_bytes,
        }
    finally:
        trainer.end()
        engine.end()
    return samples, findings


def rates(samples: dict[str, list[float]], num_bytes: int) -> dict[str, float]:
    return {name: num_bytes / statistics.median(seconds) / 1e9 for name, seconds in samples.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=10, help="the stores' kind is measured in the first eight")
    parser.add_argument("--case", action="append", choices=list(cases()))
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    all_samples: dict[str, list[float]] = {}
    comparisons, findings = [], {}
    for name, case in cases().items():
        if chosen.case and name not in chosen.case:
            continue
        samples, case_findings = measure(case, chosen.warmup, chosen.rounds)
        samples = {f"{name}: {side}": seconds for side, seconds in samples.items()}
        all_samples |= samples
        findings[name] = case_findings | {"gb_per_s": rates(samples, case_findings["num_bytes"])}
        for above, below in (
            ("lent, all", "lent, critical"),
            ("stored, all", "stored, plain, critical"),
            ("stored, critical", "stored, plain, critical"),
            ("flat copy", "lent, critical"),
            ("flat copy", "lent, all"),
            ("flat copy", "stored, critical"),
            ("flat copy", "stored, all"),
        ):
            comparisons.append(compare(samples, f"{name}: {above}", f"{name}: {below}"))
        print(name, {key: value for key, value in case_findings.items() if key != "gb_per_s"}, flush=True)
    report(
        "weight-sync",
        settings={"rounds": chosen.rounds, "warmup": chosen.warmup, "threads_of_a_rank": 1},
        samples_s=all_samples,
        comparisons=comparisons,
        findings=findings,
        output=chosen.output,
    )


if __name__ == "__main__":
    main()
