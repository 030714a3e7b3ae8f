"""The README's example runs and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_shows():
    text = README.read_text(encoding="utf-8")
    code, expected = re.findall(r"```(?:python|text)\n(.*?)```", text, flags=re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    assert printed.getvalue().strip() == expected.strip()
