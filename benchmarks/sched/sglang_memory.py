"""What an SGLang engine reports and holds beside what a plan counts, on CPU slots: results/sglang-memory.json.

    SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 python benchmarks/sched/sglang_memory.py [CASE ...] [--recount]

Runs with the Python of an environment that has SGLang. Each case is an engine of `rlinf_workers.engines.sglang` with
random weights and the server arguments that `rlinf train` would give it, in a process of its own. SGLang's own report
is the number of tokens of its KV pool. Measured is what that process and the engine's hold at most while a step's
completions are sampled to their longest: anonymous and shared memory, each page in equal parts with whoever maps it
(kernel, proc(5): smaps_rollup), and the files that the process with most of them has mapped, which the others share.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlinf.planning.memory import Load
from rlinf.tasks.language import character_tokenizer
from rlinf_sched.derive import JobShape, Lengths, ModelShape
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.sglang.memory import kv_tokens
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt

RESULT = Path(__file__).parents[1] / "results" / "sglang-memory.json"
LENGTHS = Lengths(mean_tokens=96, limit_tokens=96, prompt_tokens=32, group_size=8)
DEVICE_BYTES = 4 << 30
POLL_S = 0.2
SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
DENSE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 32}
MIXTURE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8, **EXPERTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, the devices of its engine, and what the recipe says under `rollout.engine_options`."""

    kind: str
    config: dict[str, int]
    num_kv_heads: int
    vocab_size: int
    num_devices: int
    num_groups: int
    options: dict[str, Any]


CASES = {
    "Qwen2, 0.3M": Case(
        kind="qwen2", config=SMALL, num_kv_heads=2, vocab_size=64, num_devices=1, num_groups=64, options={}
    ),
    "Qwen2, 29M": Case(
        kind="qwen2", config=DENSE, num_kv_heads=4, vocab_size=4096, num_devices=1, num_groups=16, options={}
    ),
    "Qwen2, 29M, 20,000 tokens, TP2": Case(
        kind="qwen2",
        config=DENSE,
        num_kv_heads=4,
        vocab_size=4096,
        num_devices=2,
        num_groups=16,
        options={"max_total_tokens": 20_000},
    ),
    "Qwen3, 29M": Case(
        kind="qwen3",
        config={**DENSE, "head_dim": 64},
        num_kv_heads=4,
        vocab_size=4096,
        num_devices=1,
        num_groups=16,
        options={},
    ),
    "Qwen3-MoE, 22M": Case(
        kind="qwen3_moe", config=MIXTURE, num_kv_heads=4, vocab_size=4096, num_devices=1, num_groups=16, options={}
    ),
}


def held_bytes() -> int:
    """Of this process and all below it."""
    own, files = 0, 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            rollup = sizes_of(Path(f"/proc/{process.pid}/smaps_rollup"))
            files = max(files, sizes_of(Path(f"/proc/{process.pid}/status"))["RssFile"])
        except (OSError, KeyError):
            continue  # it has just ended
        own += rollup["Pss_Anon"] + rollup["Pss_Shmem"]
    return own + files


def sizes_of(path: Path) -> dict[str, int]:
    """Name -> bytes, of the lines that end with a unit."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) << 10 for line in lines if len(line) == 3 and line[2] == "kB"}


class Peak(threading.Thread):
    """The largest `held_bytes` from `start` to `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._stopping = 0, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.bytes = max(self.bytes, held_bytes())

    def stop(self) -> int:
        self._stopping.set()
        self.join()
        return self.bytes


def config_of(case: Case) -> PretrainedConfig:
    """The model's."""
    sizes = {"num_key_value_heads": case.num_kv_heads, "vocab_size": case.vocab_size, **case.config}
    return AutoConfig.for_model(case.kind, max_position_embeddings=256, eos_token_id=1, **sizes)


def shapes_of(case: Case) -> tuple[ModelShape, JobShape]:
    """The model's shape, and what a step asks of the rank."""
    job = JobShape(
        lengths=LENGTHS,
        num_groups=case.num_groups,
        on_gpu=False,
        engine_options=case.options,
        tensor_parallel=case.num_devices,
        device_bytes=DEVICE_BYTES,
    )
    return ModelShape.from_config(config_of(case).to_dict()), job


def counted(case: Case) -> dict[str, Any]:
    """What a plan says."""
    shape, job = shapes_of(case)
    memory = SPEC.memory(shape, job)
    devices = tuple(range(case.num_devices))
    load = Load(
        group="rollout",
        memory=memory,
        num_items=1,
        offload=False,
        devices=devices,
        engine_process_bytes=case.num_devices * SPEC.process_bytes,
    )
    return {
        "architecture": case.kind,
        "num_parameters": shape.num_parameters,
        "num_devices": case.num_devices,
        "counted_kv_tokens": kv_tokens(shape, job),
        "kv_pool_bytes": memory.kv_pool,
        "counted_bytes": load.process,
    }


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """What SGLang reports, and what the processes held."""
    from rlinf_workers.engines.sglang.engine import SGLangEngine

    AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32).save_pretrained(folder)
    character_tokenizer("0123456789").save_pretrained(folder)
    peak, started_s = Peak(), time.monotonic()
    peak.start()
    engine = SGLangEngine(
        ModelSettings(folder=str(folder), has_weights=True),
        torch.device("cpu"),
        max_prompt_tokens=LENGTHS.prompt_tokens,
        devices=[f"cpu:{index}" for index in range(case.num_devices)],
        **SPEC.filled_options(*shapes_of(case)),
    )
    start_s = time.monotonic() - started_s
    sampling = SamplingSettings(group_size=8, max_new_tokens=LENGTHS.limit_tokens)
    waiting = [
        Prompt(index=index, token_ids=torch.arange(2, 2 + LENGTHS.prompt_tokens) % 12, reference_answer="")
        for index in range(case.num_groups)
    ]
    while waiting or engine.finished():
        room = engine.free_capacity(sampling.group_size)
        now, waiting = waiting[:room], waiting[room:]
        if now:
            engine.submit(now, sampling, seed=0, step=0)
    reported = engine._server.num_tokens
    engine.close()
    return {"reported_kv_tokens": reported, "measured_bytes": peak.stop(), "start_s": round(start_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--recount", action="store_true", help="count all that is there again, and measure nothing")
    options = parser.parse_args()
    goes_on = RESULT.exists() and (options.cases or options.recount)
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "sglang": version("sglang"),
        "cases": json.loads(RESULT.read_text())["cases"] if goes_on else {},
    }
    for name in [] if options.recount else options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as alone:
            result["cases"][name] = row = alone.submit(measured, CASES[name], Path(folder)).result()
        print(name, json.dumps(row), flush=True)
        save(result)
    save(result)


def save(result: dict[str, Any]) -> None:
    """With what is counted now."""
    for name, row in result["cases"].items():
        row.update(counted(CASES[name]))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
