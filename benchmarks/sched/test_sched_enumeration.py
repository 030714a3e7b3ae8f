"""Plans of the first stored problems against the shortest that an enumeration found (`enumeration.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.harness import RESULTS_FOLDER
from benchmarks.sched.enumeration import compare

NUM_PROBLEMS = 6


def test_plans_are_near_the_shortest_known(tmp_path: Path) -> None:
    stored = tmp_path / "known.json"
    shutil.copy(RESULTS_FOLDER / "planner-enumeration.json", stored)
    summary = compare(stored, NUM_PROBLEMS, also_alone=True)
    assert summary["typical"]["num_problems"] == NUM_PROBLEMS
    assert summary["typical"]["worst_gap"] <= 0.03
    assert summary["num_worse_than_one_mode"] == 0
