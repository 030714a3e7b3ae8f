"""A policy of one's own, named by its import path in a recipe; and discrete actions, learned."""

import pytest
import torch

from command_line import rows, train, train_here, weights
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.testing.policies import check_policy

CARTPOLE = {
    "env.kind": "gymnasium",
    "env.id": "CartPole-v1",
    "run.stop_at_score": "null",
    "cluster.num_devices": 1,
}
PAIRS = """
extends: pushcube-ppo
policy:
  name: integration_tests.extensions.policy:Pairs
  options: {width: 16}
algorithm: {num_minibatches: 4, num_epochs: 2}
env: {num_steps: 20, max_episode_steps: 20, num_eval_episodes: 8}
run: {num_steps: 10, evaluate_every: 10}
"""


def test_the_policy_of_the_docs_conforms():
    from integration_tests.extensions.policy import Pairs

    fields = {"state": FieldSpec(shape=(4,), dtype="float32")}
    actions = ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(1))
    check_policy(Pairs, fields, actions)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "pairs.yaml"
    path.write_text(PAIRS)
    return path


@pytest.fixture(scope="module")
def collocated(recipe, tmp_path_factory):
    return train_here(recipe, tmp_path_factory.mktemp("pairs") / "run", CARTPOLE | {"mode": "collocated"})


def test_a_policy_of_ones_own_trains_ten_steps(collocated):
    metrics = rows(collocated)
    assert len(metrics) == 10
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
    assert any("trunk.0.weight" in name for name in weights(collocated))


@pytest.mark.slow
def test_a_policy_of_ones_own_has_the_same_numbers_under_another_plan(recipe, collocated, tmp_path):
    run = train(recipe, tmp_path / "run", CARTPOLE | {"mode": "disaggregated", "cluster.num_devices": 2})
    assert rows(run) == rows(collocated)
    assert weights(run) == weights(collocated)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_cartpole_is_learned(tmp_path, chunk_size):
    """An untrained policy holds the pole for about 20 steps of 200."""
    changes = {
        "mode": "collocated",
        "env.max_episode_steps": 200,
        "env.num_eval_episodes": 16,
        "algorithm.gamma": 0.98,
        "policy.chunk_size": chunk_size,
        "run.num_steps": 40,
        "run.evaluate_every": 5,
    }
    run = train("pushcube-ppo", tmp_path / "run", CARTPOLE | changes)
    returns = [row["return"] for row in rows(run, "evaluations.jsonl")]
    assert max(returns) >= 190, returns
