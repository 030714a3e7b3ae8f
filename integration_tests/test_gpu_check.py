"""The prepared script for a machine with a GPU (benchmarks/gpu_check.py), tried part by part without one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_check import REPOSITORY, Part, parts_with_figures, parts_with_tests, results_of, run
from benchmarks.gpu_expected import EXPECTED, judged, table


def test_the_table_of_the_benchmarks_is_what_the_script_expects() -> None:
    assert table() in (REPOSITORY / "benchmarks/README.md").read_text()


def test_figures_are_judged_by_their_bounds_and_missing_ones_are_named() -> None:
    parts: dict[str, Any] = {"sync, bfloat16": {"result": {"lent": {"critical, flat copies": 1.4}}}}
    parts["TRL"] = {"result": {"comparisons": [{"median_of_ratios": 4.5}]}}
    rows = {(row["part"], row["figure"]): row for row in judged(parts)}
    assert len(rows) == len(EXPECTED)
    lent, ours = rows["sync, bfloat16", "lent, flat copies"], rows["TRL", "0.5B, TRL's step over ours"]
    assert (lent["measured"], lent["holds"]) == (1.4, False) and "maps" in lent["otherwise"]
    assert ours["holds"] is True and "otherwise" not in ours
    assert sum(row["holds"] is None for row in rows.values()) == len(EXPECTED) - 2


def test_a_part_that_hangs_or_fails_leaves_the_others_their_time() -> None:
    sleeps = Part(
        name="sleeps", limit_s=11, arguments=("-c", "print('begun', flush=True); import time; time.sleep(60)")
    )
    fails = Part(name="fails", limit_s=20, arguments=("-c", "raise SystemExit('why')"))
    clock = iter((0.0, 5.0, 95.0))
    rows = dict(
        results_of(
            [fails, Part(name="left out", limit_s=9, arguments=(), skip="no such thing"), sleeps],
            {},
            100.0,
            lambda: next(clock),
        )
    )
    assert rows["fails"]["exit_code"] == 1 and "why" in rows["fails"]["end_of_output"]
    assert rows["left out"] == {"skipped": "no such thing"} and rows["sleeps"] == {"skipped": "no time left"}
    stopped = run(sleeps, 3.0, {})
    assert (
        stopped["exit_code"] != 0
        and "begun" in stopped["end_of_output"]
        and "stopped after 3 s" in stopped["end_of_output"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--tests"]], ids=["measures", "tests"])
def test_every_part_runs_without_a_gpu(mode: list[str], tmp_path: Path) -> None:
    """Parts with nothing but tiny models, and figures where the expectations look for them."""
    output = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--tiny",
        *mode,
        "--seconds",
        "800",
        "--output",
        str(output),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(output.read_text())["parts"]
    expected = parts_with_tests(tiny=True) if mode else parts_with_figures(tiny=True, trl_python=sys.executable)
    assert list(parts) == [part.name for part in expected]
    if mode:
        return
    # a tiny model stands for both shapes; memory is counted on GPUs alone, and SGLang is not installed
    trained = parts["trainer"]["result"]["findings"]
    trained |= dict.fromkeys(("0.5B", "1.5B"), trained["tiny"])
    measured = {(row["part"], row["figure"]) for row in judged(parts) if row["measured"] is not None}
    absent = {
        (one.part, one.figure)
        for one in EXPECTED
        if "memory" in one.figure or "SGLang" in one.figure or "skipped" in parts[one.part]
    }
    assert measured == {(one.part, one.figure) for one in EXPECTED} - absent
