"""Whole runs that are killed while they save (SIGKILL): `python killed_runs.py FOLDER NUMBER`, for test_checkpoints.py.

A run saves after every step. The driver and a rank that writes are killed in turn, at a random moment of a save or
right after it (going by how long the one before took). Each time all checkpoints are read and the run is resumed. A
line of JSON for each kill says what was found: who was killed, whether a save was under way, what is wrong with which
checkpoint, which step was newest and from which the run went on, and what temporary names of that moment were still
there when the resumed run had saved again.
"""

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from command_line import END_TIMEOUT_S, SHORT_SORT, all_gone, start, train, wait_for, worker_processes
from rlinf.run_folder.checksums import damage

OFTEN = {
    "mode": "collocated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": True,
    "model.architecture.hidden_size": 256,
    "model.architecture.intermediate_size": 1024,
    "model.architecture.num_layers": 6,
    "run.num_steps": 100_000,
    "run.evaluate_every": 100_000,
    "run.checkpoint_every": 1,
}
TEMPORARY = re.compile(r"\.partial$|\.bad")


def main(output: Path, num_kills: int) -> None:
    folder, draw = output / "checkpoints", random.Random(14)
    process, newest = start("sort-grpo", output, SHORT_SORT | OFTEN), -1
    for number in range(num_kills):
        wait_for_save(folder, newest + draw.randrange(2, 4), process)
        duration_s = seconds_until(lambda: not saving(folder))
        seconds_until(lambda: saving(folder))
        time.sleep(draw.uniform(0.0, 1.2 * duration_s))
        workers = worker_processes(output)
        killed = f"actor/{draw.randrange(2)}" if number % 2 else "driver"
        is_inside = saving(folder)
        os.kill(workers.get(killed, process.pid), signal.SIGKILL)
        process.communicate(timeout=END_TIMEOUT_S)
        assert all_gone(workers.values()), "workers are left"
        whole = {path.name: damage(path) for path in sorted(folder.glob("step-??????"))}
        left, newest = temporary(output), newest_step(folder)
        process = start(None, output, {})
        resumed = first_line(process, "resumed from step-")
        wait_for_save(folder, newest + 1, process)
        row = {
            "killed": killed,
            "inside": is_inside,
            "damage": {name: why for name, why in whole.items() if why is not None},
            "newest": newest,
            "resumed": int(resumed.rpartition("-")[2]),
            "temporary": len(left),
            "stays": sorted(str(path) for path, inode in (left & temporary(output))),
        }
        print(json.dumps(row), flush=True)
    process.kill()
    process.communicate()
    train(None, output, {"run.num_steps": newest_step(folder) + 1})
    print(json.dumps({"at_the_end": sorted(str(path) for path, _ in temporary(output))}))


def wait_for_save(folder: Path, step: int, process) -> None:
    """After a checkpoint of the step."""
    wait_for(lambda: newest_step(folder) >= step and saving(folder), process, f"checkpoint {step}")


def saving(folder: Path) -> bool:
    return any(folder.glob(".step-*"))


def seconds_until(condition: Callable[[], bool]) -> float:
    start_s = time.monotonic()
    while not condition() and time.monotonic() - start_s < END_TIMEOUT_S:
        time.sleep(0.005)
    return time.monotonic() - start_s


def newest_step(folder: Path) -> int:
    return max((int(path.name[-6:]) for path in folder.glob("step-??????")), default=-1)


def temporary(output: Path) -> set[tuple[Path, int]]:
    """What should not outlive a save, with its inode: a later save may use the name again."""
    files = set()
    for path in output.rglob("*"):
        try:
            if TEMPORARY.search(path.name):
                files.add((path, path.stat().st_ino))
        except FileNotFoundError:
            continue  # a run is at work
    return files


def first_line(process, text: str) -> str:
    """The first line that the process prints with the text in it."""
    for line in process.stdout:
        if text in line:
            return line.strip()
    raise AssertionError(f"the run ended before it said {text!r}: {process.stderr.read()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "run", int(sys.argv[2]))
