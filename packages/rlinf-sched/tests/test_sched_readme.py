"""The README's example runs and prints what it says; the package needs neither torch nor Ray."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_shows():
    text = README.read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", text, flags=re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    assert printed.getvalue().strip() == shown.strip()


def test_importing_it_loads_no_heavy_package():
    code = "import sys, rlinf_sched; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
