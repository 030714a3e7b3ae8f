"""Kept training episodes: the same in every mode, after a resume and after kills, and their replays are equal."""

import json

import pytest
import torch

from command_line import SHORT_PUSH, rlinf, train_and_kill, train_here
from rlinf import load_policy
from rlinf.jobs.embodied.kept_episodes import StepEpisodes
from rlinf.run_folder.episodes import episode_files
from rlinf_envs import EnvSpec, make_env

FRAGILE = """
import os
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np


class Fragile(gym.Wrapper):
    "A pendulum whose simulator is killed once, after 31 actions of a process, if the folder has a file `kill`."

    render_mode = "rgb_array"

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))
        self.num_actions = 0

    def step(self, action):
        self.num_actions += 1
        mark = Path(__file__).with_name("kill")
        if self.num_actions == 31 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def render(self):
        return np.full((32, 32, 3), min(self.num_actions, 255), np.uint8)
"""
KEYS = SHORT_PUSH | {
    "env.kind": "import",
    "env.id": "fragile:Fragile",
    "env.options": "{}",
    "env.num_envs": 8,
    "env.num_processes": 1,
    "env.max_episode_steps": 25,
    "actor.num_shards": 1,
    "run.num_steps": 4,
    "run.evaluate_every": 4,
    "run.checkpoint_every": 1,
}
"""Episodes of 25 actions go on over steps of 20."""


@pytest.fixture(scope="module", autouse=True)
def fragile_env(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "fragile.py").write_text(FRAGILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, fragile_env):
    return train_here("pushcube-ppo", tmp_path_factory.mktemp("runs") / "run", KEYS | {"mode": "collocated"})


def episodes(folder):
    return {step: path.read_bytes() for step, path in episode_files(folder).items()}


@pytest.mark.slow
def test_every_action_is_in_one_episode(run):
    steps = [StepEpisodes.load(path) for path in episode_files(run).values()]
    assert [(step.step, step.weights_step) for step in steps] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert [len(step.episodes) for step in steps] == [0, 8, 8, 8]
    ended = [one.end for step in steps for one in step.episodes]
    assert {(end.env_index, end.episode_index) for end in ended} == {(env, i) for env in range(8) for i in range(3)}
    for step in steps[1:]:
        metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[step.step - 1])["metrics"]
        returns = [one.end.return_ for one in step.episodes]
        assert metrics["env/return"] == pytest.approx(sum(returns) / len(returns), rel=1e-12)


def test_they_are_the_same_in_another_mode_and_after_a_killed_simulator(run, tmp_path, fragile_env):
    (fragile_env / "kill").touch()
    other = train_here("pushcube-ppo", tmp_path / "run", KEYS | {"mode": "disaggregated"})
    assert not (fragile_env / "kill").exists()
    notes = json.loads((other / "manifest.json").read_text())["notes"]
    assert any("its episodes were begun again in a new process" in note for note in notes)
    assert episodes(other) == episodes(run)


@pytest.mark.slow
def test_they_are_the_same_after_a_resume_and_a_killed_worker(run, tmp_path):
    keys = KEYS | {"mode": "collocated"}
    resumed = train_here("pushcube-ppo", tmp_path / "resumed", keys | {"run.num_steps": 2})
    (resumed / "episodes" / "step-000009.npz").write_bytes(b"of a step that has to be done again")
    train_here(None, resumed, {"run.num_steps": 4})
    assert episodes(resumed) == episodes(run)
    done, _ = train_and_kill("pushcube-ppo", tmp_path / "killed", keys, "env/0", after_step=2)
    assert done.returncode == 0
    assert episodes(tmp_path / "killed") == episodes(run)


@pytest.mark.slow
def test_a_replay_is_equal_and_says_what_happened(run, tmp_path):
    listed = rlinf("replay", run, "--list", "--step", "2").stdout
    assert len(listed.splitlines()) == 9 and listed.splitlines()[0].split()[:3] == ["env", "episode", "task"]
    for env in (0, 7):
        done = rlinf("replay", run, "--step", "2", "--env", env, "--no-film")
        assert done.returncode == 0 and "rewards and outcome equal the kept ones to the bit" in done.stdout
    assert "step 2, environment 7 (row 1 of group 3), episode 0: fragile:Fragile" in done.stdout
    assert "acted by the weights after step 1" in done.stdout
    other = rlinf("replay", run, "--step", "2", "--env", "0", "--no-film", "--env.max_episode_steps", "9")
    assert other.returncode == 1
    assert "not the kept episode. action 9: the episode ended, and went on for 25 actions" in other.stdout


def test_a_replay_is_filmed(run, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    film = tmp_path / "film.mp4"
    assert f"film: {film}" in rlinf("replay", run, "--step", "3", "--env", "1", "--film", film).stdout
    assert film.stat().st_size > 1000


def test_the_policy_goes_on_from_the_middle(run):
    policy, episode = load_policy(run), StepEpisodes.load(episode_files(run)[3]).episodes[1]
    env = make_env(EnvSpec(kind="import", id="fragile:Fragile", num_envs=1, max_episode_steps=25))
    observation = env.reset([episode.end.seed])
    for time in range(25):
        action = torch.from_numpy(episode.actions[None, time] if time < 10 else policy.act(observation["state"])[:, 0])
        result = env.step(action)
        observation = result.observation
    done = rlinf("replay", run, "--step", "3", "--env", "1", "--no-film", "--continue-at", "10")
    assert done.returncode == 0 and "replayed up to action 10: rewards equal to the bit" in done.stdout
    returned = f"{result.episodes[0].return_:.6g}"
    assert f"continued by step-000004: 25 actions, return {returned}, ended" in done.stdout
    assert returned != f"{episode.end.return_:.6g}"
