"""The README's example runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_the_example_prints_what_it_says(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code
    script = tmp_path / "example.py"
    script.write_text(code[1])
    expected = re.search(r"# (\{.*\})", code[1])
    assert expected
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == expected[1], done.stderr
