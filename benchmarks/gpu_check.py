"""Everything that one GPU can show, in at most 8 minutes: results/gpu.json.

    python -m benchmarks.gpu_check                 # measures, the most important rows first
    python -m benchmarks.gpu_check --tests         # instead runs the tests marked gpu, compute-sanitizer and copy rates
    python -m benchmarks.gpu_check --tiny          # on a CPU: tries every part; its figures mean nothing

Needs torch, transformers and what the packages import; nothing is downloaded, and the packages themselves need not be
installed: those with native code are built into a temporary folder, with CUDA, unless there are kernels already. Every
part has a limit of seconds, and none begins when the 8 minutes are over. The file is written after each part, so that a
run which is cut short keeps what it has. At the end stands each expected row (gpu_expected.py, benchmarks/README.md)
beside what was measured.
Exit code: 0 all expectations held, 1 one did not or a part failed (the JSON says which), 2 this machine cannot run it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_expected import judged, table

REPOSITORY = Path(__file__).parents[1]
TOTAL_S = 470.0
NATIVE = ("rlinf-comm", "rlinf-sched")
NEEDED = ("numpy", "pytest", "scikit_build_core", "pybind11", "transformers", "msgspec", "pydantic")
HAS_KERNELS = "import rlinf_comm, rlinf_sched, sys; sys.exit(not rlinf_comm.has_cuda_kernels())"
SANITIZED = "layouts or 0- or nan or digests"
"""Tests that are short enough under compute-sanitizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A command with its limit of time."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    """Of this interpreter; `{seconds}` becomes the limit and `{output}` the file that it writes."""
    prints: bool = False
    """It prints its result as the last line instead."""
    env_vars: tuple[tuple[str, str], ...] = ()
    skip: str | None = None
    """Why it cannot run here; None: it can."""


def parts_with_figures(*, tiny: bool, trl_python: str) -> list[Part]:
    """What measures, in order of importance."""
    fake = ("--fake", "--rounds", "1") if tiny else ("--rounds", "7")
    short = ("--tiny", "--rounds", "1", "--warmup", "1") if tiny else ("--rounds", "3", "--warmup", "1")
    no_trl = None if has_module(trl_python, "trl") else f"{trl_python} has no trl; --trl-python names one that has"
    sync = "benchmarks/comm/gpu_sync.py"
    return [
        Part(name="sync, bfloat16", limit_s=45, arguments=(sync, *fake), prints=True),
        Part(
            name="trainer",
            limit_s=110,
            arguments=("-m", "benchmarks.throughput.trainer_gpu", *short, "--compiled-alone", "--output", "{output}"),
        ),
        Part(
            name="steps",
            limit_s=260,
            arguments=(
                *("-m", "benchmarks.sched.gpu_steps", *short, "--probes", "0"),
                *("--seconds", "{seconds}", "--output", "{output}"),
            ),
        ),
        Part(name="sync, float32", limit_s=45, arguments=(sync, *fake, "--trained", "float32"), prints=True),
        *[
            Part(
                name=name,
                limit_s=75,
                arguments=(
                    *("-m", "benchmarks.throughput.trl_comparison", "--trl-python", trl_python),
                    *("--trl-dtypes", "bfloat16", "--max-tokens", "32768"),
                    *("--rounds", "2", "--warmup", "1", "--output", "{output}"),
                ),
                env_vars=() if tiny else (("TRL_COMPARISON_TASK", task),),
                skip=no_trl,
            )
            for name, task in {"TRL": "gpu", "TRL, 1.5B": "gpu-1.5B"}.items()
        ],
        Part(
            name="SGLang alone",
            limit_s=75,
            arguments=(
                *("-m", "benchmarks.throughput.engines", "sglang", "--output", "{output}"),
                *(("--prompts", "4", "--rounds", "1", "--warmup", "0") if tiny else ("--gpu", "0.5B", "--rounds", "3")),
            ),
            skip=None if has_module(sys.executable, "sglang") else f"{sys.executable} has no sglang",
        ),
    ]


def parts_with_tests(*, tiny: bool) -> list[Part]:
    """The tests that need a GPU; with `tiny` they are only collected."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-m", "gpu")
    only = ("--collect-only",) if tiny else ()
    files = {
        name: tuple(map(str, sorted((REPOSITORY / f"packages/rlinf-{name}/tests").glob("*_gpu.py"))))
        for name in ("comm", "workers")
    }
    sanitizer = shutil.which("compute-sanitizer")
    return [
        Part(name="tests of comm", limit_s=120, arguments=(*pytest, *files["comm"], *only)),
        Part(name="tests of workers", limit_s=150, arguments=(*pytest, *files["workers"], *only)),
        Part(
            name="sanitizer",
            limit_s=80,
            arguments=(*pytest, *files["comm"], "-k", SANITIZED, *only),
            env_vars=(("WRAPPER", f"{sanitizer} --tool memcheck --error-exitcode 9"),)
            if sanitizer and not tiny
            else (),
            skip=None if sanitizer or tiny else "compute-sanitizer is not on PATH",
        ),
        Part(
            name="copies",
            limit_s=60,
            arguments=("-m", "py_compile", "benchmarks/comm/gpu_copy.py") if tiny else ("benchmarks/comm/gpu_copy.py",),
            prints=not tiny,
        ),
    ]


