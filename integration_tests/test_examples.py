"""The examples of the documentation run as they stand."""

import subprocess
import sys
from pathlib import Path

from command_line import environment

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "own_flow.py"


def test_own_flow_is_short_and_gives_one_result_under_every_plan():
    assert len(EXAMPLE.read_text().splitlines()) < 80
    outputs = {
        subprocess.run(
            [sys.executable, str(EXAMPLE), mode],
            capture_output=True,
            text=True,
            check=True,
            env=environment(),
            timeout=120,
        ).stdout
        for mode in ("collocated", "disaggregated", "hybrid")
    }
    assert len(outputs) == 1
    assert "step 29: mean 3.0" in outputs.pop()
