"""Runs that are disturbed at random moments: `python chaos_runs.py MINUTES SEED [overrides]`, for tools/chaos.sh.

One run is left in peace. Then, until the time is over, a run of the same recipe is disturbed once, at a moment drawn
from the seed: a process is killed or stopped for a while, its disk is full, its connections are cut. The run may go on,
or stop and name the cause; then it is resumed. At the end its metrics, evaluations and weights have to be those of the
run in peace, to the bit, and no process, shared segment or temporary folder of it may be left.

A line for each run, and a table at the end; the exit code is 1 where something is wrong. Clock jumps are not tried:
they need a clock of one's own for each process.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from command_line import (
    TINY_SORT,
    all_gone,
    command,
    environment,
    logged_processes,
    numbers,
    steps_done,
    worker_processes,
)
from process_resources import Before, processes_below
from rlinf.cli.table import aligned

RECIPE = "sort-grpo"
NUM_STEPS = 30
LAST_DISTURBED = 20
"""Steps take a tenth of a second, and the run is to be under way when it is disturbed."""
MAX_DELAY_S = 0.3
SETTINGS = TINY_SORT | {
    "run.num_steps": NUM_STEPS,
    "run.evaluate_every": 10,
    "run.checkpoint_every": 6,
    "run.worker_timeout_s": 20,
}
SHORT_STOP_S = 3.0
HANG_S = 240.0
"""A run that has not ended so long after the disturbance hangs."""
TMPFS_BYTES, ROOM_BYTES = 1 << 20, 256 << 20
"""A disk that is full after a few checkpoints, and what it is made to be for the resumed run."""
WORKER = r"worker \S+ on \S+ was lost: "


class Skipped(Exception):
    """A disturbance that cannot be made here; the text says why."""


@dataclass(slots=True)
class Run:
    """One at work."""

    process: subprocess.Popen
    output: Path
    log: Path

    def pid_of(self, name: str) -> int:
        return self.process.pid if name == "driver" else worker_processes(self.output)[name]


@dataclass(frozen=True, slots=True)
class Disturbance:
    name: str
    disturb: Callable[[Run, str], None]
    victims: Sequence[str] = ("",)
    """One is drawn."""
    causes: str | None = None
    """What the run's last words have to match where it stopped; None: it must not stop; BY_US: it has none."""
    is_on_small_disk: bool = False
    leaves_folders: bool = False
    """A driver that is killed has no last word, so its temporary folders stay."""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one run."""

    disturbance: str
    at_step: int
    outcome: str
    numbers: str
    left: Sequence[str]
    is_fine: bool

    def row(self) -> tuple[str, ...]:
        verdict = "ok" if self.is_fine else "WRONG"
        return (
            verdict,
            self.disturbance,
            str(self.at_step),
            self.outcome,
            self.numbers,
            "; ".join(self.left) or "nothing",
        )


# -- disturbances ------------------------------------------------------------------------------------------------------


def _kill(run: Run, victim: str) -> None:
    os.kill(run.pid_of(victim), signal.SIGKILL)


def _stop_shortly(run: Run, victim: str) -> None:
    pid = run.pid_of(victim)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(SHORT_STOP_S)
    os.kill(pid, signal.SIGCONT)


def _stop(run: Run, victim: str) -> None:
    os.kill(run.pid_of(victim), signal.SIGSTOP)


def _kill_agent(run: Run, victim: str) -> None:
    """The actor of Ray that started a worker."""
    parent = int(Path(f"/proc/{run.pid_of(victim)}/stat").read_text().rpartition(")")[2].split()[1])
    if b"ray::" not in Path(f"/proc/{parent}/cmdline").read_bytes():
        raise Skipped("the launcher has no agents: add --cluster.launcher ray")
    os.kill(parent, signal.SIGKILL)


def _cut(run: Run, victim: str) -> None:
    """Ends every TCP connection of a process, as a network that breaks does."""
    pid = run.pid_of(victim)
    listed = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=False)
    mine = [line.split() for line in listed.stdout.splitlines() if f"pid={pid}," in line]
    if not mine:
        raise Skipped("it has no TCP connections: add --cluster.weight_sync streams or --cluster.launcher ray")
    for _, _, near, far, *_ in mine:
        subprocess.run(["ss", "-K", "src", near, "dst", far], capture_output=True, check=False)
    still = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=False)
    if sum(f"pid={pid}," in line for line in still.stdout.splitlines()) == len(mine):
        raise Skipped("this system ends no connections for others (ss -K)")


def _nothing(run: Run, victim: str) -> None:
    """The disk is small, and that is enough."""


WORKERS = ("actor/0", "rollout/0", "reward/0")
BY_US = r"^$"
DISTURBANCES = (
    Disturbance("kill", _kill, WORKERS, WORKER),
    Disturbance("kill", _kill, ("driver",), BY_US, leaves_folders=True),
    Disturbance("kill the agent of", _kill_agent, WORKERS, r"was lost"),
    Disturbance(f"stop for {SHORT_STOP_S:.0f} s", _stop_shortly, (*WORKERS, "driver")),
    Disturbance("stop for good", _stop, WORKERS, WORKER),
    Disturbance("full disk", _nothing, causes=r"No space left on device", is_on_small_disk=True),
    Disturbance("cut the connections of", _cut, (*WORKERS, "driver"), r"was lost|is lost|has left"),
)


# -- one run -----------------------------------------------------------------------------------------------------------


def main(minutes: float, seed: int, overrides: Sequence[str]) -> int:
    draw, end_s = random.Random(seed), time.monotonic() + 60 * minutes
    runs: list[Found] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        peace = Path(scratch) / "peace"
        run = begin(Path(scratch), "peace", overrides)
        assert run.process.wait() == 0, run.log.read_text()
        expected = numbers(peace / "run")
        left = list(DISTURBANCES)
        for number in itertools.count():
            if time.monotonic() >= end_s:
                break
            left = left or list(DISTURBANCES)  # each once, in an order drawn by chance, before one comes again
            disturbance = left.pop(draw.randrange(len(left)))
            victim, at_step, delay = draw.choice(disturbance.victims), draw.randrange(1, LAST_DISTURBED), draw.random()
            name = f"{disturbance.name} {victim}".strip()
            try:
                one = tried(Path(scratch) / f"run{number}", disturbance, victim, at_step, delay, overrides, expected)
            except Skipped as why:
                skipped[name] = str(why)
                continue
            runs.append(one)
            print("  ".join(one.row()), flush=True)
    print(f"\nseed {seed}, {len(runs)} runs\n")
    print(
        aligned([("", "disturbance", "after step", "outcome", "numbers", "left behind"), *(one.row() for one in runs)])
    )
    for name, why in skipped.items():
        print(f"not tried: {name}: {why}")
    print("not tried: clock jumps: each process would need a clock of its own")
    return 0 if runs and all(one.is_fine for one in runs) else 1


def tried(
    folder: Path,
    disturbance: Disturbance,
    victim: str,
    at_step: int,
    delay: float,
    overrides: Sequence[str],
    expected: tuple,
) -> Found:
    """A run that is disturbed, and resumed where it stopped. Raises: Skipped."""
    with small_disk(folder / "disk") if disturbance.is_on_small_disk else plain(folder / "disk") as enlarge:
        before = Before.now(folder / "tmp")
        run = begin(folder, "disk", overrides)
        pids: set[int] = set()
        try:
            wait_for_step(run, 0 if disturbance.is_on_small_disk else at_step)
            pids |= processes_below(run.process.pid)
            time.sleep(MAX_DELAY_S * delay)
            disturbance.disturb(run, victim)
            run.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            pass
        except ProcessLookupError:
            end(run)
            raise Skipped("the run had ended before") from None
        except Skipped:
            end(run)
            raise
        code = run.process.poll()
        pids |= set().union(*logged_processes(run.output).values())
        outcome, is_fine = judged(disturbance, code, run.log.read_text())
        if code is None:
            end(run)
        all_gone(pids)
        left = before.left(dict.fromkeys(pids, "of the run"))
        left += [] if disturbance.leaves_folders else [f"{name}, a temporary folder" for name in before.folders()]
        numbers_are = "-"
        if code is not None and is_fine:
            if code != 0:
                enlarge()
                run = begin(folder, "disk", overrides, resumes=True)
                run.process.wait()
            numbers_are = "equal" if run.process.returncode == 0 and numbers(run.output) == expected else "differ"
        is_fine = is_fine and numbers_are == "equal" and not left
        shutil.rmtree(run.output, ignore_errors=True)
    return Found(f"{disturbance.name} {victim}".strip(), at_step, outcome, numbers_are, left, is_fine)


def judged(disturbance: Disturbance, code: int | None, log: str) -> tuple[str, bool]:
    """What happened, in words, and whether it may."""
    if code is None:
        return f"hung for {HANG_S:.0f} s", False
    if code == 0:
        return "went on", True
    if disturbance.causes == BY_US and code == -signal.SIGKILL:
        return "stopped, resumed", True
    cause = re.search(disturbance.causes, log) if disturbance.causes else None
    last = next((line for line in reversed(log.splitlines()) if "error:" in line or "was lost" in line), log[-200:])
    if cause is None or "Traceback" in log:
        return f"stopped with {code}, unnamed: {last}", False
    line = next(line for line in log.splitlines() if re.search(disturbance.causes or "", line))
    return f"stopped, named: {line.removeprefix('error: ')[:90]}", True


def begin(folder: Path, name: str, overrides: Sequence[str], *, resumes: bool = False) -> Run:
    """A run in folder/name/run, in the background."""
    output = folder / name / "run"
    log = folder / ("said-resumed" if resumes else "said")
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    line = command(None if resumes else RECIPE, output, {} if resumes else SETTINGS)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*line, *([] if resumes else overrides)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment() | {"TMPDIR": str(folder / "tmp")},
            start_new_session=True,
        )
    return Run(process, output, log)


def end(run: Run) -> None:
    run.process.kill()
    run.process.wait()


def wait_for_step(run: Run, step: int) -> None:
    """Until so many steps are done, or the run has ended."""
    while run.process.poll() is None and (steps_done(run.output) < step or len(worker_processes(run.output)) < 3):
        time.sleep(0.02)


@contextmanager
def plain(folder: Path) -> Iterator[Callable[[], None]]:
    folder.mkdir(parents=True)
    yield lambda: None


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A folder on a disk that is soon full; what is yielded makes it larger. Raises: Skipped."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Skipped(f"no disk of its own can be mounted here ({done.stderr.strip()})")
    try:
        larger = ["mount", "-o", f"remount,size={ROOM_BYTES}", str(folder)]
        yield lambda: subprocess.run(larger, check=True) and None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
