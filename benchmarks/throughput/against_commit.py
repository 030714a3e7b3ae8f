"""The time of a step against another commit: benchmarks/results/against-commit-NAME.json.

    git worktree add ../earlier COMMIT          then make an environment in it, ../earlier/.venv
    python -m benchmarks.throughput.against_commit ../earlier --name before-overlap --cases sort-grpo pushcube-ppo
    python -m benchmarks.throughput.against_commit ../earlier --name robots --cases reach-openvla-ppo reach-pi0-ppo

Both commits train the same recipes from the same SFT warm-up, run by run in turn, in mode collocated on one CPU slot.
What counts is the median time of a step without the first few. On a machine that does other work too it is the CPU
time, and with `--at-once` both sides of a round run at the same time, which disturbs both alike. The metrics of both
are compared, too: where they are equal, both learn the same, so the time of a step decides which reaches a success
rate first. Robots' warm-ups and evaluations are shortened, which changes no step.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, interleave, report

from rlinf.run_folder import read_rows

OURS, EARLIER = "this commit", "earlier commit"
COMMON = {"mode": "collocated", "cluster.num_devices": 1, "run.max_minutes": "null", "run.stop_at_score": "null"}
SHORT = {"sft_warm_up.num_episodes": 4, "sft_warm_up.num_steps": 10, "env.num_eval_episodes": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run that both commits do."""

    recipe: str
    num_steps: int
    num_left_out: int = 3
    """First steps whose time does not count."""
    overrides: Mapping[str, Any] = field(default_factory=dict)


def _robot(recipe: str, **policy: str) -> Case:
    overrides = SHORT | {f"policy.{key}": value for key, value in policy.items()}
    return Case(recipe=recipe, num_steps=4, num_left_out=1, overrides=overrides)


