"""Files of training episodes: what is kept, and what `rlinf replay` says where something is missing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.episodes.screen import component_line, largest_rewards, reward_rows
from rlinf.errors import UserError
from rlinf.jobs.embodied.kept_episodes import KeptEpisodes, StepEpisodes
from rlinf.run_folder import RunFolder
from rlinf.run_folder.episodes import EpisodeFiles, episode_files
from rlinf_envs import EnvSpec, EpisodeEnd, EpisodeKeeper, KeptEpisode, make_env, open_demonstrations, pack_episodes
from rlinf_workers import FlowRun
from rlinf_workers.roles import GroupEpisodes

KEYS = ["--env.num_envs=4", "--env.max_episode_steps=9", "--env.num_steps=20"]


def episode_of(length: int, env_index: int = 0, **end: Any) -> KeptEpisode:
    facts = {"episode_index": 0, "seed": 5, "return_": 1.5, "success_once": None, "success_at_end": None} | end
    return KeptEpisode(
        end=EpisodeEnd(env_index=env_index, length=length, **facts),
        actions=np.ones((length, 2), np.float32),
        rewards=np.arange(length, dtype=np.float32),
    )


def kept_by(groups: list[GroupEpisodes], folder: Path, step: int, **env: Any) -> StepEpisodes:
    config = SimpleNamespace(
        **{"num_envs": 6, "num_groups": 2, "episodes_megabytes": 1, "episodes_per_step": None} | env
    )
    episodes = KeptEpisodes(cast(Any, config))
    episodes.take(FlowRun(metrics={}, collected={"episodes": groups}, shown_rows=[], spans=[], start_s=0, duration_s=0))
    episodes.write(cast(Any, SimpleNamespace(folder=folder, begun_after=step - 1)), step)
    return StepEpisodes.load(episode_files(folder)[step])


def test_environments_are_counted_over_the_groups(tmp_path):
    columns = [
        pack_episodes(own)
        for own in ([episode_of(2, 1), episode_of(3, 0)], [episode_of(4, 2, episode_index=3), episode_of(1, 2)])
    ]
    groups = [
        GroupEpisodes(group=g, episodes={name: torch.from_numpy(column) for name, column in of.items()})
        for g, of in enumerate(columns)
    ]
    step = kept_by(groups, tmp_path, 120)
    assert (step.step, step.weights_step) == (120, 119)
    order = [(one.end.env_index, one.end.episode_index, one.end.length) for one in step.episodes]
    assert order == [(0, 0, 3), (1, 0, 2), (5, 0, 1), (5, 3, 4)]
    assert kept_by([GroupEpisodes(group=0)], tmp_path, 121).episodes == ()
    whole = kept_by(groups, tmp_path, 122, episodes_per_step=4)
    assert [one.end.env_index for one in whole.episodes] == [0, 1, 2, 2], "they are starts, whatever the group"


def test_the_oldest_steps_are_deleted_where_all_exceed_the_limit(tmp_path):
    files = EpisodeFiles(tmp_path, 25)
    for step in (1, 2, 3, 4):
        files.write(step, bytes(10))
    assert list(episode_files(tmp_path)) == [3, 4]
    EpisodeFiles(tmp_path, 25).write(5, bytes(100))
    assert list(episode_files(tmp_path)) == [5], "the newest one is always kept"
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["step-000005.npz"]


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    def opened(resume: bool) -> RunFolder:
        return RunFolder(tmp_path / "run", config_yaml="job: x\n", command=[], keep_checkpoints=1, resume=resume)

    with opened(resume=False) as folder:
        for step in (1, 2, 3):
            EpisodeFiles(folder.path, 9).write(step, b"x")
            if step == 2:
                with folder.new_checkpoint(2, {}):
                    pass
    with opened(resume=True) as folder:
        assert list(episode_files(folder.path)) == [1, 2]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with the episodes of step 7: environments 0 and 1 of CartPole."""
    config = load_config("env-ppo", parse_overrides(KEYS))
    assert isinstance(config, EmbodiedConfig)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    keeper = EpisodeKeeper(make_env(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=2, max_episode_steps=9)))
    keeper.reset([3, 4])
    for _ in range(12):
        keeper.step(torch.tensor([0, 1]))
    episodes = sorted(keeper.take(cuts=True), key=lambda one: (one.end.env_index, one.end.episode_index))
    step = StepEpisodes(step=7, weights_step=6, episodes=tuple(episodes))
    EpisodeFiles(folder, 10**9).write(7, step.save())
    return folder


