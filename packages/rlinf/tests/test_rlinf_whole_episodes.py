"""Training steps of whole episodes: the numbers do not depend on how many simulators there are."""

import pytest
import torch

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.embodied.flow import waiting_notes
from rlinf.program.embodied import train

CORRIDOR = """
import gymnasium as gym
import numpy as np

class Corridor(gym.Env):
    '''Walks to a place between 3 and 6 with steps of 0 or 1; the reward is that of arriving.'''
    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-9, 9, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.normal(), 3 + 3 * self.np_random.random()
        return self.show(), {}

    def step(self, action):
        self.place += float(action) * self.np_random.random()
        arrived = bool(self.place > self.goal)
        return self.show(), float(arrived), arrived, False, {"success": arrived}

    def show(self):
        return np.array([self.place, self.goal, 1], np.float32)
"""
RECIPE = """
job: embodied
name: corridor
run: {num_steps: 2}
env: {kind: import, id: "corridor:Corridor", num_envs: 4, num_groups: 1, num_steps: 12, max_episode_steps: 12,
  episodes_per_step: 16, num_eval_episodes: 4}
policy: {name: actor_critic, hidden_sizes: [64], normalize_observations: true}
actor: {learning_rate: 1.0e-2, num_shards: 2}
"""
ALGORITHMS = {
    "grpo": "{name: grpo, group_size: 4, num_minibatches: 2, num_epochs: 2, target_kl: null}",
    "weighed": "{name: grpo, group_size: 4, num_minibatches: 2, num_epochs: 2, episode_aggregation: episode_mean}",
    "dynamic": "{name: grpo, group_size: 2, num_minibatches: 2, dynamic_sampling: true, oversampling: 3.0}",
    "ppo": "{name: ppo, num_minibatches: 2, num_epochs: 2, target_kl: null}",
}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains with overrides; returns the metrics of the steps and the weights."""
    (tmp_path / "corridor.py").write_text(CORRIDOR)
    monkeypatch.syspath_prepend(tmp_path)

    def run(algorithm, **overrides):
        path, folder = tmp_path / "corridor.yaml", tmp_path / str(overrides).replace("/", "")
        path.write_text(f"{RECIPE}algorithm: {ALGORITHMS[algorithm]}\n")
        folder.mkdir()
        texts = [text for key, value in overrides.items() for text in (f"--env.{key}", str(value))]
        metrics = list(train(load_config(str(path), parse_overrides(texts)), folder))
        return metrics, (folder / "model" / "model.safetensors").read_bytes()

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


SIMULATORS = [(1, 1, 0), (6, 2, 0), (16, 1, 0)]
"""Environments, groups and processes of a group."""


@pytest.mark.parametrize(
    ("algorithm", "simulators"),
    [
        ("grpo", [*SIMULATORS, (3, 3, 0), (8, 4, 0)]),
        ("dynamic", [*SIMULATORS, (6, 2, 1)]),
        ("weighed", [(6, 2, 0)]),
        ("ppo", SIMULATORS),
    ],
)
def test_numbers_do_not_depend_on_the_simulators(trained, algorithm, simulators):
    expected, weights = trained(algorithm)
    assert 0 < expected[0]["env/success_once"] < 1
    for num_envs, num_groups, num_processes in simulators:
        got, others = trained(algorithm, num_envs=num_envs, num_groups=num_groups, num_processes=num_processes)
        for step, (metrics, reference) in enumerate(zip(got, expected, strict=True)):
            assert metrics.keys() == reference.keys()
            differ = {name for name in metrics if metrics[name] != reference[name]} - {"env/idle_fraction"}
            assert not differ, (step, num_envs, num_groups)
        assert others == weights


def test_simulators_that_wait_but_need_not_are_noted():
    def notes(*overrides):
        keys = ["--env.episodes_per_step=16", "--env.num_steps=200", "--env.max_episode_steps=200", *overrides]
        config = load_config("env-ppo", parse_overrides(keys))
        assert isinstance(config, EmbodiedConfig)
        return waiting_notes(config)

    overlapping = ("--mode=disaggregated", "--cluster.num_devices=2", "--algorithm.max_staleness=1")
    assert notes() == notes(*overlapping, "--env.num_processes=1") == ()
    assert "--env.num_processes 1 they begin the next step" in notes(*overlapping)[0]
