"""How long training waits for a checkpoint: benchmarks/results/checkpoints.json.

    python -m benchmarks.throughput.checkpoints

A model of 300 MB in float32 and its moments, 900 MB in all, on one rank. Three ways take turns:

    inside the call    the safetensors library writes, then the files are read for their digests; training waits
    sealed by writers  RLinf's writer, which digests what it writes; training waits for it to end
    in the background  the same, and training waits for the copy alone, while it computes on
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from benchmarks.harness import compare, interleave, report
from torch import Tensor, nn

from rlinf.loop.checkpoint_writer import CheckpointWriter
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checkpoints import writing_with_checksums
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.trainers import ModelAdapter, ModelOutputs, OptimizerSettings, ReplicatedBackend
from rlinf_workers.trainers.checkpoint import CheckpointFiles, optimizer_tensors

NUM_LAYERS, WIDTH = 18, 2041
"""75.0 million parameters."""


class Layers(ModelAdapter):
    def build(self, device: torch.device) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).to(device)

    def answers(self, model: Any, batch: Tensor, *, entropies: bool) -> ModelOutputs:
        return ModelOutputs(values=model(batch)[:, 0])


class OneRank:
    """A worker group of this process, as `CheckpointWriter` calls it."""

    def __init__(self, backend: ReplicatedBackend) -> None:
        self._backend, self._threads = backend, ThreadPoolExecutor(1)

    def call(self, method: str, folder: str) -> None:
        self._files = CheckpointFiles(self._backend._worker, folder)
        self._files.add_model(self._backend, "model")
        self._files.add_optimizer(self._backend)
        self._files.start()

    def start_call(self, method: str, lane: int) -> list[Future[dict[str, str]]]:
        return [self._threads.submit(self._files.wait)]


def trained() -> ReplicatedBackend:
    """After one step, so that there are moments."""
    settings = OptimizerSettings(learning_rate=1e-4)
    backend = ReplicatedBackend(Layers(), trial_worker(), optimizer=settings, num_shards=1)
    backend.begin(0)
    backend.backward(0, torch.ones(1, WIDTH), lambda answers: (answers.values.sum(), []))
    backend.finish_backward()
    backend.step(1.0)
    return backend


class Sides:
    def __init__(self, folder: Path) -> None:
        self._backend = trained()
        self._ranks = cast(Any, OneRank(self._backend))
        self._path = folder
        self._run = RunFolder(folder / "run", config_yaml="", command=[], keep_checkpoints=1)
        self._writer = CheckpointWriter(self._run, print)
        self._steps = 0

    def inside(self, _: int) -> float:
        began_s = time.perf_counter()
        with writing_with_checksums(self._path / "inside", {}) as partial:
            (partial / "model").mkdir()
            safetensors.torch.save_file(dict(self._backend.weights()), partial / "model" / "model.safetensors")
            moments = optimizer_tensors(self._backend._optimizer, self._backend._model)
            safetensors.torch.save_file(moments, partial / "optimizer.safetensors")
        seconds = time.perf_counter() - began_s
        shutil.rmtree(self._path / "inside")
        return seconds

    def sealed(self, _: int) -> float:
        began_s = time.perf_counter()
        self._save()
        self._writer.wait()
        return time.perf_counter() - began_s

    def background(self, _: int) -> float:
        """Seconds that training waited; the processor computes until the checkpoint is whole."""
        self._save()
        waiting = threading.Thread(target=self._writer.wait)
        waiting.start()
        while waiting.is_alive():
            self._backend.forward(torch.ones(16, WIDTH))
        return self._writer.take_times()["time/checkpoint_wait_s"]

    def _save(self) -> None:
        self._steps += 1
        self._writer.save(self._ranks, self._steps, {"own_score": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(Path(folder))
        ways = {"inside": sides.inside, "sealed": sides.sealed, "background": sides.background}
        samples_s = interleave(ways, num_warmup=1, num_rounds=args.rounds)
    ratios = [compare(samples_s, "background", other) for other in ("inside", "sealed")]
    num_bytes = sum(parameter.nbytes for parameter in sides._backend._model.parameters())
    report(
        "checkpoints",
        settings={"model_bytes": num_bytes, "num_rounds": args.rounds},
        samples_s=samples_s,
        comparisons=ratios,
        findings={},
        output=args.output,
    )


if __name__ == "__main__":
    main()