def test_an_episode_is_listed_and_replayed(rlinf, run):
    steps = rlinf("replay", str(run), "--list").out.splitlines()
    assert steps[1].split()[:2] == ["7", "4"]
    lines = rlinf("replay", str(run), "--list", "--step", "7", "--env", "1").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "0"], ["1", "1"]]
    assert "ended" in lines[1] and "cut by the step's end" in lines[2]
    for episode in ("0", "1"):
        done = rlinf("replay", str(run), "--step", "7", "--env", "1", "--episode", episode, "--no-film")
        assert (done.code, done.err) == (0, "")
        assert "equal the kept ones to the bit" in done.out and "rewards at every action" in done.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "7"], "give the step and the environment: --step S --env E"),
        (["--env", "1"], "give the step and the environment"),
        (["--step", "8", "--env", "0"], "--step 8: the episodes of steps 7 to 7 are kept, counted from 1"),
        (["--step", "6", "--env", "0"], "older ones were deleted to stay below env.episodes_megabytes"),
        (["--step", "7", "--env", "4"], "--env 4: the run has environments 0 to 3"),
        (["--step", "7", "--env", "3"], "--env 3: no episode of this environment ended in step 7"),
        (["--step", "7", "--env", "1", "--episode", "2"], "--episode 2: environment 1 has 2 in step 7"),
        (["--step", "7", "--env", "1", "--from", "3"], "--from is for replays of whole runs"),
        (["--step", "7", "--env", "1", "--no-film", "--env.id", "None-v0"], "env.id='None-v0': "),
        (["--step", "7", "--env", "1", "--no-film", "--continue-at", "9"], "9 actions, and goes on after 0 to 8"),
        (["--step", "7", "--env", "1", "--checkpoint", "best"], "--checkpoint is for --continue-at"),
        (["--step", "7", "--env", "1", "--fps", "10"], "--fps is for --export"),
        (["--export", "set", "--list"], "--export does not go together with --list"),
        (["--export", "set"], "none of the kept episodes ended as solved"),
        (["--export", "run"], "run: the folder is not empty"),
        (["--step", "7", "--env", "1", "--no-film", "--env.id", "Pendulum-v1"], "does not take the kept actions"),
    ],
)
def test_what_is_not_there_is_said(refused, run, arguments, text):
    assert text in refused("replay", str(run), *arguments)


SUM = """
import gymnasium
import numpy as np


class Sum(gymnasium.Env):
    "Solved while the sum of the actions is above its start, which is the seed modulo 3."

    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.sum = seed % 3, 0.0
        return np.array([self.start], np.float32), {}

    def step(self, action):
        self.sum += float(action[0])
        is_solved = self.sum > self.start
        return np.array([self.sum], np.float32), float(is_solved), False, False, {"success": is_solved}
"""


def test_successes_become_a_dataset_and_what_differs_is_left_out(rlinf, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    (tmp_path / "sums.py").write_text(SUM)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(
        "env-ppo", parse_overrides(["--env.kind=import", "--env.id=sums:Sum", "--env.max_episode_steps=3"])
    )
    keeper = EpisodeKeeper(make_env(EnvSpec(kind="import", id="sums:Sum", num_envs=4, max_episode_steps=3)))
    keeper.reset([3, 4, 5, 6])  # solved above 0, 1, 2 and 0
    for _ in range(3):
        keeper.step(torch.tensor([[0.75], [0.5], [0.5], [0.25]]))
    other = episode_of(3, 4, success_at_end=True)  # of another simulator
    episodes = (*keeper.take(cuts=False), replace(other, actions=np.ones((3, 1), np.float32)))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    EpisodeFiles(folder, 10**9).write(1, StepEpisodes(step=1, weights_step=0, episodes=episodes).save())
    done = rlinf("replay", str(folder), "--export", "set")
    assert done.err == ""
    assert done.out.splitlines()[0] == "set: 3 successful episodes, 9 actions"
    assert "left out, as its replay differs: step-000001-env-4: action 2" in done.out and done.code == 1
    read = open_demonstrations("lerobot", tmp_path / "set")
    actions = [one.actions.flatten().tolist() for one in read]
    assert actions == [[0.75] * 3, [0.5] * 3, [0.25] * 3]
    assert [one.rewards.tolist() for one in read] == [[1, 1, 1], [0, 0, 1], [1, 1, 1]]
    assert read[1].observations["state"].flatten().tolist() == [1, 0.5, 1]
    assert rlinf("replay", str(folder), "--export", "other", "--env", "1").code == 0
    assert len(open_demonstrations("lerobot", tmp_path / "other")) == 1


def test_a_damaged_file_a_run_without_episodes_and_one_of_a_language_model(refused, run, tmp_path):
    file = episode_files(run)[7]
    file.write_bytes(file.read_bytes()[:200])
    assert "step-000007.npz is damaged" in refused("replay", str(run), "--list", "--step", "7")
    file.unlink()
    assert "no training episodes are kept" in refused("replay", str(run), "--list")
    (run / "config.yaml").write_text(to_yaml(load_config("sort-grpo", [])))
    assert "language model" in refused("replay", str(run), "--step", "1", "--env", "0")


def test_rewards_are_condensed():
    rewards = np.zeros(20, np.float32)
    assert largest_rewards(rewards) == "all rewards are 0"
    rewards[[3, 9]] = 0.5, -2
    assert largest_rewards(rewards) == "rewards at 2 of 20 actions; the largest: -2 at action 10, 0.5 at action 4"
    assert reward_rows(rewards)[:2] == [("1-3", "0", "0", "0"), ("4-6", "0.5", "0", "0.5")]
    assert reward_rows(rewards, {"reach": rewards / 2})[1] == ("4-6", "0.5", "0", "0.5", "0.25")
    halves = {"reach": rewards / 2, "grasp": rewards / 2}
    assert component_line(rewards, halves) == "components of the reward: reach -0.75, grasp -0.75; they add up to it"
    assert "they do not add up to it" in component_line(rewards, {"reach": rewards / 2})
    assert reward_rows(rewards[3:5]) == [("1", "0.5", "0.5", "0.5"), ("2", "0", "0", "0")]
    with pytest.raises(UserError, match="damaged"):
        StepEpisodes.load(Path(__file__))
