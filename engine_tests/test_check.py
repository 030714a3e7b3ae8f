"""`rlinf check` with SGLang or vLLM in a venv of its own."""

import os
import subprocess
import sys

from served_checks import ENGINE

RLINF = ["-c", "from rlinf.cli.main import entry_point; entry_point()"]
SMALL = {
    "rollout.engine": ENGINE,
    "venvs.rollout": sys.executable,
    "mode": "collocated",
    "cluster.num_devices": 1,
    "cluster.device": "cpu",
    "model.architecture.num_layers": 2,
    "model.architecture.hidden_size": 128,
}


def test_the_engine_agrees_with_the_trainer_before_and_after_a_step(driver):
    flags = [part for key, value in SMALL.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(
        [driver, *RLINF, "check", "sort-grpo", *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:26].strip(): line[26:].split() for line in done.stdout.splitlines()}
    assert rows["verdict"] == ["agree", "agree"]
    assert rows["policy version, engine"] == ["0", "1"]
    assert all(float(distance) < 1e-5 for distance in rows["distance, worst"])
