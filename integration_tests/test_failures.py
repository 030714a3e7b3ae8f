"""Killed workers, a killed driver, Ctrl-C: the run ends or goes on, and nothing stays behind."""

import json
import os
import signal

import pytest

from command_line import (
    END_TIMEOUT_S,
    LONG_SORT,
    SHORT_PUSH,
    SHORT_SORT,
    TINY_SORT,
    all_gone,
    last_checkpoint,
    rows,
    start,
    steps_done,
    train,
    train_and_kill,
    wait_for,
    weights,
    worker_processes,
)

LONG = {"run.num_steps": 100_000, "run.evaluate_every": 100_000}
STOP = {"run.on_failure": "stop"}
SHORT = {"sort-grpo": SHORT_SORT, "pushcube-ppo": SHORT_PUSH}
VICTIMS = [
    ("sort-grpo", "actor/1"),
    *(pytest.param("sort-grpo", worker, marks=pytest.mark.slow) for worker in ("rollout/1", "reward/0")),
    pytest.param("pushcube-ppo", "policy/0", marks=[pytest.mark.maniskill, pytest.mark.slow]),
    pytest.param("pushcube-ppo", "env/1", marks=[pytest.mark.maniskill, pytest.mark.slow]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "victim"), VICTIMS)
def test_a_killed_worker_ends_the_run_with_its_name_cause_and_log(tmp_path, recipe, victim):
    if recipe == "pushcube-ppo":
        pytest.importorskip("mani_skill")
    done, workers = train_and_kill(recipe, tmp_path / "run", SHORT[recipe] | LONG | STOP, victim, after_step=1)
    assert done.returncode == 1
    assert f"worker {victim} on " in done.stderr
    assert "was lost: killed by SIGKILL" in done.stderr
    assert f"worker {victim}, process {workers[victim]}" in done.stderr, "the end of its log"
    assert "Traceback" not in done.stderr
    assert all_gone(workers.values())


@pytest.mark.slow
def test_a_worker_killed_while_it_starts_ends_the_run(tmp_path):
    output = tmp_path / "run"
    process = start("sort-grpo", output, SHORT_SORT | LONG | STOP)
    wait_for(lambda: "actor/0" in worker_processes(output), process, "a worker's first line")
    workers = worker_processes(output)
    os.kill(workers["actor/0"], signal.SIGKILL)
    _, err = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 1, err
    assert "worker actor/0 on " in err and "was lost: killed by SIGKILL" in err
    assert "Traceback" not in err
    assert all_gone(worker_processes(output).values())


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_told_to_end_saves_and_says_how_to_go_on(tmp_path, how):
    stop_after_a_step(tmp_path / "run", how)


@pytest.mark.slow
def test_a_run_that_was_told_to_end_goes_on_to_the_same_numbers(tmp_path):
    output = tmp_path / "run"
    stop_after_a_step(output, signal.SIGINT)
    steps = {"run.num_steps": steps_done(output) + 2}
    train(None, output, steps)
    whole = train("sort-grpo", tmp_path / "whole", TINY_SORT | LONG | steps)
    assert rows(output) == rows(whole)
    assert rows(output, "evaluations.jsonl") == rows(whole, "evaluations.jsonl")
    assert weights(output) == weights(whole)


def stop_after_a_step(output, how):
    """A run that got a signal, and what it has to leave behind."""
    process = start("sort-grpo", output, TINY_SORT | LONG)
    wait_for(lambda: steps_done(output) >= 1, process, "step 1")
    workers = worker_processes(output)
    os.killpg(process.pid, how)  # as a terminal, `timeout` or a batch system does
    _, err = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == (143 if how == signal.SIGTERM else 130), err
    assert f"go on with: rlinf train --resume --output {output}\n" in err
    assert "Traceback" not in err
    assert all_gone(workers.values())
    assert last_checkpoint(output).name == f"step-{steps_done(output):06d}"


@pytest.mark.slow
def test_a_run_that_is_told_to_end_twice_ends_at_once(tmp_path):
    output = tmp_path / "run"
    process = start("sort-grpo", output, TINY_SORT | LONG)
    wait_for(lambda: steps_done(output) >= 1, process, "step 1")
    workers = worker_processes(output)
    os.kill(workers["actor/0"], signal.SIGSTOP)  # the step will not end
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() + process.stderr.readline() == (
        "\nstopping: this step is finished and a checkpoint saved; once more quits at once\n"
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 130, err
    assert "go on with: rlinf train --resume" in err and "Traceback" not in err
    assert all_gone(workers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["sort-grpo", pytest.param("pushcube-ppo", marks=[pytest.mark.maniskill, pytest.mark.slow])]
)
def test_a_run_killed_in_mid_step_resumes_to_the_same_numbers(tmp_path, recipe):
    if recipe == "pushcube-ppo":
        pytest.importorskip("mani_skill")
    # PushCube has only the checkpoint from before the first step to go back to.
    checkpoint_every = 2 if recipe == "sort-grpo" else 100
    settings = SHORT[recipe] | {"run.num_steps": 6, "run.evaluate_every": 3, "run.checkpoint_every": checkpoint_every}
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


@pytest.mark.parametrize(
    ("recipe", "victim", "survivors"),
    [
        ("sort-grpo", "rollout/0", {"rollout/1", "actor/0", "actor/1", "reward/0"}),
        pytest.param("sort-grpo", "actor/1", {"rollout/0", "rollout/1", "reward/0"}, marks=pytest.mark.slow),
        pytest.param(
            "pushcube-ppo",
            "env/0",
            {"env/1", "policy/0", "policy/1", "actor/0", "actor/1"},
            marks=[pytest.mark.maniskill, pytest.mark.slow],
        ),
    ],
)
def test_a_run_whose_worker_is_killed_goes_on_to_the_same_numbers(tmp_path, request, recipe, victim, survivors):
    if recipe == "pushcube-ppo":
        pytest.importorskip("mani_skill")
        settings = SHORT_PUSH | {"run.num_steps": 15, "run.evaluate_every": 6, "run.checkpoint_every": 4}
        whole = train(recipe, tmp_path / "whole", settings)
    else:
        settings = LONG_SORT | {"run.checkpoint_every": 4}
        whole = request.getfixturevalue("long_sort_run")

    output = tmp_path / "killed"
    done, workers = train_and_kill(recipe, output, settings, victim, after_step=3)
    assert done.returncode == 0
    assert f"worker {victim} on " in done.stdout
    assert "replaced in " in done.stdout and "the run goes on with step " in done.stdout
    assert rows(output) == rows(whole)
    assert rows(output, "evaluations.jsonl") == rows(whole, "evaluations.jsonl")
    assert weights(output) == weights(whole)
    manifest = json.loads((output / "manifest.json").read_text())
    assert any(f"worker {victim} on " in note for note in manifest["notes"])
    after = worker_processes(output)
    assert {worker for worker in after if after[worker] == workers[worker]} == survivors
