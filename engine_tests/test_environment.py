"""The environment that these tests run in, looked at from outside by the command that made it."""

import os
import subprocess

import pytest


@pytest.mark.skipif("RLINF_TEST_DRIVER" not in os.environ, reason="only tools/test.sh --engines makes the environment")
def test_it_is_whole_and_names_its_stand_ins(driver: str):
    command = [driver, "-c", "from rlinf.cli.main import entry_point; entry_point()", "venv", "check", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[2:4] for line in lines if line[:2] == ["note", "stand-in"]] == [
        ["sglang-kernel", "0.4.10+rlinf.standin:"],
        ["torchvision", "0.28.0+rlinf.standin:"],
    ]
    assert lines[-1] == ["no", "problems", "found"]
