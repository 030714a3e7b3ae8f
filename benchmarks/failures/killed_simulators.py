"""Whether a run notices that its simulators are killed or hang: `python -m benchmarks.failures.killed_simulators`.

The same job runs twice. In the second run simulators, chosen by chance, are killed (SIGKILL) or stopped (SIGSTOP, which
looks like a hang) in turn at 50 moments chosen by chance, each after the run has done another step since the loss
before (three losses in a row at one place would end it). Every metric that is no time has to be the same to the bit,
and the manifest has to name each loss.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from benchmarks.harness import report

NUM_LOSSES = 50
SETTINGS = {
    "env.kind": "gymnasium",
    "env.id": "Pendulum-v1",
    "env.options": "{}",
    "env.num_envs": "4",
    "env.num_groups": "2",
    "env.num_processes": "1",
    "env.hang_limit_s": "2",
    "env.num_eval_episodes": "8",
    "cluster.num_devices": "1",
    "cluster.device": "cpu",
    "mode": "collocated",
    "run.evaluate_every": "20",
    "run.checkpoint_every": "1000",
    "run.stop_at_score": "null",
}
NUM_STEPS = "200"
WAITS_S = (0.0, 0.5)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="killed-simulators-") as scratch:
        began_s = time.monotonic()
        untouched, _ = _run(Path(scratch) / "untouched", 0)
        middle_s = time.monotonic()
        disturbed, losses = _run(Path(scratch) / "disturbed", NUM_LOSSES)
        ended_s = time.monotonic()
        notes = json.loads((Path(scratch) / "disturbed" / "manifest.json").read_text()).get("notes", [])
    replaced = [note for note in notes if "begun again in a new process" in note]
    report(
        "killed-simulators",
        settings={"recipe": "pushcube-ppo", "run.num_steps": NUM_STEPS} | SETTINGS,
        samples_s={"untouched run": [middle_s - began_s], "run with losses": [ended_s - middle_s]},
        comparisons=[],
        findings={
            "losses": losses,
            "num_killed": sum(loss["signal"] == "SIGKILL" for loss in losses),
            "num_stopped": sum(loss["signal"] == "SIGSTOP" for loss in losses),
            "num_replacements_in_manifest": len(replaced),
            "losses_without_a_line": [x["pid"] for x in losses if not any(f"(pid {x['pid']})" in n for n in replaced)],
            "rows_of_metrics": [len(untouched), len(disturbed)],
            "metrics_are_equal": untouched == disturbed,
            "metrics": sorted(untouched[0]),
            "example": replaced[0] if replaced else None,
        },
    )


def _run(output: Path, num_losses: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics of a run, times left out, and what was done to it."""
    flags = [part for key, value in SETTINGS.items() for part in (f"--{key}", value)]
    program = str(Path(sys.executable).with_name("rlinf"))
    with (output.parent / f"{output.name}.log").open("w+") as log:
        process = subprocess.Popen(
            [program, "train", "pushcube-ppo", "--output", str(output), "--run.num_steps", NUM_STEPS, *flags],
            stdout=log,
            stderr=log,
        )
        losses = _lose(process, output, num_losses)
        if process.wait() != 0:
            log.seek(0)
            raise SystemExit(f"the run of {output.name} failed after {len(losses)} losses:\n{log.read()[-4000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [row["metrics"] for row in rows]
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))} for row in metrics
    ], losses


def _lose(process: subprocess.Popen, output: Path, num_losses: int) -> list[dict[str, Any]]:
    """Kills or stops simulators of a run that has begun, until that many are lost or the run has ended."""
    chance, losses = random.Random(0), []
    metrics = output / "metrics.jsonl"
    while num_losses and not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            return losses
        time.sleep(0.1)
    began_s = time.monotonic()
    size = 0
    while len(losses) < num_losses and process.poll() is None:
        if metrics.stat().st_size == size:
            time.sleep(0.02)
            continue
        size = metrics.stat().st_size
        time.sleep(chance.uniform(*WAITS_S))
        if not (living := sorted(_simulators(process.pid))):
            continue
        chosen = chance.choice(living)
        how = signal.SIGKILL if len(losses) % 2 == 0 else signal.SIGSTOP
        os.kill(chosen, how)
        losses.append({"after_s": round(time.monotonic() - began_s, 3), "pid": chosen, "signal": how.name})
        size = metrics.stat().st_size  # steps that ended while this one was awaited do not count
    return losses


def _simulators(driver: int) -> list[int]:
    """Those that live, and are not lost already."""
    pids = []
    for child in psutil.Process(driver).children(recursive=True):
        try:
            if any("subprocess_child" in part for part in child.cmdline()) and child.status() != "stopped":
                pids.append(child.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return pids


if __name__ == "__main__":
    main()
