"""The tutorials run as they stand: every block of a page is written or executed, in order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import RLINF, environment

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)(?: (\w+)=\"?([^\"\n]*)\"?)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"bash", "python", "yaml", "json", "text"}


def blocks(page: Path) -> list[tuple[str, str, str, str]]:
    """Returns language, option, value and text of every block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    tutorials = sorted(FOLDER.glob("*.md"))
    assert tutorials
    return tutorials


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_the_test_executes(page: Path):
    languages = {language for language, *_ in blocks(page)}
    assert languages <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path):
    script = tmp_path / "bin" / "rlinf"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in RLINF) + ' "$@"\n')
    script.chmod(0o755)
    env = environment() | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    output = ""
    for language, option, value, text in blocks(page):
        if option == "title":
            (tmp_path / value).write_text(text)
        elif language in ("bash", "python"):
            command = ["bash", "-e", "-c", text] if language == "bash" else [sys.executable, "-c", text]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
            output = done.stdout + done.stderr
            assert done.returncode == (int(value) if option == "exit" else 0), f"{text}\n{output}"
        elif language == "text" and text.startswith("error: "):
            assert text in output
