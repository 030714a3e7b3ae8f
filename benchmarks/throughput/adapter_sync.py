"""Syncs of a rank-16 adapter: the merged model against the adapter alone, and what a decode step costs with it.

python -m benchmarks.throughput.adapter_sync [--engine huggingface] [--layers 28] [--rank 16]

A model with the shape of Qwen2.5-1.5B, random weights in bfloat16, one trainer (`replicated`) and one engine through
the weight sync `shared`, on the CPU. Both syncs fill the same engine in turn. A sync is publishing, receiving and the
comparison of digests. With the engine `huggingface` the decode step of the model without its adapter is that of an
engine with merged weights. With `vllm` and `sglang` (run it with the Python of a venv that has the engine and peft), a
step is a part of eight completions, by an engine with the adapter and then by one without. Writes
benchmarks/results/adapter-sync.json, or adapter-sync-ENGINE.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.harness import compare, interleave, report
from transformers import DynamicCache, Qwen2Config

from rlinf_comm.weights import Layout, ReshardPlan, reshard_plan
from rlinf_comm.weights.layouts import is_adapter_tensor
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.base import RemoteWeights
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.models import LoraSettings, ModelSettings
from rlinf_workers.models.lora import LoraModel, find_targets
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.plugins import ENGINES
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import write_tokenizer
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.trainers import OptimizerSettings, ReplicatedBackend
from rlinf_workers.weight_sync.base import SyncedTensors, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
NUM_ROUNDS, NUM_TOKENS = 5, 8


class Sync:
    """One of the two syncs between the trainer and the engine."""

    def __init__(self, kind: SyncedTensors, reshard: ReshardPlan, trained: Any, engine: Any) -> None:
        self._sync = SharedWeightSync("actor -> rollout", reshard)
        common: dict[str, Any] = {"rank": 0, "reshard": reshard, "weight_sync": "shared", "tensors": kind}
        sides: Any = {
            side: WeightPort(edge="actor -> rollout", side=side, address=self._sync.address, **common)
            for side in ("send", "receive")
        }
        self._sender = SharedWeightSync.open_sender(sides["send"])
        if isinstance(engine, RemoteWeights):
            self._receiver = engine.open_receiver([sides["receive"]])
        else:
            self._receiver = SharedWeightSync.open_receiver(sides["receive"])
        self._trained, self._engine = trained, cast(Any, engine)
        self._sent, self._filled = frozenset(reshard.src_buffers[0]), frozenset(reshard.dst_buffers[0])

    def __call__(self, version: int) -> float:
        start_s = time.perf_counter()
        finish_reads = self._sender.publish(pick(self._trained(), self._sent), version)
        check = self._receiver.receive(pick(self._engine.weights(), self._filled), version)
        assert check is not None, "the weight sync `shared` is checked"
        check()
        finish_reads()
        return time.perf_counter() - start_s


def pick(tensors: Any, names: frozenset[str]) -> Any:
    """The tensors of these names, read one at a time."""
    return {name: tensors[name] for name in tensors if name in names}


def part(layout: Layout, *, adapter: bool) -> Layout:
    """The adapter's tensors, or all others."""
    return layout.only({name for name in layout.specs if is_adapter_tensor(name) == adapter})


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["huggingface", "vllm", "sglang"], default="huggingface")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(num_hidden_layers=options.layers, architectures=["Qwen2ForCausalLM"], **SHAPE).save_pretrained(
            folder
        )
        write_tokenizer(Path(folder))
        settings = ModelSettings(folder=folder, has_weights=False, dtype="bfloat16")
        targets, layers = find_targets(folder, ["all-linear"])
        lora = LoraSettings(rank=options.rank, alpha=32.0, targets=targets, base_digest="")
        kind = LoraModel(TokenModel(settings, 1.0), settings, lora)
        trainer = ReplicatedBackend(
            kind, trial_worker(), optimizer=OptimizerSettings(learning_rate=1.0), num_shards=1, compile=False
        )
        engine = make_engine(options.engine, replace(settings, adapter=lora))
        measure(options, settings, lora, trainer, engine, layers)