CASES = {
    "sort-grpo": Case(recipe="sort-grpo", num_steps=30),
    "pushcube-ppo": Case(recipe="pushcube-ppo", num_steps=12),
    "reach-openvla-ppo": _robot("reach-openvla-ppo"),
    "reach-oft-grpo": _robot("reach-oft-grpo"),
    "reach-pi0-ppo": _robot("reach-pi0-ppo"),
    "reach-pi0-ppo with pi0.5": _robot("reach-pi0-ppo", name="pi05"),
    "reach-smolvla-ppo": _robot("reach-smolvla-ppo"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run has shown."""

    step_s: float
    """Median over its steps."""
    steps_cpu_s: list[float]
    """CPU time of all its processes in each of them but the last."""
    metrics: list[dict[str, Any]]
    """By step, without times."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="of the other commit, with its environment in .venv")
    parser.add_argument("--name", required=True, help="of the result")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--at-once", action="store_true", help="run both sides of a round at the same time")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    options = parser.parse_args()
    commands = {OURS: Path(sys.executable).with_name("rlinf"), EARLIER: options.checkout / ".venv/bin/rlinf"}
    samples_s: dict[str, list[float]] = {}
    findings: dict[str, dict[str, Any]] = {
        what: {} for what in ("metrics", "ratio_in_pairs", "cpu_ratio_in_pairs", "steps_cpu_s")
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            runs: dict[str, list[Run]] = {side: [] for side in commands}

            def step(side: str, name: str = name, runs: dict[str, list[Run]] = runs) -> float:
                output = Path(folder) / f"{name.split()[-1]}-{side[:4]}-{len(runs[side])}"
                runs[side].append(trained(commands[side], CASES[name], output, bound=not options.at_once))
                return runs[side][-1].step_s

            sides = {f"{name}, {side}": (lambda _, side=side, step=step: step(side)) for side in commands}
            in_turn = at_once if options.at_once else in_both_orders
            samples_s |= in_turn(sides, options.warmup, options.rounds)
            findings["metrics"][name] = differences(runs[OURS][-1].metrics, runs[EARLIER][-1].metrics)
            findings["ratio_in_pairs"][name] = in_pairs(*(samples_s[f"{name}, {side}"] for side in commands))
            cpu_s = {side: [s for run in runs[side][options.warmup :] for s in run.steps_cpu_s] for side in commands}
            findings["cpu_ratio_in_pairs"][name] = in_pairs(*cpu_s.values())
            findings["steps_cpu_s"][name] = cpu_s
            print(name, {what: values[name] for what, values in findings.items()}, flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.checkout, check=True, capture_output=True, text=True
    ).stdout.strip()
    report(
        f"against-commit-{options.name}",
        settings={
            "earlier": commit,
            "at_once": options.at_once,
            "cases": {name: asdict(CASES[name]) for name in options.cases},
            **COMMON,
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, f"{one}, {OURS}", f"{one}, {EARLIER}") for one in options.cases],
        findings=findings,
    )


def differences(ours: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the metrics that both sides have differ, step by step, and the names of those that only one has."""
    both = list(zip(ours, earlier, strict=True))
    by_step = [{name: (a[name], b[name]) for name in sorted(set(a) & set(b)) if a[name] != b[name]} for a, b in both]
    of_one_side = sorted({name for a, b in both for name in set(a) ^ set(b)})
    return {
        "are_equal": not any(by_step) and not of_one_side,
        "num_compared": len(set(ours[0]) & set(earlier[0])),
        "of_one_side": of_one_side,
        "different_in_first_step": by_step[0],
        "num_different_by_step": [len(step) for step in by_step],
    }


def in_pairs(ours: Sequence[float], earlier: Sequence[float]) -> dict[str, float | None]:
    """The geometric mean of our seconds over theirs, pair by pair, and its standard error."""
    logs = [math.log(a / b) for a, b in zip(ours, earlier, strict=True)]
    mean = math.exp(statistics.mean(logs))
    error = mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return {"mean": mean, "standard_error": error, "num_pairs": len(logs)}


def in_both_orders(
    sides: dict[str, Callable[[int], float]], num_warmup: int, num_rounds: int
) -> dict[str, list[float]]:
    """Rounds of which the second half begins with the last side, since the place in a round makes a difference."""
    forward = interleave(sides, num_warmup=num_warmup, num_rounds=num_rounds - num_rounds // 2)
    backward = interleave(dict(reversed(sides.items())), num_warmup=0, num_rounds=num_rounds // 2)
    return {name: forward[name] + backward[name] for name in sides}


def at_once(sides: dict[str, Callable[[int], float]], num_warmup: int, num_rounds: int) -> dict[str, list[float]]:
    """Rounds whose sides run at the same time."""
    samples_s: dict[str, list[float]] = {name: [] for name in sides}
    with ThreadPoolExecutor(len(sides)) as pool:
        for index in range(num_warmup + num_rounds):
            for name, seconds in zip(sides, pool.map(lambda step, i=index: step(i), sides.values()), strict=True):
                samples_s[name] += [seconds] * (index >= num_warmup)
    return samples_s


def trained(command: Path, case: Case, output: Path, *, bound: bool) -> Run:
    """Runs a case. Raises: SystemExit with what it has printed, when it fails.

    Args:
        bound: to the core of its slot.
    """
    overrides = COMMON | {f"run.{key}": case.num_steps for key in ("num_steps", "evaluate_every", "checkpoint_every")}
    overrides |= {**case.overrides, "cluster.pin_slots": str(bound).lower()}
    flags = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    command_line = [str(command), "train", case.recipe, "--output", str(output), *flags]
    path, log = output / "metrics.jsonl", output.with_suffix(".log")
    cpu_s: list[float] = []
    with log.open("w") as printed, subprocess.Popen(command_line, stdout=printed, stderr=printed) as process:
        while process.poll() is None:
            num_rows = len(read_rows(path)) if path.exists() else 0
            cpu_s += [_cpu_s(process.pid)] * (num_rows - len(cpu_s))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{' '.join(command_line)} ended with {process.returncode}:\n{log.read_text()}")
    rows = read_rows(path)
    metrics = [
        {name: value for name, value in row["metrics"].items() if not name.startswith(("time/", "perf/"))}
        for row in rows
    ]
    step_s = statistics.median(row["metrics"]["time/step_s"] for row in rows[case.num_left_out :])
    whole = cpu_s[case.num_left_out - 1 : case.num_steps - 1]  # processes may have ended when the last row is seen
    of_steps = [later - sooner for sooner, later in pairwise(whole)]
    return Run(step_s=step_s, steps_cpu_s=of_steps, metrics=metrics)


def _cpu_s(process_id: int) -> float:
    """CPU time that a process and its descendants have taken so far, in whole hundredths of a second (Linux)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    family = {process_id}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(one, 0) for one in family) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
