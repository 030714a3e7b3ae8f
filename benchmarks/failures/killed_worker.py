"""How long a run that replaces no workers goes on after one was killed.

python -m benchmarks.failures.killed_worker
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import report

VICTIMS = ("rollout/0", "reward/0", "actor/1")


def main() -> None:
    samples_s = {victim: [_seconds_to_end(victim) for _ in range(2)] for victim in VICTIMS}
    report("killed-worker", settings={"recipe": "sort-grpo"}, samples_s=samples_s, comparisons=[], findings={})


def _seconds_to_end(victim: str) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "run"
        command = ["rlinf", "train", "sort-grpo", "--output", str(output), "--sft_warm_up", "null"]
        command += ["--run.on_failure", "stop"]
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        metrics = output / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.05)
        first_line = (output / "logs" / f"{victim}.log").read_text().split("\n", 1)[0]
        os.kill(int(first_line.split("process ")[1].split(",")[0]), signal.SIGKILL)
        killed_s = time.monotonic()
        assert process.wait() == 1, "a run that lost a worker ends with 1"
        return time.monotonic() - killed_s


if __name__ == "__main__":
    main()
