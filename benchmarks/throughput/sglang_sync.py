"""How long a new version takes into SGLang: straight into its process, attested, against SGLang's own two ways.

    python benchmarks/throughput/sglang_sync.py --num-layers 6 --num-rounds 5

Qwen2-1.5B's sizes in bfloat16 with random weights and fewer layers, on CPU slots; needs SGLang in the environment. The
trainer is this process and holds whole weights. In each round it changes them, and then each side sends them:

    rlinf              sync `shared`: lent, filled in place in SGLang's process, checked there
    flattened_bucket   update_weights_from_tensor with FlattenedTensorBucket, pickled through shared memory; unchecked
    from_disk          update_weights_from_disk alone, the files are there already; unchecked
    saved_and_from_disk   the same with the writing of the files
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file

from harness import Step, compare, interleave, report
from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_workers.engines.processes import EngineProcesses
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.models import ModelSettings
from rlinf_workers.weight_sync import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

EDGE = "actor -> rollout"
NUM_WARMUP = 2  # the first rounds touch memory for the first time, on all sides
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": options.num_layers}))
        sync = Sync(Path(folder))
        sides: dict[str, Step] = {
            "rlinf": sync.straight,
            "flattened_bucket": sync.flattened_bucket,
            "from_disk": sync.from_disk,
        }
        samples_s = interleave(sides, num_warmup=NUM_WARMUP, num_rounds=options.num_rounds)
        saved_s, check_s, fill_s = (one[NUM_WARMUP:] for one in (sync.saved_s, sync.check_s, sync.fill_s))
        samples_s["saved_and_from_disk"] = [a + b for a, b in zip(samples_s["from_disk"], saved_s, strict=True)]
        report(
            "sglang-sync",
            settings=vars(options) | {"output": None, "config": CONFIG},
            samples_s=samples_s,
            comparisons=[compare(samples_s, side, "rlinf") for side in samples_s if side != "rlinf"],
            findings={
                "num_bytes": sum(tensor.nbytes for tensor in sync.weights.values()),
                "check_s": check_s,
                "fill_s": fill_s,
            },
            output=options.output,
        )
        sync.engine.shutdown()


class Sync:
    def __init__(self, folder: Path) -> None:
        import sglang  # pyright: ignore[reportMissingImports]

        self.folder = folder
        self.engine = sglang.Engine(
            model_path=str(folder),
            load_format="dummy",
            device="cpu",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            mem_fraction_static=0.5,
            max_total_tokens=512,
            max_running_requests=4,
            log_level="error",
            sleep_on_idle=True,
            custom_weight_loader=[LOADER],
        )
        processes = EngineProcesses(1, self._enter)
        layout = processes.layout(ModelSettings(folder=str(folder), has_weights=False, dtype="bfloat16"))
        generator = torch.Generator().manual_seed(1)
        self.weights = {
            name: torch.empty(spec.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, spec in layout.specs.items()
        }
        reshard = reshard_plan(Layout.replicated(specs_of(self.weights), 1), layout)
        self.sync = SharedWeightSync(EDGE, reshard)

        def port(side: Any) -> WeightPort:
            return WeightPort(
                edge=EDGE, side=side, rank=0, reshard=reshard, weight_sync="shared", address=self.sync.address
            )

        self.sender = SharedWeightSync.open_sender(port("send"))
        self.receiver = processes.open_receiver([port("receive")])
        self.fill_s: list[float] = []
        self.check_s: list[float] = []
        self.saved_s: list[float] = []

    def straight(self, round_index: int) -> float:
        for tensor in self.weights.values():
            tensor.mul_(1.01)
        start_s = time.perf_counter()
        finish_reads = self.sender.publish(self.weights, round_index + 1)
        check = self.receiver.receive({}, round_index + 1)
        filled_s = time.perf_counter()
        check()
        end_s = time.perf_counter()
        finish_reads()
        self.fill_s.append(filled_s - start_s)
        self.check_s.append(end_s - filled_s)
        return end_s - start_s

    def flattened_bucket(self, round_index: int) -> float:
        from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
        from sglang.srt.weight_sync.tensor_bucket import (  # pyright: ignore[reportMissingImports]
            FlattenedTensorBucket,
        )

        start_s = time.perf_counter()
        bucket = FlattenedTensorBucket(named_tensors=list(self.weights.items()))
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        payload = MultiprocessingSerializer.serialize(content)
        self._update([payload], "flattened_bucket")
        return time.perf_counter() - start_s

    def from_disk(self, round_index: int) -> float:
        start_s = time.perf_counter()
        save_file(self.weights, self.folder / "model.safetensors", {"format": "pt"})
        saved_s = time.perf_counter()
        _succeeded(self.engine.update_weights_from_disk(str(self.folder), load_format="auto"))
        self.saved_s.append(saved_s - start_s)
        return time.perf_counter() - saved_s

    def _enter(self, ticket: str) -> None:
        self._update([(ticket, torch.empty(0))], LOADER)

    def _update(self, tensors: Any, load_format: str) -> None:
        _succeeded(self.engine.begin_weight_update())
        _succeeded(self.engine.update_weights_from_tensor(tensors, load_format=load_format))
        _succeeded(self.engine.end_weight_update())


def _succeeded(answer: tuple[Any, ...]) -> None:
    assert answer[0], f"SGLang refused: {answer[1]}"


if __name__ == "__main__":
    main()
