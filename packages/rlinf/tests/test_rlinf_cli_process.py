"""The installed command, as a process: exit codes, streams, and what is not imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from rlinf.cli.main import entry_point; entry_point()"]
HEAVY = ("torch", "transformers", "numpy", "ray", "gymnasium", "mani_skill", "tensorboard")

PROBE = """
import sys
from rlinf.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("IMPORTED", *sorted(name for name in sys.modules if "." not in name))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 0),
        ("train --help", 0),
        ("plan --help", 0),
        ("eval --help", 0),
        ("config list", 0),
        ("config show sort-grpo", 0),
        ("config schema", 0),
        ("env --help", 0),
        ("explain --help", 0),
        ("explain {run}", 0),
    ],
)
def test_looking_at_recipes_and_runs_imports_nothing_heavy(line: str, code: int, tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"sessions": [{"started": "noon", "ended": null}]}')
    arguments = line.format(run=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, "")
    imported = done.stdout.splitlines()[-1].split()[1:]
    assert "pydantic" in imported
    assert [name for name in HEAVY if name in imported] == []


def test_a_mistake_ends_with_2_before_anything_heavy_is_imported(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "train", "sort-grpo", "--seed", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, "error: --seed='x'; allowed: a whole number\n")
    assert "torch" not in done.stdout.split()
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point_gives_the_exit_code_and_tells_a_term_from_an_interrupt(tmp_path: Path):
    program = (
        "import os, signal; from rlinf.cli import config_command, main\n"
        "config_command.shipped_recipes = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main.entry_point()"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([*COMMAND, "config", "show"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    done = subprocess.run(
        [sys.executable, "-c", program, "config", "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (143, "interrupted; nothing is left running\n")
