"""A long run of tiny steps, watched for what grows: `python soaked_run.py STEPS [overrides]`, for tools/soak.sh and
test_soak.py.

Every second the driver and each of its workers are looked at. After a warm-up (a tenth of the steps, at least 100) the
medians of the first and the last fifth are compared: resident memory may grow by 1 %, descriptors, threads and shared
segments not at all. Step times are reported and not judged: they need a quiet machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from command_line import TINY_SORT, all_gone, command, environment, worker_processes
from process_resources import Before, ProcessResources, processes_below, resources_of

RECIPE = "sort-grpo"
EVERY_STEPS = 100
"""Between two evaluations, and between two checkpoints: many of both are part of it."""
TRACE_MEGABYTES = 1
"""So that trace.json is full, and shortened for the first time, within the warm-up: that takes room, once."""
PERIOD_S = 1.0
MIN_WARM_UP_STEPS = 100
MAX_GROWTH = 0.01
"""Of resident memory, between the medians of the first and the last fifth after the warm-up."""
MIN_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """What the processes of the run held when so many steps were done."""

    steps_done: int
    held: Mapping[str, ProcessResources]
    """By the worker's name, or `driver`."""


def main(num_steps: int, overrides: Sequence[str]) -> int:
    """Runs, prints what was found as JSON; 0 where nothing grew and nothing was left."""
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        report = soak(Path(scratch), num_steps, overrides)
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


def soak(scratch: Path, num_steps: int, overrides: Sequence[str] = ()) -> dict:
    """What a run of so many steps held, and what of that is wrong."""
    output, before = scratch / "run", Before.now(scratch / "tmp")
    settings = TINY_SORT | {
        "run.num_steps": num_steps,
        "run.evaluate_every": EVERY_STEPS,
        "run.checkpoint_every": EVERY_STEPS,
        "run.trace_megabytes": TRACE_MEGABYTES,
    }
    with (scratch / "said").open("w") as log:
        process = subprocess.Popen(
            [*command(RECIPE, output, settings), *overrides],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment() | {"TMPDIR": str(before.temporary)},
        )
        samples, names = watch(process, output)
    steps_s = step_times(output)
    problems = judge(samples, num_steps)
    if process.returncode != 0 or len(steps_s) != num_steps:
        last = (scratch / "said").read_text()[-2000:]
        problems.append(f"the run ended with {process.returncode} after {len(steps_s)} steps: {last}")
    all_gone(names)
    problems += [f"left behind: {what}" for what in (*before.left(names), *before.folders())]
    return {"steps": len(steps_s), "step_times": compared(steps_s), "held": table(samples), "problems": problems}


def watch(process: subprocess.Popen, output: Path) -> tuple[list[Sample], dict[int, str]]:
    """Samples until the run ends, and the names of all processes that it ever had."""
    samples: list[Sample] = []
    names: dict[int, str] = {}
    metrics, seen_bytes, steps_done = output / "metrics.jsonl", 0, 0
    while process.poll() is None:
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(seen_bytes)
                new = file.read()
            seen_bytes, steps_done = seen_bytes + len(new), steps_done + new.count(b"\n")
        workers = {pid: name for name, pid in worker_processes(output).items()}
        names |= dict.fromkeys(processes_below(process.pid), "beside the workers") | workers
        watched = {process.pid: "driver"} | workers
        samples.append(Sample(steps_done, {n: held for pid, n in watched.items() if (held := resources_of(pid))}))
        print(f"\r{steps_done} steps", end="", file=sys.stderr, flush=True)
        time.sleep(PERIOD_S)
    return samples, names


def judge(samples: Sequence[Sample], num_steps: int) -> list[str]:
    """What has grown, a sentence each."""
    warm = warm_samples(samples, num_steps)
    if len(warm) < MIN_SAMPLES:
        return [f"only {len(warm)} samples after the warm-up, and {MIN_SAMPLES} are needed: take more steps"]
    problems = []
    for name in warm[-1].held:
        for field in fields(ProcessResources):
            first, last = ends(warm, name, field.name)
            allowed = first * (1 + MAX_GROWTH) if field.name == "rss_bytes" else first
            if last > allowed:
                problems.append(f"{name}: {field.name} grew from {first:,.0f} to {last:,.0f} ({last / first - 1:+.2%})")
    return problems


def warm_samples(samples: Sequence[Sample], num_steps: int) -> list[Sample]:
    """Those after the warm-up in which every worker is there."""
    warm_up = max(num_steps // 10, MIN_WARM_UP_STEPS)
    all_workers = set().union(*(sample.held for sample in samples))
    return [
        sample for sample in samples if warm_up <= sample.steps_done < num_steps and set(sample.held) == all_workers
    ]


def ends(warm: Sequence[Sample], name: str, field: str) -> tuple[float, float]:
    """The medians of the first and the last fifth."""
    values = [getattr(sample.held[name], field) for sample in warm]
    fifth = max(len(values) // 5, 1)
    return statistics.median(values[:fifth]), statistics.median(values[-fifth:])


def table(samples: Sequence[Sample]) -> dict[str, dict[str, list[float]]]:
    """Process -> what it holds -> the medians of ten equal parts of the samples in which it is there."""
    medians = {}
    for name in sorted(set().union(*(sample.held for sample in samples))):
        mine = [sample.held[name] for sample in samples if name in sample.held]
        parts = [mine[len(mine) * part // 10 : len(mine) * (part + 1) // 10] for part in range(10)]
        medians[name] = {
            field.name: [statistics.median(getattr(held, field.name) for held in part) for part in parts if part]
            for field in fields(ProcessResources)
        }
    return medians


def step_times(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
    return [json.loads(line)["metrics"]["time/step_s"] for line in lines]


def compared(steps_s: Sequence[float]) -> dict[str, float]:
    """The medians of the first and the last tenth after the warm-up, and their ratio."""
    warm = steps_s[max(len(steps_s) // 10, MIN_WARM_UP_STEPS) :]
    if not warm:
        return {}
    tenth = max(len(warm) // 9, 1)
    first_s, last_s = statistics.median(warm[:tenth]), statistics.median(warm[-tenth:])
    return {"first_s": first_s, "last_s": last_s, "ratio": last_s / first_s}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
