"""State that leaves a GPU and comes back, and runs whose workers share one: `python -m benchmarks.throughput.offload`.

    backend MODEL   a trainer's state: seconds and rates beside a flat pinned copy of as many bytes, and memory
    run MODEL       three steps of `rlinf train` on one GPU: each offload and onload with the device's memory around it
    all MODEL       both

MODEL is `small` or `qwen`, the shape of Qwen2.5-0.5B; random weights in float32. Writes offload-backend-MODEL.json and
offload-run-MODEL.json into results/, or into the folder OUT.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS_FOLDER, compare, interleave, report
from torch import Tensor

from rlinf.config.reasoning import ArchitectureConfig
from rlinf.tasks.language import write_model_folder
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launcher.base import Identity
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.training.base import BackendSettings, Evaluation, OptimizerSettings
from rlinf_workers.training.worker import TrainingWorker

GPU = torch.device("cuda", 0)
NUM_STEPS = 3
NUM_ROUNDS = 4
SHAPES = {
    "small": ArchitectureConfig(),
    "qwen": ArchitectureConfig(
        hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2, max_positions=1024
    ),
}
QWEN_VOCABULARY = 151_936
RECIPE = {
    "mode": "collocated",
    "run.num_steps": NUM_STEPS + 1,
    "run.evaluate_every": 1000,
    "run.stop_at_score": "null",
    "cluster.device": "gpu",
    "cluster.num_devices": 1,
    "actor.num_shards": 1,
    "actor.micro_batch_groups": 4,
    "rollout.num_prompts": 32,
    "task.num_held_out": 32,
    "model.architecture": "null",
    "warm_start": "null",
}


def make_folder(model: str, folder: Path) -> None:
    """Config, tokenizer and weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_folder(folder, SHAPES[model], "0123456789 >", "float32")
    if model == "qwen":
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"vocab_size": QWEN_VOCABULARY, "tie_word_embeddings": True}
        path.write_text(json.dumps(config))
    with GPU:
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    made.save_pretrained(folder)


# -- one trainer -------------------------------------------------------------------------------------------------------


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
        self._backend.reduce()
        return self._step(32.0)


def _loss(answers: Evaluation) -> tuple[Tensor, list[float]]:
    return -answers.logprobs.sum(), [1.0]


def measure_backend(model: str, folder: Path) -> None:
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
    _report(f"offload-backend-{model}", {"model": model}, samples_s, comparisons, findings)


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


# -- a run -------------------------------------------------------------------------------------------------------------


def measure_run(model: str, folder: Path) -> None:
    overrides = RECIPE | {"model.path": folder}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "run"
        with _sampled() as samples:
            start_s = time.time()
            _train(output, overrides)
            total_s = time.time() - start_s
        manifest = json.loads((output / "manifest.json").read_text())
        events = json.loads((output / "trace.json").read_text())
        metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    origin_ns = round(manifest["started_s"] * 1e9)
    spans = [event for event in events if event["ph"] == "X"]
    switches = [_switch(event, origin_ns, samples) for event in spans if event["name"] in ("offload", "onload")]
    stages = {event["name"] for event in spans if event["cat"] == "stage"}
    idle = min(used for _, used in samples)
    findings = {
        "steps": len(metrics),
        "seconds": total_s,
        "time": [{key: value for key, value in row["metrics"].items() if key.startswith("time/")} for row in metrics],
        "switches": switches,
        "peak_bytes": max(used for _, used in samples) - idle,
        "peak_bytes_while": {
            stage: max((_most(e, origin_ns, samples) for e in spans if e["name"] == stage), default=idle) - idle
            for stage in sorted(stages)
        },
    }
    print(json.dumps(findings | {"switches": switches[-6:]}, indent=1))
    samples_s = {
        f"{who} {name}": [s["seconds"] for s in switches if (s["worker"], s["name"]) == (who, name)]
        for who, name in sorted({(s["worker"], s["name"]) for s in switches})
    }
    _report(f"offload-run-{model}", {key: str(value) for key, value in RECIPE.items()}, samples_s, [], findings)


def _train(output: Path, overrides: dict[str, Any]) -> None:
    """Stops a run when it has its steps: the last checkpoint is of no interest here."""
    flags = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    entry = "from rlinf.cli.main import entry_point; entry_point()"
    command = [sys.executable, "-c", entry, "train", "sort-grpo", "--output", str(output), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= NUM_STEPS):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate()
    if not metrics.exists():
        raise SystemExit(f"the run has no steps:\n{text}")
    print(text[-1500:])


@contextmanager
def _sampled() -> Iterator[list[tuple[int, int]]]:
    """(Unix time in nanoseconds, bytes of the device in use by anybody), every 10 ms."""
    samples = [(time.time_ns(), _used_bytes())]
    ends = threading.Event()

    def sample() -> None:
        while not ends.wait(0.01):
            samples.append((time.time_ns(), _used_bytes()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ends.set()
        thread.join()


def _switch(event: dict[str, Any], origin_ns: int, samples: list[tuple[int, int]]) -> dict[str, Any]:
    start_ns = origin_ns + event["ts"] * 1000
    end_ns = start_ns + event["dur"] * 1000
    before = [used for at, used in samples if at <= start_ns]
    after = [used for at, used in samples if at >= end_ns]
    change = after[0] - before[-1] if before and after else 0
    return {
        "name": event["name"],
        "worker": event["args"].get("worker"),
        "step": event["args"].get("step"),
        "seconds": event["dur"] / 1e6,
        "device_bytes": change,
    }


def _most(event: dict[str, Any], origin_ns: int, samples: list[tuple[int, int]]) -> int:
    start_ns = origin_ns + event["ts"] * 1000
    return max((used for at, used in samples if 0 <= at - start_ns <= event["dur"] * 1000), default=0)


def _report(name: str, settings: dict[str, Any], samples_s: Any, comparisons: Any, findings: dict[str, Any]) -> None:
    output = Path(os.environ.get("OUT", RESULTS_FOLDER)) / f"{name}.json"
    settings |= {"device": torch.cuda.get_device_name(GPU)}
    report(name, settings=settings, samples_s=samples_s, comparisons=comparisons, findings=findings, output=output)


def main() -> None:
    what, model = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        make_folder(model, Path(scratch))
        if what in ("backend", "all"):
            measure_backend(model, Path(scratch))
        gc.collect()
        torch.cuda.empty_cache()
        if what in ("run", "all"):
            measure_run(model, Path(scratch))


if __name__ == "__main__":
    main()
