"""Recorded runs whose rewards are drawn at random: a replay ends with the same weights."""

import json
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
from staleness_checker import check

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
    (tmp_path / "patient.py").write_text(PATIENT)
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
    assert "step 0 is not the recorded one: actor, weights: " in result.stderr


PATIENT = """
import threading

from rlinf_workers.engines import HuggingFaceEngine
from rlinf_workers.engines.huggingface.spec import SPEC

WAITING_STEP = 8


class Patient(HuggingFaceEngine):
    spec = SPEC

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._offered, self._first_version, self._step, self._begun = threading.Event(), None, None, 0
        self._compute, self._slots._step = self._slots._step, self._compute_patiently

    def submit(self, prompts, sampling, *, seed, step):
        if sampling.temperature and step != self._step:
            self._step, self._begun = step, self.num_steps
            self._first_version = self._version if step == 0 else self._first_version
        super().submit(prompts, sampling, seed=seed, step=step)

    def weights_received(self, policy_version):
        self._offered.clear()
        super().weights_received(policy_version)

    def interrupt(self, at_step=0):
        super().interrupt(at_step)
        if not at_step:
            self._offered.set()

    def _compute_patiently(self):
        if self._step and self.num_steps == self._begun + WAITING_STEP:
            assert self._version == self._first_version + self._step or self._offered.wait(300)
        return self._compute()
"""
TAKES = KEYS | {
    "algorithm.max_staleness": 1,
    "rollout.engine": "patient:Patient",
    "rollout.engine_options": "{refill: true}",
    "rollout.on_new_weights": "keep",
    "rollout.max_new_tokens": 12,
    "run.evaluate_every": 100,
    "run.checkpoint_every": 100,
}
"""Its engine waits in the middle of each step but the first until newer weights are there."""


def takes_of(run):
    record = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    return [one for row in record for _, one in row["decisions"]["rollout"] if "took" in one]


@pytest.mark.slow
def test_completions_go_on_with_weights_that_come_meanwhile_and_are_replayed(tmp_path):
    run = train_here("sort-grpo", tmp_path / "run", TAKES)
    outcome = check(run)
    assert outcome.mistakes == [] and outcome.num_takes == 5 and outcome.num_mixed_groups
    assert_replayed(replay(run, tmp_path / "again"), tmp_path / "again", run, 6)
    assert takes_of(tmp_path / "again") == takes_of(run)


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
