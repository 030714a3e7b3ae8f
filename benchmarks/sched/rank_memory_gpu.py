"""Peak bytes of one rank on a GPU beside what `rlinf_sched.derive.memory` counts: results/rank-memory-gpu.json.

    python benchmarks/sched/rank_memory_gpu.py [--output FILE] [--device cpu:0] [PATTERN]

A model of Qwen2.5-0.5B's shape with random weights, trained by each backend with one rank, all cases at once on one GPU
in processes of their own. Measured is what torch's allocator had handed out at most during two updates, above what the
process had of it before its model (`torch.cuda.max_memory_allocated`); the context of a process, about half a GiB, and
what the allocator keeps for later are not in it. PATTERN chooses cases by a part of their name. On a CPU the script
itself is tried, with nothing measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_cases import Case, backend_of, count, gpu_cases, make_folder, update, warm_up

from rlinf_workers import Worker
from rlinf_workers.launchers import Identity, LocalLauncher, WorkerSpec
from rlinf_workers.models import ModelSettings
from rlinf_workers.testing.launchers import launched

RESULT = Path(__file__).parents[1] / "results" / "rank-memory-gpu.json"
TIMEOUT_S = 300.0
NUM_AT_ONCE = 4
NUM_THREADS = 4


class Measured(Worker):
    """A rank that trains a case and says what it took."""

    def measure(self, described: dict[str, Any], folder: str) -> dict[str, int]:
        """Bytes of the device at the peak, and between two updates."""
        case, on_gpu = Case(**described), self.device.type == "cuda"
        warm_up(case, self.device)
        gc.collect()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        backend = backend_of(case, ModelSettings(folder=folder, has_weights=False, dtype=case.dtype), self)
        backend.onload()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            update(case, backend, self.device)
        if not on_gpu:
            return {"peak": 1, "state": 1, "reserved": 1}
        torch.cuda.synchronize()
        return {
            "peak": torch.cuda.max_memory_allocated() - before,
            "state": torch.cuda.memory_allocated() - before,
            "reserved": torch.cuda.max_memory_reserved(),
        }


def run(folder: Path, device: str, case: Case) -> dict[str, Any]:
    """One case in a process of its own."""
    own = Path(tempfile.mkdtemp(dir=folder))
    identity = Identity(role="actor", rank=0, num_ranks=1, devices=(device,), rendezvous=str(own / "rendezvous"))
    spec = WorkerSpec(
        identity=identity,
        worker_class=Measured,
        log_path=own / "log",
        env_vars={"OMP_NUM_THREADS": str(NUM_THREADS)},
    )
    try:
        with launched(LocalLauncher) as launcher:
            measured = launcher.start(spec).call("measure", asdict(case), str(folder / case.model)).result(TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - one case that fails leaves the others alone, and is said
        return {"case": asdict(case), "error": str(error)[-2000:]}
    counted = count(case, str(folder / case.model), on_gpu=True)
    return {
        "case": asdict(case),
        "counted_bytes": counted.peak(),
        "of_it": counted.parts(),
        "peak_bytes": measured["peak"],
        "reserved_bytes": measured["reserved"],
        "state_bytes": {"counted": counted.state, "measured": measured["state"]},
        "counted_over_peak": round(counted.peak() / measured["peak"], 3),
    }


def main() -> None:
    """Measures what the command line names, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("pattern", nargs="?", default="")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "none"
    rows = json.loads(options.output.read_text())["cases"] if options.output.exists() else {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        chosen = [case for case in gpu_cases() if options.pattern in case.name]
        for model in {case.model for case in chosen}:
            make_folder(model, f"{scratch}/{model}")
        for case, row in zip(chosen, threads.map(partial(run, Path(scratch), options.device), chosen), strict=True):
            rows[case.name] = row
            print(f"{case.name:70} {described(row)}", flush=True)
            options.output.write_text(
                json.dumps({"torch": torch.__version__, "device": name, "cases": rows}, indent=1) + "\n"
            )


def described(row: dict[str, Any]) -> str:
    """A result as a line for people."""
    if "error" in row:
        return row["error"]
    sizes = [row["counted_bytes"], row["peak_bytes"], *row["state_bytes"].values(), row["reserved_bytes"]]
    counted, peak, *state, reserved = (f"{size / 2**20:,.0f}" for size in sizes)
    ratio = f"{row['counted_over_peak']:.3f}"
    return f"counted {counted} MiB, measured {peak}, ratio {ratio}; state {state[0]} / {state[1]}; reserved {reserved}"


def _begin() -> None:
    """Lets every process find this module."""
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    subprocess.run([sys.executable, "-c", "import rank_memory_gpu; rank_memory_gpu.main()", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    _begin()