def make_engine(name: str, settings: ModelSettings) -> Any:
    device = torch.device("cpu")
    if name == "huggingface":
        return HuggingFaceEngine(settings, device, max_prompt_tokens=16)
    cache = {"vllm": {"kv_cache_memory_bytes": 256 << 20}, "sglang": {"max_total_tokens": 4000}}[name]
    return ENGINES.get(name)(settings, device, max_prompt_tokens=16, **cache)


def measure(options: Any, settings: ModelSettings, lora: LoraSettings, trainer: Any, engine: Any, layers: Any) -> None:
    served = engine.layout().with_dtypes_of(trainer.layout(merged=False).specs)
    plans = {
        "sync, merged": reshard_plan(trainer.layout(), part(served, adapter=False)),
        "sync, adapter": reshard_plan(part(trainer.layout(merged=False), adapter=True), part(served, adapter=True)),
    }
    sides = {
        "sync, merged": Sync("frozen", plans["sync, merged"], trainer.weights, engine),
        "sync, adapter": Sync("trained", plans["sync, adapter"], lambda: trainer.weights(merged=False), engine),
    }
    samples_s = interleave(sides, num_warmup=1, num_rounds=NUM_ROUNDS)
    if options.engine == "huggingface":
        steps_s = decode_steps(engine._model)
    else:
        steps_s = served_steps(options.engine, settings, engine)
    num_bytes = {name: plan.num_bytes for name, plan in plans.items()}
    changed = sum(inputs * outputs for inputs, outputs in layers.values())
    report(
        "adapter-sync" if options.engine == "huggingface" else f"adapter-sync-{options.engine}",
        settings={"shape": SHAPE, "num_layers": options.layers, "rank": options.rank, "dtype": "bfloat16"},
        samples_s=samples_s | steps_s,
        comparisons=[
            compare(samples_s, "sync, merged", "sync, adapter"),
            compare(steps_s, "decode step, adapter", "decode step, merged"),
        ],
        findings={
            "bytes of a sync": num_bytes,
            "bytes merged / bytes of the adapter": num_bytes["sync, merged"] / num_bytes["sync, adapter"],
            "bytes that the engine would need to keep the weights that it merges": 2 * changed,
        },
    )


def decode_steps(model: Any, num_rows: int = 8) -> dict[str, list[float]]:
    """Seconds of decode steps of eight rows with and without the adapter, in turn."""
    adapted = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    classes = {"decode step, adapter": type(adapted[0]), "decode step, merged": torch.nn.Linear}
    ids = torch.arange(num_rows)[:, None] + 100

    def side(name: str) -> Any:
        def steps(_: int) -> float:
            for layer in adapted:
                layer.__class__ = classes[name]
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            start_s = time.perf_counter()
            for _ in range(NUM_TOKENS):
                model(input_ids=ids, past_key_values=cache, use_cache=True)
            return (time.perf_counter() - start_s) / NUM_TOKENS

        return steps

    return interleave({name: side(name) for name in classes}, num_warmup=1, num_rounds=NUM_ROUNDS)


def served_steps(name: str, settings: ModelSettings, adapted: Any) -> dict[str, list[float]]:
    """As `decode_steps`, for a server: its completions of eight prompts, with their prefill."""
    sampling = SamplingSettings(group_size=1, max_new_tokens=NUM_TOKENS * 4, temperature=1.0)
    samples_s: dict[str, list[float]] = {}
    for side in ("decode step, adapter", "decode step, merged"):
        engine = adapted if side == "decode step, adapter" else make_engine(name, settings)
        engine.weights_received(NUM_ROUNDS + 1)
        for number in range(NUM_ROUNDS + 1):
            prompts = [Prompt(index=i, token_ids=torch.tensor([100 + i]), reference_answer="") for i in range(8)]
            start_s = time.perf_counter()
            engine.submit(prompts, sampling, seed=1, step=number)
            while engine.finished():
                continue
            if number:
                samples_s.setdefault(side, []).append((time.perf_counter() - start_s) / sampling.max_new_tokens)
        engine.close()
    return samples_s


if __name__ == "__main__":
    main()
