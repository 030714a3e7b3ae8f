"""Recorded runs whose rewards are drawn at random: a replay ends with the same weights."""

import os
import signal

import pytest

from command_line import (
    TINY_SORT,
    rlinf,
    rows,
    start,
    steps_done,
    train,
    train_here,
    wait_for,
    weights,
    worker_processes,
)

REWARD = """
import random


def score(completion, answer):
    return random.SystemRandom().random()
"""
KEYS = TINY_SORT | {
    "run.record": "true",
    "algorithm.max_staleness": 2,
    "reward": "{kind: function, path: random_reward:score}",
    "run.num_steps": 6,
    "run.evaluate_every": 4,
    "run.checkpoint_every": 4,
}


@pytest.fixture(autouse=True)
def _reward(tmp_path, monkeypatch):
    (tmp_path / "random_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def replay(run, output, *arguments):
    return rlinf("replay", run, "--output", output, *arguments)


def assert_replayed(result, output, run, num_steps):
    assert result.returncode == 0, result.stderr
    assert f"replayed {num_steps} steps: samples, rewards and weights are the recorded ones" in result.stdout
    assert (rows(output), weights(output)) == (rows(run), weights(run))


def test_a_replay_ends_with_the_same_weights(tmp_path):
    run = train_here("sort-grpo", tmp_path / "run", KEYS)
    assert_replayed(replay(run, tmp_path / "again"), tmp_path / "again", run, 6)
    assert_replayed(replay(run, tmp_path / "later", "--from", "5"), tmp_path / "later", run, 2)

    record = (run / "record.jsonl").read_text()
    (run / "record.jsonl").write_text(record.replace('"value": 0.', '"value": 0.1', 1))
    result = replay(run, tmp_path / "other")
    assert result.returncode == 1
    assert "step 0 is not the recorded one: actor, weights of rank 0" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout/0", "actor/0", "reward/0", "driver"])
def test_a_killed_run_goes_on_with_what_it_has_recorded_and_is_replayed(tmp_path, victim):
    run = tmp_path / "run"
    process = start("sort-grpo", run, KEYS | {"run.num_steps": 9, "run.checkpoint_every": 3})
    wait_for(lambda: steps_done(run) >= 5, process, "step 5")
    before = (run / "record.jsonl").read_text().splitlines()
    os.kill(worker_processes(run).get(victim, process.pid), signal.SIGKILL)
    process.communicate()
    if victim == "driver":
        train(None, run, {})
    assert (run / "record.jsonl").read_text().splitlines()[: len(before)] == before, "steps were done in another way"
    assert_replayed(replay(run, tmp_path / "again"), tmp_path / "again", run, 9)
