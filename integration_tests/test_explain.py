"""A whole run in which the reward stands still: another terminal and the run itself name it."""

import os
import signal
import subprocess

import pytest

from command_line import END_TIMEOUT_S, RLINF, SHORT_SORT, environment, start, steps_done, wait_for, worker_processes

LONG = {"mode": "collocated", "run.num_steps": 100_000, "run.evaluate_every": 100_000}


@pytest.mark.slow
def test_a_stopped_reward_is_named_from_outside_and_by_the_run_itself(tmp_path):
    output = tmp_path / "run"
    process = start("sort-grpo", output, SHORT_SORT | LONG)
    wait_for(lambda: steps_done(output) >= 3, process, "step 3")
    reward = worker_processes(output)["reward/0"]
    os.kill(reward, signal.SIGSTOP)
    wait_for(lambda: any(output.glob("explain-step-*.txt")), process, "an explanation")
    command = [*RLINF, "explain", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_TIMEOUT_S, env=environment())
    os.kill(reward, signal.SIGCONT)
    steps = steps_done(output)
    wait_for(lambda: steps_done(output) > steps, process, "the next step")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=END_TIMEOUT_S)
    root_cause = f"root cause: reward/0 reward (process {reward}) is stopped"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith(root_cause)
    assert "-> reward/0 reward\n" in done.stdout
    assert f"were expected; {root_cause}" in out
    assert not (output / "waits.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_TIMEOUT_S, env=environment())
    assert "interrupted" in done.stdout
