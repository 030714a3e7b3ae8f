"""Killed workers, a killed driver, Ctrl-C: the run ends or goes on, and nothing stays behind."""

import os
import signal

import pytest

from command_line import (
    END_TIMEOUT_S,
    SHORT_PUSH,
    SHORT_SORT,
    all_gone,
    rows,
    start,
    steps_done,
    train,
    wait_for,
    weights,
    worker_processes,
)

LONG = {"run.num_steps": 100_000, "run.evaluate_every": 100_000}
ROLES = ["rollout/0", "rollout/1", "reward/0", "actor/1"]


@pytest.mark.parametrize("victim", ROLES)
def test_a_killed_worker_ends_the_run_with_its_name_cause_and_log(tmp_path, victim):
    output = tmp_path / "run"
    process = start("sort-grpo", output, SHORT_SORT | LONG)
    wait_for(lambda: steps_done(output) >= 1, process, "step 1")
    workers = worker_processes(output)
    os.kill(workers[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 1, err
    assert f"worker {victim} on " in err
    assert "was lost: killed by SIGKILL" in err
    assert f"worker {victim}, process {workers[victim]}" in err, "the end of its log"
    assert "Traceback" not in err
    assert all_gone(workers.values())


def test_ctrl_c_ends_cleanly(tmp_path):
    output = tmp_path / "run"
    process = start("sort-grpo", output, SHORT_SORT | LONG)
    wait_for(lambda: steps_done(output) >= 1, process, "step 1")
    workers = worker_processes(output)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert all_gone(workers.values())


@pytest.mark.parametrize(
    ("recipe", "short"),
    [("sort-grpo", SHORT_SORT), pytest.param("pushcube-ppo", SHORT_PUSH, marks=pytest.mark.maniskill)],
)
def test_a_run_killed_in_mid_step_resumes_to_the_same_numbers(tmp_path, recipe, short):
    if recipe == "pushcube-ppo":
        pytest.importorskip("mani_skill")
    # PushCube has only the checkpoint from before the first step to go back to.
    checkpoint_every = 2 if recipe == "sort-grpo" else 100
    settings = short | {"run.num_steps": 6, "run.evaluate_every": 3, "run.checkpoint_every": checkpoint_every}
    whole = train(recipe, tmp_path / "whole", settings)

    killed = tmp_path / "killed"
    process = start(recipe, killed, settings)
    wait_for(lambda: steps_done(killed) >= 3, process, "step 3")
    workers = worker_processes(killed)
    process.kill()
    process.communicate()
    assert all_gone(workers.values())

    train(None, killed, {})
    assert rows(killed) == rows(whole)
    assert rows(killed, "evaluations.jsonl") == rows(whole, "evaluations.jsonl")
    assert weights(killed) == weights(whole)
