"""Whole runs that are killed while they save, and resumed: `python -m benchmarks.failures.killed_runs [NUMBER]`.

integration_tests/killed_runs.py kills, reads every checkpoint and resumes; this writes what it found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.harness import report

SCRIPT = Path(__file__).parents[2] / "integration_tests" / "killed_runs.py"


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(SCRIPT), scratch, str(num_kills)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(json.loads(line))
        assert process.wait() == 0, "a run did not go on"
    *kills, end = lines
    findings = {
        "kills": len(kills),
        "of": Counter(kill["killed"] for kill in kills),
        "while_a_save_was_under_way": sum(kill["inside"] for kill in kills),
        "damaged": [kill for kill in kills if kill["damage"]],
        "resumed_from_another_than_the_newest": [kill for kill in kills if kill["resumed"] != kill["newest"]],
        "temporary_when_killed": sum(kill["temporary"] > 0 for kill in kills),
        "temporary_that_stayed": [kill for kill in kills if kill["stays"]] + end["at_the_end"],
        "each": kills,
    }
    report("killed-runs", settings={"recipe": "sort-grpo"}, samples_s={}, comparisons=[], findings=findings)


if __name__ == "__main__":
    main()
