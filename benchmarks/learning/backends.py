"""Training under `fsdp2` beside training under `replicated`, from one checkpoint: benchmarks/results/backends.json.

    python benchmarks/learning/backends.py

A run of `sort-grpo` under `replicated` leaves a checkpoint. Copies of it go on for 20 steps of GRPO on two CPU slots,
under `replicated`, under `fsdp2`, and with two ranks that share packed rows under either; so do copies of a run that
`fsdp2` trained.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlinf_workers.models.weight_files import WeightFiles

RESULT = Path(__file__).parents[1] / "results" / "backends.json"
NUM_STEPS, NUM_BEFORE = 20, 2
SHORT = {
    "mode": "collocated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
    "task.num_digits": 3,
    "task.num_held_out": 64,
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_layers": 2,
    "sft_warm_up.max_steps": 40,
    "sft_warm_up.check_every": 40,
    "sft_warm_up.batch_size": 64,
    "sft_warm_up.reuse": "false",
    "rollout.num_prompts": 16,
    "rollout.max_new_tokens": 4,
    "actor.max_tokens_per_micro_batch": 64,
    "run.num_steps": NUM_BEFORE,
    "run.evaluate_every": 1000,
    "run.checkpoint_every": NUM_STEPS + NUM_BEFORE,
    "run.stop_at_score": "null",
}
SHARING = {"actor.backend_options.sequence_parallel": 2}
WAYS = {
    "replicated": {},
    "fsdp2": {"actor.backend": "fsdp2"},
    "replicated, rows shared": SHARING,
    "fsdp2, rows shared": {"actor.backend": "fsdp2", **SHARING},
}
"""The first is compared with the others."""


def train(recipe: str | None, output: Path, overrides: dict[str, object]) -> None:
    flags = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    command = [str(Path(sys.executable).with_name("rlinf")), "train", *([recipe] if recipe else ["--resume"])]
    subprocess.run(
        [*command, "--output", str(output), *flags],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def metrics(run: Path, name: str) -> list[float]:
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[f"actor/{name}"] for row in rows[NUM_BEFORE:]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(run / f"checkpoints/step-{NUM_STEPS + NUM_BEFORE:06}/model")
    return {name: files.read(name).clone() for name in files.specs}


def relative(actual: float, expected: float) -> float:
    return abs(actual - expected) / max(abs(expected), 1e-30) if actual != expected else 0.0


def compare(first: str, folder: Path) -> dict[str, dict[str, float]]:
    """The largest differences of each way from a checkpoint that `first` wrote, relative to `replicated`."""
    train("sort-grpo", folder / "first", {**SHORT, "actor.backend": first})
    for name, changes in WAYS.items():
        shutil.copytree(folder / "first", folder / name, symlinks=True)
        train(None, folder / name, {"actor.backend": "replicated", **changes, "run.num_steps": NUM_STEPS + NUM_BEFORE})
    one, *others = (folder / name for name in WAYS)
    return {other.name: differences(other, one) for other in others}


def differences(run: Path, other: Path) -> dict[str, float]:
    expected, actual = weights(other), weights(run)
    found_rows = {
        name: list(zip(metrics(run, name), metrics(other, name), strict=True)) for name in ("loss", "grad_norm")
    }
    return {
        "loss": max(relative(*pair) for pair in found_rows["loss"]),
        "grad_norm": max(relative(*pair) for pair in found_rows["grad_norm"]),
        "first_loss": relative(*found_rows["loss"][0]),
        "first_grad_norm": relative(*found_rows["grad_norm"][0]),
        "largest_grad_norm": max(pair[1] for pair in found_rows["grad_norm"]),
        "weights": max(
            float((actual[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()
        ),
    }


def main() -> None:
    cases: dict[str, dict[str, dict[str, float]]] = {}
    for first in ("replicated", "fsdp2"):
        with tempfile.TemporaryDirectory() as folder:
            cases[first] = compare(first, Path(folder))
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    result = {"made": time.strftime("%Y-%m-%d"), "machine": machine, "num_steps": NUM_STEPS, "from": cases}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
