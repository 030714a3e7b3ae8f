"""How long a run goes on after a process of its engine was killed: `python -m benchmarks.failures.killed_engine`.

It runs in an environment that has SGLang. The scheduler process dies, not the worker beside it, at five moments of a
step: while prompts are answered, while the actor trains, around a sync. Then nothing may be left: processes, shared
memory, folders and sockets.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from benchmarks.harness import report

SETTINGS = {
    "rollout.engine": "sglang",
    "cluster.num_devices": "1",
    "mode": "collocated",
    "sft_warm_up": "null",
    "run.num_steps": "500",
    "run.evaluate_every": "500",
    "run.on_failure": "stop",
}
SHARE_OF_STEP = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the time that a step takes: when the process is killed, after one that has ended."""
GONE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")


def main() -> None:
    kills = [_kill(share) for share in SHARE_OF_STEP]
    report(
        "killed-engine",
        settings={"recipe": "sort-grpo"} | SETTINGS,
        samples_s={"until the run has ended": [kill.pop("seconds") for kill in kills]},
        comparisons=[],
        findings={"kills": kills},
    )


def _kill(share: float) -> dict:
    before = set(SHARED_MEMORY.iterdir())
    with tempfile.TemporaryDirectory(prefix="killed-engine-") as scratch:
        output, temporary = Path(scratch) / "run", Path(scratch) / "tmp"
        temporary.mkdir()
        flags = [part for key, value in SETTINGS.items() for part in (f"--{key}", value)]
        program = str(Path(sys.executable).with_name("rlinf"))
        process = subprocess.Popen(
            [program, "train", "sort-grpo", "--output", str(output), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        second, third = (_steps_done(output, number, process) for number in (2, 3))
        time.sleep(share * (third - second))
        family = psutil.Process(process.pid).children(recursive=True)
        (scheduler,) = [one for one in family if one.name().startswith("sglang::sche")]
        killed_s = time.monotonic()
        os.kill(scheduler.pid, signal.SIGKILL)
        _, errors = process.communicate()
        seconds = time.monotonic() - killed_s
        _, left = psutil.wait_procs(family, timeout=GONE_S)
        files = [*temporary.iterdir(), *sorted(set(SHARED_MEMORY.iterdir()) - before)]
    return {
        "seconds": seconds,
        "share_of_a_step": share,
        "exit_code": process.returncode,
        "says": next((line for line in errors.splitlines() if line.startswith("error: ")), ""),
        "names_it": f"(pid {scheduler.pid}) ended with signal 9" in errors,
        "processes_left": [one.pid for one in left],
        "files_left": [str(path) for path in files],
    }


def _steps_done(output: Path, number: int, process: subprocess.Popen) -> float:
    """When that many steps had ended."""
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= number):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return time.monotonic()


if __name__ == "__main__":
    main()
