"""Runs whose steps overlap: the same numbers whatever the timing, after a killed worker and after a resume."""

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from command_line import (
    TINY_SORT,
    all_gone,
    numbers as all_numbers,
    rows,
    start,
    steps_done,
    train,
    wait_for,
    worker_processes,
)

pytestmark = pytest.mark.slow

MODULE = """
import os
import time

from gymnasium.envs.classic_control import CartPoleEnv


def score(completion, answer):
    time.sleep(float(os.environ["PAUSE_S"]))
    return sum(map(str.__eq__, completion, answer)) / len(answer)


class PausedCartPole(CartPoleEnv):
    def step(self, action):
        time.sleep(float(os.environ["PAUSE_S"]))
        return super().step(action)
"""
KEYS = {
    "algorithm.max_staleness": 2,
    "run.num_steps": 9,
    "run.evaluate_every": 8,
    "run.checkpoint_every": 4,
}
POLE = {
    "mode": "disaggregated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
    "env.kind": "import",
    "env.id": "paused:PausedCartPole",
    "env.num_envs": 4,
    "env.num_steps": 16,
    "env.max_episode_steps": 40,
    "env.num_eval_episodes": 4,
    "policy": "{name: actor_critic, hidden_sizes: [16], normalize_observations: true}",
    "algorithm.num_minibatches": 2,
    "algorithm.num_epochs": 2,
}
"""A step is shorter than an episode, so that episodes go on with weights of several versions."""


AHEAD = {"env.episodes_per_step": 12, "env.num_steps": 40, "env.num_processes": 1, "env.num_groups": 2}
"""Steps of whole episodes; simulators that one does not need begin the next one."""


@dataclass(frozen=True)
class Case:
    """A recipe, its settings, and the workers that are killed."""

    recipe: str
    keys: dict[str, Any]
    victims: tuple[str, ...]

    @property
    def staleness(self) -> list[int]:
        """Of each step: all begin again with the newest weights after the evaluations and checkpoints behind steps 4
        and 8."""
        return [min(step % 4, self.keys["algorithm.max_staleness"]) for step in range(9)]


SORT = TINY_SORT | KEYS | {"reward": "{kind: function, path: paused:score}"}
LATE = SORT | {
    "rollout.sampler": "as_finished",
    "rollout.engine_options": "{refill: true}",
    "plan.num_ranks.rollout": 1,
    "rollout.max_new_tokens": 12,
}
"""Groups that outlive a step; untrained, so that lengths differ."""
CASES = {
    "language": Case("sort-grpo", SORT, ("rollout/0",)),
    "as_finished": Case("sort-grpo", LATE, ("rollout/0", "actor/0")),
    "robots-1": Case("env-ppo", POLE | KEYS | {"algorithm.max_staleness": 1}, ()),
    "robots-2": Case("env-ppo", POLE | KEYS, ("policy/0", "env/0")),
    "ahead": Case("env-ppo", POLE | KEYS | AHEAD, ("policy/0", "env/0")),
}


def numbers(path):
    """All but how long simulators had no episode, which depends on the timing."""
    steps, *others = all_numbers(path)
    return [{name: value for name, value in row.items() if name != "env/idle_fraction"} for row in steps], *others


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has a reward and an environment, which wait as long as the environment variable says."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("overlapping")
        (path / "paused.py").write_text(MODULE)
        patch.setenv("PYTHONPATH", str(path))
        patch.setenv("PAUSE_S", "0")
        yield path


@pytest.fixture(scope="module")
def whole(folder):
    """Name of a case -> its run without any delay or interruption."""
    outputs = {}

    def of(name):
        if name not in outputs:
            outputs[name] = train(CASES[name].recipe, folder / f"whole-{name}", CASES[name].keys)
        return outputs[name]

    return of


@pytest.mark.parametrize("name", CASES.keys() - {"as_finished"})
def test_each_step_is_as_stale_as_the_bound_and_the_pauses_say(whole, name):
    steps = rows(whole(name))
    for metric in ("rollout/staleness_mean", "rollout/staleness_max"):
        assert [row[metric] for row in steps] == CASES[name].staleness
    assert any(row["actor/grad_norm"] > 0 for row in steps)


def test_late_groups_have_tokens_of_both_steps(whole):
    steps = rows(whole("as_finished"))
    assert all(0 < row["rollout/late_fraction"] < 1 for row in steps[1:])
    assert max(row["rollout/staleness_max"] for row in steps) == 2
    assert any(row["rollout/staleness_1_fraction"] and row["rollout/staleness_2_fraction"] for row in steps)


def test_the_weights_that_sampled_are_older_than_those_that_train(whole):
    assert any(row["actor/rollout_kl"] > 1e-4 for row in rows(whole("language")))


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_do_not_depend_on_the_timing(folder, whole, monkeypatch, name):
    expected = numbers(whole(name))
    monkeypatch.setenv("PAUSE_S", "0.01")
    assert numbers(train(CASES[name].recipe, folder / f"delayed-{name}", CASES[name].keys)) == expected


@pytest.mark.parametrize(
    ("name", "victim"), [(name, victim) for name, case in CASES.items() for victim in (*case.victims, "driver")]
)
def test_a_run_that_is_killed_in_the_middle_goes_on_to_the_same_numbers(folder, whole, name, victim):
    expected, output = numbers(whole(name)), folder / f"{name}-{victim.partition('/')[0]}"
    process = start(CASES[name].recipe, output, CASES[name].keys)
    wait_for(lambda: steps_done(output) >= 5, process, "step 5")
    workers = worker_processes(output)
    os.kill(workers.get(victim, process.pid), signal.SIGKILL)
    process.communicate()
    if victim == "driver":
        assert all_gone(workers.values())
        train(None, output, {})
    else:
        assert process.returncode == 0, "the run did not go on"
    assert numbers(output) == expected


def test_steps_do_not_overlap_while_mode_auto_measures(folder):
    """The run is shorter than the measurement, so it stays collocated."""
    output = train("sort-grpo", folder / "auto", CASES["language"].keys | {"mode": "auto", "run.num_steps": 5})
    assert [row["rollout/staleness_max"] for row in rows(output)] == [0] * 5
