"""The examples run as they stand, and show what they say."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def lines_of(name):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_processes_share_tensors():
    """The number behind `here:` is read from the sender's tensor, after the receiver has doubled it in place."""
    assert lines_of("share_tensors.py") == [
        "{'name': 'dim', 'mean': 0.5} here: 0.5",
        "{'name': 'bright', 'mean': 2.0} here: 2.0",
    ]


@pytest.mark.slow
def test_fsdp2_trainer_feeds_an_engine():
    lines = lines_of("fsdp2_to_engine.py")
    versions, num_bytes, outputs = zip(
        *(ast.literal_eval(f"({line.replace(' ', ', ')})") for line in lines), strict=True
    )
    assert versions == (0, 1, 2)
    assert set(num_bytes) == {2 * (64 * 256 + 256 + 256 + 1)}  # each version whole, in bfloat16
    distances = [abs(output - 1) for output in outputs]
    assert distances[2] < distances[0], "three steps of training towards 1 reach the engine"


def test_the_trainer_example_is_short():
    text = (EXAMPLES / "fsdp2_to_engine.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 40
