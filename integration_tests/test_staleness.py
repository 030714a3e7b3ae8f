"""Runs whose steps overlap: the same numbers whatever the timing, after a killed worker and after a resume."""

import os
import signal

import pytest

from command_line import TINY_SORT, all_gone, numbers, rows, start, steps_done, train, wait_for, worker_processes

pytestmark = pytest.mark.slow

REWARD = """
import os
import time


def score(completion, answer):
    time.sleep(float(os.environ["PAUSE_S"]))
    return sum(map(str.__eq__, completion, answer)) / len(answer)
"""
KEYS = TINY_SORT | {
    "algorithm.max_staleness": 2,
    "reward": "{kind: function, path: paused_reward:score}",
    "run.num_steps": 9,
    "run.evaluate_every": 8,
    "run.checkpoint_every": 4,
}
STALENESS = [0, 1, 2, 2, 0, 1, 2, 2, 0]
"""Of each step: all begin again with the newest weights after the evaluations and checkpoints behind steps 4 and 8."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the reward, which waits as long as the environment variable says."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("overlapping")
        (path / "paused_reward.py").write_text(REWARD)
        patch.setenv("PYTHONPATH", str(path))
        patch.setenv("PAUSE_S", "0")
        yield path


@pytest.fixture(scope="module")
def whole(folder):
    """A run without any delay or interruption."""
    return train("sort-grpo", folder / "whole", KEYS)


def test_each_step_is_as_stale_as_the_bound_and_the_pauses_say(whole):
    steps = rows(whole)
    for name in ("rollout/staleness_mean", "rollout/staleness_max"):
        assert [row[name] for row in steps] == STALENESS
    assert any(row["actor/grad_norm"] > 0 for row in steps)
    assert any(row["actor/rollout_kl"] > 1e-4 for row in steps), "the weights that sampled are not older"


def test_the_numbers_do_not_depend_on_the_timing(folder, whole, monkeypatch):
    monkeypatch.setenv("PAUSE_S", "0.01")
    assert numbers(train("sort-grpo", folder / "delayed", KEYS)) == numbers(whole)


@pytest.mark.parametrize("victim", ["rollout/0", "driver"])
def test_a_run_that_is_killed_in_the_middle_goes_on_to_the_same_numbers(folder, whole, victim):
    output = folder / victim.partition("/")[0]
    process = start("sort-grpo", output, KEYS)
    wait_for(lambda: steps_done(output) >= 5, process, "step 5")
    workers = worker_processes(output)
    os.kill(workers.get(victim, process.pid), signal.SIGKILL)
    process.communicate()
    if victim == "driver":
        assert all_gone(workers.values())
        train(None, output, {})
    else:
        assert process.returncode == 0, "the run did not go on"
    assert numbers(output) == numbers(whole)