def has_module(python: str, name: str) -> bool:
    return succeeds(python, f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)")


def succeeds(python: str, program: str, env_vars: Mapping[str, str] | None = None) -> bool:
    """Whether an interpreter runs the program without an error."""
    env = {**os.environ, **(env_vars or {})}
    return subprocess.run([python, "-c", program], env=env, capture_output=True, check=False).returncode == 0


def run(part: Part, limit_s: float, env_vars: Mapping[str, str]) -> dict[str, Any]:
    """What became of a part: exit code, seconds, result, and the end of what it printed if it failed."""
    if part.skip:
        return {"skipped": part.skip}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        inserted = {"{output}": str(output), "{seconds}": f"{0.8 * limit_s:.0f}"}
        own = dict(part.env_vars)
        command = [*own.pop("WRAPPER", "").split(), sys.executable, *(inserted.get(one, one) for one in part.arguments)]
        start_s = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **env_vars, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                printed += f"\nstopped after {limit_s:.0f} s"
        row: dict[str, Any] = {"exit_code": process.returncode, "seconds": round(time.monotonic() - start_s, 1)}
        if output.exists():
            row["result"] = json.loads(output.read_text())
        elif part.prints and process.returncode == 0:
            row["result"] = json.loads(printed.strip().splitlines()[-1])
    if process.returncode:
        row["end_of_output"] = printed[-3000:]
    return row


def build(site: Path, limit_s: float) -> dict[str, dict[str, Any]]:
    """Builds the packages with native code at the same time, with CUDA for this GPU; package -> what became of it."""
    import torch

    flags = {"RLINF_CUDA": "ON", "RLINF_CUDA_ARCHS": "{}{}-real".format(*torch.cuda.get_device_capability())}
    pip = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site))
    parts = [
        Part(name=f"build, {package}", limit_s=limit_s, arguments=(*pip, f"packages/{package}")) for package in NATIVE
    ]
    with ThreadPoolExecutor(len(parts)) as threads:
        rows = threads.map(lambda part: run(part, limit_s, flags), parts)
        return {part.name: row for part, row in zip(parts, rows, strict=True)}


def refusal() -> str | None:
    """Why this machine cannot run it; None: it can."""
    import torch

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}, and nothing is downloaded here"
    if tools := [tool for tool in ("cmake", "nvcc") if not shutil.which(tool)]:
        return f"{', '.join(tools)} missing; install it or put it on PATH"
    return (
        None if torch.cuda.is_available() else "no CUDA device that torch can use; --tiny tries the parts without one"
    )


def results_of(
    parts: Sequence[Part], env_vars: Mapping[str, str], deadline_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the parts in order; those for which no time is left are named, too.

    Args:
        deadline_s: of the clock.
    """
    for part in parts:
        left_s = deadline_s - clock()
        yield part.name, run(part, min(part.limit_s, left_s), env_vars) if left_s > 10 else {"skipped": "no time left"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="runs tests instead of measuring")
    parser.add_argument("--tiny", action="store_true", help="tries the parts on a CPU")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for everything")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that can import trl")
    parser.add_argument("--table", action="store_true", help="prints the expected rows, and runs nothing")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/gpu.json")
    options = parser.parse_args()
    if options.table:
        print(table())
        return 0
    if not options.tiny and (reason := refusal()):
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    deadline_s = time.monotonic() + options.seconds
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlinf-gpu-check-") as site:
        sources = [str(path) for path in sorted((REPOSITORY / "packages").glob("*/src"))]
        paths = [site, *sources, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        env_vars = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        if not (options.tiny or succeeds(sys.executable, HAS_KERNELS, env_vars)):
            results |= build(Path(site), 120)
            if failed := [row for row in results.values() if row["exit_code"]]:
                print(failed[0]["end_of_output"], file=sys.stderr)
                return 2
        sys.path[:0] = [site, *sources]
        parts = (
            parts_with_tests(tiny=options.tiny)
            if options.tests
            else parts_with_figures(tiny=options.tiny, trl_python=options.trl_python)
        )
        for name, row in results_of(parts, env_vars, deadline_s):
            results[name] = row
            print(f"{name}: {row.get('skipped') or 'exit code {exit_code}, {seconds} s'.format(**row)}", flush=True)
            write(options.output, results)
    rows = [] if options.tests or options.tiny else judged(results)
    for row in rows:
        verdict = {None: "not measured", True: "holds", False: f"does not hold: {row.get('otherwise')}"}[row["holds"]]
        figure = "-" if row["measured"] is None else f"{row['measured']:.3g}"
        print(f"{row['part']}, {row['figure']}: {figure}, expected {row['expected']}: {verdict}")
    failed = any(row.get("exit_code") for row in results.values())
    return int(failed or any(row["holds"] is False for row in rows))


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes everything so far."""
    from rlinf.run_folder.manifest import describe_machine, git_state, timestamp  # of the packages, once they are built

    content = {
        "date": timestamp(),
        "machine": describe_machine(),
        "git": git_state(Path(__file__).resolve()),
        "expected": judged(results),
        "parts": dict(results),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
