"""State that leaves a GPU and comes back: `python -m benchmarks.throughput.offload MODEL`.

A trainer's weights and moments go to host memory and back, beside a flat pinned copy of as many bytes. MODEL is `small`
or `qwen`, the shape of Qwen2.5-0.5B and the default; weights are random. Writes results/offload-backend-MODEL.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from torch import Tensor

from rlinf.config.reasoning import ArchitectureConfig
from rlinf.tasks.language import write_model_folder
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers import Identity
from rlinf_workers.models import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.trainers import BackendSettings, ModelOutputs, OptimizerSettings
from rlinf_workers.trainers.worker import TrainingWorker

GPU = torch.device("cuda", 0)
NUM_ROUNDS = 4
SHAPES = {
    "small": ArchitectureConfig(),
    "qwen": ArchitectureConfig(
        hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2, max_positions=1024
    ),
}
QWEN_VOCABULARY = 151_936


def make_folder(model: str, folder: Path) -> None:
    """Config, tokenizer and weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_folder(folder, SHAPES[model], "0123456789 >", "float32")
    if model == "qwen":
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"vocab_size": QWEN_VOCABULARY, "tie_word_embeddings": True}
        path.write_text(json.dumps(config))
    with GPU:
        language_model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.float32
        )
    language_model.save_pretrained(folder)


class Trainer(TrainingWorker):
    """A policy that has taken a step, so that its moments are there."""

    def __init__(self, folder: str) -> None:
        model = TokenModel(ModelSettings(folder=folder, has_weights=True), 1.0)
        self._backends = {"": BackendSettings().make(model, self, OptimizerSettings(learning_rate=1e-4))}

    def update(self) -> float:
        """Returns the norm of the gradient."""
        ids = 3 + torch.arange(32).reshape(2, 16) % 9  # 0 is padding, of which a norm has no gradient
        batch = SequenceBatch(
            prompt_ids=ids[:1], prompt_mask=torch.ones_like(ids[:1]), completion_ids=ids, loss_mask=torch.ones(2, 16)
        )
        self._backend.begin(1)
        self._backend.backward(0, batch.to(self.device), _loss)
        self._backend.finish_backward()
        return self._step(32.0)


def _loss(answers: ModelOutputs) -> tuple[Tensor, list[float]]:
    return -answers.logprobs.sum(), [1.0]


def measure(model: str, folder: Path) -> None:
    host = WorkerHost(Identity(role="actor", rank=0, num_ranks=1, devices=("cuda:0",)), lambda *_, **__: Future())
    trainer = host.make(Trainer, str(folder))
    first_onload_s = _seconds(host.load)
    trainer.update()
    gc.collect()
    allocated, used, resident = torch.cuda.memory_allocated(), _used_bytes(), _resident_bytes()
    first_offload_s = _seconds(host.unload)
    left = {"allocated": torch.cuda.memory_allocated(), "used": _used_bytes()}
    pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    host.load()
    norm = trainer.update()
    moved = sum(tensor.numel() * tensor.element_size() for tensor in _moved(trainer))
    flat = torch.empty(moved, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(moved, dtype=torch.uint8, device=GPU)
    samples_s = interleave(
        {
            "offload": lambda _: _seconds(host.unload),
            "onload": lambda _: _seconds(host.load),
            "flat copy to the host": lambda _: _seconds(lambda: flat.copy_(on_gpu)),
            "flat copy to the device": lambda _: _seconds(lambda: on_gpu.copy_(flat)),
        },
        num_warmup=1,
        num_rounds=NUM_ROUNDS,
    )
    rates = {name: round(moved / min(seconds) / 1e9, 2) for name, seconds in samples_s.items()}
    findings = {
        "moved_bytes": moved,
        "gb_per_s": rates,
        "first_onload_s": first_onload_s,
        "first_offload_s": first_offload_s,
        "allocated_bytes": {"before": allocated, "after": left["allocated"]},
        "device_used_bytes": {"before": used, "after": left["used"]},
        "resident_bytes": {"before": resident, "after_moving": _resident_bytes()},
        "pinned_bytes": {key: value for key, value in pinned.items() if key.endswith(("bytes.current", "bytes.peak"))},
        "grad_norm_after": [norm, trainer.update()],
    }
    print(json.dumps(findings, indent=1))
    comparisons = [
        compare(samples_s, "offload", "flat copy to the host"),
        compare(samples_s, "onload", "flat copy to the device"),
    ]
    settings = {"model": model, "device": torch.cuda.get_device_name(GPU)}
    name = f"offload-backend-{model}"
    report(name, settings=settings, samples_s=samples_s, comparisons=comparisons, findings=findings)


def _moved(trainer: Trainer) -> Iterator[Tensor]:
    """Parameters, and both moments of each."""
    parameters: Any = trainer._backend.on_model(lambda model: list(model.parameters()))
    for parameter in parameters:
        yield from (parameter, parameter, parameter)


def _seconds(do: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    do()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "qwen"
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(model, Path(scratch))
        measure(model, Path(scratch))


if __name__ == "__main__":
    main()
