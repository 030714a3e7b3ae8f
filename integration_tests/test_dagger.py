"""DAgger: the same numbers to the bit in every mode and over a resume, budget and demonstrations included."""

import json

import pytest

from command_line import numbers, rows, train, train_here

POINT = '''
import gymnasium as gym
import numpy as np


class Point(gym.Env):
    """A point drives to a goal; its expert simulates a copy of itself."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    observation_space = gym.spaces.Box(-2, 2, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self._seen(), {}

    def step(self, action):
        self.point = np.clip(self.point + 0.2 * action, -1, 1)
        solved = bool(np.linalg.norm(self.goal - self.point) < 0.1)
        return self._seen(), 0.0, solved, False, {"success": solved}

    def expert_actions(self, num_actions):
        point, actions = self.point, []
        for _ in range(num_actions):
            actions.append(np.clip((self.goal - point) / 0.2, -1, 1))
            point = point + 0.2 * actions[-1]
        return np.stack(actions)

    def _seen(self):
        return np.concatenate([self.point, self.goal]).astype(np.float32)
'''
TINY = {
    "env.kind": "import",
    "env.id": "dagger_point:Point",
    "env.num_envs": 8,
    "env.num_groups": 4,
    "env.num_steps": 8,
    "env.max_episode_steps": 12,  # episodes go on from step to step
    "env.num_eval_episodes": 8,
    "policy.chunk_size": 2,
    "actor.num_shards": 2,
    "algorithm.name": "dagger",
    "algorithm.expert_share": 0.5,
    "algorithm.query_rate": 0.3,
    "algorithm.max_expert_actions": 66,  # for less than three steps
    "algorithm.num_updates": 5,
    "algorithm.batch_size": 16,
    "run.num_steps": 4,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
}
PLANS = {
    "disaggregated": {"mode": "disaggregated", "plan.granularity": "{env: 1, policy: 1}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1},
    "hybrid": {"mode": "hybrid"},
    "simulator-processes": {"mode": "collocated", "env.num_processes": 1},
}
TINY_FAUCETS = {
    "policy.hidden_sizes": "[16]",
    "env.num_envs": 4,
    "env.num_groups": 2,
    "env.num_steps": 4,
    "env.num_eval_episodes": 4,
    "sft_warm_up.num_episodes": 2,
    "sft_warm_up.num_steps": 4,
    "sft_warm_up.batch_size": 8,
    "algorithm.num_updates": 2,
    "algorithm.batch_size": 8,
    "run.num_steps": 4,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
}


@pytest.fixture(scope="module", autouse=True)
def point(tmp_path_factory):
    folder = tmp_path_factory.mktemp("point")
    (folder / "dagger_point.py").write_text(POINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory, point):
    path = train_here("env-ppo", tmp_path_factory.mktemp("dagger") / "run", TINY | {"mode": "collocated"})
    return numbers(path)


@pytest.mark.slow
def test_the_expert_is_asked_until_the_budget_is_spent(reference):
    metrics, *_ = reference
    spent = [row["actor/expert_actions"] for row in metrics]
    assert spent[0] < spent[1] < spent[2] == spent[3] == 66


@pytest.mark.parametrize(
    "plan", ["disaggregated", *(pytest.param(p, marks=pytest.mark.slow) for p in PLANS if p[0] != "d")]
)
def test_every_mode_gives_the_same_numbers(tmp_path, reference, plan):
    assert numbers(train_here("env-ppo", tmp_path / "run", TINY | PLANS[plan])) == reference


@pytest.mark.slow
def test_a_resumed_run_continues_to_the_bit_in_another_mode(tmp_path, reference):
    path = train_here("env-ppo", tmp_path / "run", TINY | {"mode": "disaggregated", "run.num_steps": 2})
    train_here(None, path, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(path) == reference


@pytest.mark.slow
def test_demonstrations_are_kept_in_every_mode_and_over_a_resume(tmp_path):
    pytest.importorskip("metaworld")
    path = train("faucet-dagger", tmp_path / "one", TINY_FAUCETS | {"mode": "collocated"})
    (note,) = [n for n in json.loads((path / "manifest.json").read_text())["notes"] if n.startswith("SFT warm-up:")]
    num_demonstrated = int(note.split()[-2])
    assert rows(path)[0]["actor/expert_actions"] == num_demonstrated + 2 * (3 + 1)  # from the second and fourth action
    other = train("faucet-dagger", tmp_path / "two", TINY_FAUCETS | {"mode": "disaggregated", "run.num_steps": 2})
    train(None, other, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(other) == numbers(path)
