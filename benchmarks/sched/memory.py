"""Peak memory of real workers beside what `rlinf.planning.memory` counts, on CPU slots: benchmarks/results/memory.json.

    python benchmarks/sched/memory.py

A worker's peak is its VmHWM (kernel, proc(5)); the least that a worker takes is that of the reward worker, which has no
model. Two shapes: one whose layers dominate, one whose words do.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.planning.memory import NUM_STORED, PROCESS_BYTES, rank_memory, replicated_job, shape_of

RESULT = Path(__file__).parents[1] / "results" / "memory.json"
POLL_S = 0.1
COMMON = {
    "mode": "collocated",
    "cluster.num_devices": 1,
    "run.num_steps": 2,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 9,
    "task.num_held_out": 8,
    "warm_start": "null",
    "algorithm.kl_coef": 0.01,
    "rollout.num_prompts": 16,
    "actor.micro_batch_groups": 4,
    "rollout.max_new_tokens": 9,
}
"""Untrained models answer at random, so completions end early or not; the limit is what is counted."""
LAYERS = {"hidden_size": 768, "intermediate_size": 2048, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4}
CASES = {
    "layers": LAYERS,
    "long": {"hidden_size": 256, "intermediate_size": 1024, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2},
}
MORE = {
    "layers": {},
    "long": {"rollout.max_new_tokens": 120, "rollout.max_prompt_tokens": 120, "model.architecture.max_positions": 256},
}


def measure(overrides: list[str]) -> dict[str, int]:
    """Worker -> its VmHWM in bytes, of a short run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-c", "from rlinf.cli.main import entry_point; entry_point()", "train", "sort-grpo"]
        process = subprocess.Popen([*command, "--output", str(folder), *overrides], stdout=subprocess.DEVNULL)
        peaks: dict[str, int] = {}
        while process.poll() is None:
            for worker, pid in _workers(folder):
                peaks[worker] = max(peaks.get(worker, 0), _peak_bytes(pid))
            time.sleep(POLL_S)
        assert process.returncode == 0, f"rlinf train ended with {process.returncode}"
        return peaks


def _workers(folder: Path) -> list[tuple[str, int]]:
    found = []
    for log in (folder / "logs").glob("*/*.log"):
        first = log.read_text().partition("\n")[0]
        if "process " in first:
            found.append((log.parent.name, int(first.partition("process ")[2].partition(",")[0])))
    return found


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def case(name: str) -> dict[str, object]:
    architecture = {f"model.architecture.{key}": value for key, value in CASES[name].items()}
    overrides = [f"--{key}={value}" for key, value in {**COMMON, **architecture, **MORE[name]}.items()]
    config = load_config("sort-grpo", parse_overrides(overrides))
    assert isinstance(config, ReasoningConfig), "the recipe's job"
    shape = shape_of(config, 13)
    assert shape is not None
    job = replicated_job(config)
    counted = rank_memory(shape, job, {"actor": 1}, has_reference=True)
    measured = measure(overrides)
    rows = {}
    for worker, memory in counted.items():
        stored = 0 if worker == "reference" else NUM_STORED * counted["rollout"].weights  # mapped, so it is resident
        predicted = PROCESS_BYTES + memory.peak(job.num_groups) + stored
        rows[worker] = {
            "measured_bytes": measured[worker],
            "counted_bytes": predicted,
            "of_it": {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer},
            "ratio": round(predicted / measured[worker], 3),
        }
    return {
        "num_parameters": shape.num_parameters,
        "workers": rows,
        "process_bytes": measured["reward"],
        "overrides": overrides,
    }


def main() -> None:
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cases": {name: case(name) for name in CASES},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in result["cases"].items():
        for worker, row in found["workers"].items():
            print(f"{name:8} {worker:10} counted {row['counted_bytes'] / 2**20:8.0f} MiB, measured", end=" ")
            print(f"{row['measured_bytes'] / 2**20:8.0f} MiB, ratio {row['ratio']}")


if __name__ == "__main__":
    main()
