"""Training steps of whole episodes: numbers and kept episodes depend neither on the simulators nor on the mode."""

import json

import pytest

from command_line import rlinf, train_and_kill, train_here
from rlinf.jobs.embodied.kept_episodes import StepEpisodes
from rlinf.run_folder.episodes import episode_files

KEYS = {
    "env.episodes_per_step": 24,
    "env.num_steps": 40,
    "env.max_episode_steps": 40,
    "env.num_eval_episodes": 8,
    "algorithm.name": "grpo",
    "algorithm.group_size": 4,
    "algorithm.dynamic_sampling": "true",
    "algorithm.oversampling": 2.0,
    "algorithm.num_minibatches": 2,
    "algorithm.num_epochs": 2,
    "actor.num_shards": 2,
    "run.num_steps": 3,
    "run.evaluate_every": 3,
    "run.checkpoint_every": 1,
    "run.stop_at_score": "null",
}
ONE = {"mode": "collocated", "env.num_envs": 1, "env.num_groups": 1}
MANY = {"mode": "disaggregated", "env.num_envs": 10, "env.num_groups": 2, "env.num_processes": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_here("env-ppo", tmp_path_factory.mktemp("runs") / "run", KEYS | ONE)


def numbers(folder):
    rows = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("env/", "actor/", "rollout/", "eval/")
    return [
        {name: value for name, value in row.items() if name.startswith(names) and name != "env/idle_fraction"}
        for row in rows
    ]


def episodes(folder):
    return {step: path.read_bytes() for step, path in episode_files(folder).items()}


@pytest.mark.slow
def test_ten_simulators_in_processes_train_as_one_does(run, tmp_path):
    other = train_here("env-ppo", tmp_path / "run", KEYS | MANY)
    assert numbers(other) == numbers(run)
    assert episodes(other) == episodes(run)
    trained = numbers(run)[0]["env/trained_groups_fraction"]
    first = StepEpisodes.load(episode_files(run)[1])
    assert len(first.episodes) * trained == 24, "the groups that were trained are the number asked for"


def test_an_episode_is_replayed_by_its_start(run):
    done = rlinf("replay", run, "--step", "2", "--env", "3", "--episode", "2", "--no-film")
    assert done.returncode == 0 and "rewards and outcome equal the kept ones to the bit" in done.stdout
    assert "step 2, start 3, episode 2: " in done.stdout


@pytest.mark.slow
def test_a_step_is_done_again_after_its_worker_was_killed(run, tmp_path):
    done, _ = train_and_kill("env-ppo", tmp_path / "killed", KEYS | ONE, "env/0", after_step=2)
    assert done.returncode == 0
    assert numbers(tmp_path / "killed") == numbers(run)
    assert episodes(tmp_path / "killed") == episodes(run)
