"""What comes of weights that are wrong when SGLang or vLLM is to serve them: benchmarks/results/ENGINE-faults.json.

    python -m benchmarks.failures.served_faults sglang        with the Python of the venv that has the engine

Tiny models with random weights on CPU slots, one running engine for each. One fault after the other happens to a
version: a flipped bit in what one of the engine's processes serves or in the memory on the way there, or a loader that
says success and did something else. The attestation has to refuse the version and to name the tensors, the process and
the version, no others. After each fault comes a correct sync of other weights, which has to be accepted; every 50th of
them, the engine's greedy tokens are compared with those of transformers. Target: all are caught, none is refused.

With --adapter: models with a LoRA adapter beside frozen weights, and faults of both; ENGINE-adapter-faults.json.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report

sys.path.append(str(Path(__file__).parents[2] / "engine_tests"))

from faults import Fault, FaultyEngine, flip_on_the_way, flip_served, lies  # pyright: ignore[reportMissingImports]
from rlinf_comm import WeightMismatchError
from rlinf_workers.models.lora_settings import LoraSettings
from trained_engine import SIZES  # pyright: ignore[reportMissingImports]

MODELS = {"Qwen3-MoE, TP1": ("qwen3_moe", 1), "Qwen2, TP2": ("qwen2", 2)}
ADAPTED = {"Qwen2 with an adapter, TP1": ("qwen2", 1), "Qwen3 with an adapter, TP2": ("qwen3", 2)}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraSettings(rank=4, alpha=6.0, targets=TARGETS, base_digest="")
COMPARE_EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("engine", choices=sorted(SIZES))
    parser.add_argument("--adapter", action="store_true", help="models with an adapter, in place of the others")
    parser.add_argument("--flips", type=int, nargs=2, default=[1000, 200], help="flipped bits for each model")
    parser.add_argument("--output", type=Path, help="JSON to write instead of benchmarks/results/ENGINE-faults.json")
    options = parser.parse_args()
    findings, models, lora = {}, MODELS, None
    if options.adapter:
        models, lora = ADAPTED, LORA
    for (name, (architecture, tp)), num_flips in zip(models.items(), options.flips, strict=False):
        with tempfile.TemporaryDirectory() as folder:
            findings[name] = faults_of(options.engine, architecture, tp, Path(folder), num_flips, lora)
        print(name, findings[name], flush=True)
    settings = {"flips": options.flips, "compare_every": COMPARE_EVERY}
    name = f"{options.engine}-adapter-faults" if options.adapter else f"{options.engine}-faults"
    report(name, settings=settings, samples_s={}, comparisons=[], findings=findings, output=options.output)


def faults_of(
    engine_name: str, architecture: str, tp: int, folder: Path, num_flips: int, lora: LoraSettings | None = None
) -> dict[str, Any]:
    """What came of all faults of one model."""
    engine = FaultyEngine(architecture, folder, tp=tp, engine=engine_name, adapter=lora, vocab_size=64)
    try:
        choose = random.Random(5)
        flips = (
            flip_on_the_way(is_frozen=lora is not None and i % 4 > 1) if i % 2 else flip_served(engine, choose)
            for i in range(num_flips)
        )
        faults, correct = go_through(engine, [*flips, *lies(engine)], choose)
    finally:
        engine.close()
    return {"faults": faults, "correct_syncs": correct, "parameters_without_a_block": padding(engine)}


def go_through(engine: FaultyEngine, faults: Iterable[Fault], choose: random.Random) -> tuple[Any, Any]:
    """(verdicts by kind of fault, what came of the correct syncs)"""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    correct = Counter[str](served=0, refused=0, token_comparisons=0, token_comparisons_that_hold=0)
    start_s = time.monotonic()
    for number, fault in enumerate(faults, start=1):
        verdict = asdict(engine.attempt(fault, choose))
        kind = f"{fault.kind}, frozen weights" if fault.is_frozen else fault.kind
        kinds[kind].update(happened=1, **{what: int(so) for what, so in verdict.items()})
        if not all(verdict.values()):
            print(fault, verdict, flush=True)
        try:
            engine.recover(fault)
            correct["served"] += 1
        except WeightMismatchError as error:
            correct["refused"] += 1
            print(fault, "and then", error, flush=True)
        if number % COMPARE_EVERY == 0:
            correct["token_comparisons"] += 1
            correct["token_comparisons_that_hold"] += engine.compare_tokens().holds
            print(f"{number} faults, {time.monotonic() - start_s:.0f} s", flush=True)
    return {kind: dict(counts) for kind, counts in kinds.items()}, dict(correct)


def padding(engine: FaultyEngine) -> int:
    """Numbers among the engine's parameters that belong to no tensor of the model; nothing attests these."""
    ranks = engine.layout.ranks
    held = sum(torch.Size(buffer.shape).numel() for rank in ranks for buffer in rank.buffers.values())
    return held - sum(block.box.num_elements for rank in ranks for block in rank.blocks)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
