"""Environments whose packages are only where their role runs."""

from pathlib import Path

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs import prepare
from rlinf.jobs.embodied import EmbodiedJob
from rlinf.jobs.env_interface import probe
from rlinf_envs import EnvSpec
from rlinf_workers.testing.environments import second_environment

ROBOTS = """
import gymnasium as gym
import numpy as np

class Arm(gym.Env):
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gym.spaces.Box(-9.0, 9.0, (3,), np.float32)
    def reset(self, *, seed=None, options=None): return np.zeros(3, np.float32), {}
    def step(self, action): return np.zeros(3, np.float32), 0.0, False, False, {"success": True}

class NoLicence(Arm):
    def __init__(self): raise RuntimeError("no licence for the simulator")
"""


def test_an_environment_is_looked_at_where_its_role_runs(tmp_path: Path):
    python = second_environment(tmp_path / "environment")
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    (packages / "robots.py").write_text(ROBOTS)

    def spec(name: str) -> EnvSpec:
        return EnvSpec(kind="import", id=f"robots:{name}", num_envs=2, max_episode_steps=5)

    with pytest.raises(UserError, match="No module named 'robots'"):
        probe(spec("Arm"))
    keys = {"kind": "import", "id": "robots:Arm", "options": "{}"}
    overrides = [f"--environments.env={python}", *(f"--env.{key}={value}" for key, value in keys.items())]
    job = prepare(load_config("pushcube-ppo", parse_overrides(overrides)))
    assert isinstance(job, EmbodiedJob) and job.score.name == "success_at_end"
    assert [found.path for found in job.environments.values()] == [python]
    with pytest.raises(UserError, match="no licence for the simulator") as caught:
        probe(spec("NoLicence"), python)
    assert str(caught.value).startswith(f"env.id='robots:NoLicence' in {python}: RuntimeError: ")
    assert "raised in " in str(caught.value) and "robots.py:12" in str(caught.value)
