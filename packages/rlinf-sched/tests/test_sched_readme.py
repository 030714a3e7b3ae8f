"""The README's examples run, in order, and print what it says; the package needs neither torch nor Ray."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("brief_search")

PACKAGE = Path(__file__).parents[1]
README = PACKAGE / "README.md"


def blocks() -> list[tuple[str, str]]:
    """(language, content) of every code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_python_examples_print_what_the_readme_shows():
    names: dict[str, object] = {}
    printed = io.StringIO()
    kinds = [kind for kind, _ in blocks()]
    assert kinds.count("python") >= 5
    for kind, content in blocks():
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(content, str(README), "exec"), names)
        elif kind == "text":
            assert printed.getvalue().strip() == content.strip()


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    main = pytest.importorskip("rlinf.cli.main", reason="rlinf is not installed beside this package").main
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(PACKAGE / "examples")
    commands = [line for kind, content in blocks() if kind == "bash" for line in content.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        words = command.partition("#")[0].split()
        assert words[0] == "rlinf" and main(words[1:]) == 0, command
    assert (tmp_path / "laptop-plan" / "plan.html").exists()


def test_importing_it_loads_no_heavy_package():
    code = "import sys, rlinf_sched; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
