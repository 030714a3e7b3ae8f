"""Small policies of each kind in whole runs: they look, read an instruction and act.

Before the first update each one's probabilities are those of the rollout, and the numbers do not depend on the plan.
"""

import pytest

from command_line import rows, train, weights

RECIPE = """
extends: pushcube-ppo
policy:
  name: %s
  options: {%s}
algorithm: {num_minibatches: 1, num_epochs: 1}
env:
  kind: import
  id: integration_tests.extensions.spots:Spots
  num_steps: 8
  max_episode_steps: 8
  num_eval_episodes: 4
run: {num_steps: 2, evaluate_every: 2, stop_at_score: null}
"""
FLOW = "chunk_size: 2, width: 32, num_layers: 1, image_size: 28, value_width: 16"
SEEING = "width: 32, vision_width: 16, image_size: 28, value_hidden_size: 16"
POLICIES = {
    "pi0, flow-sde": ("pi0", f"noise: flow-sde, {FLOW}"),
    "pi0, flow-noise": ("pi0", f"noise: flow-noise, {FLOW}"),
    "pi05": ("pi05", f"noise: flow-sde, {FLOW}"),
    "smolvla": ("smolvla", f"noise: flow-sde, num_denoising_steps: 2, {FLOW}"),
    "openvla": ("openvla", SEEING),
    "openvla_oft": ("openvla_oft", f"{SEEING}, chunk_size: 2"),
}
PLANS = {
    "collocated": {"mode": "collocated", "cluster.num_devices": 1},
    "disaggregated": {"mode": "disaggregated", "cluster.num_devices": 2},
    "two ranks": {"mode": "collocated", "cluster.num_devices": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_two_steps_of_the_same_numbers_under_every_plan(name, tmp_path):
    recipe = tmp_path / "robot.yaml"
    recipe.write_text(RECIPE % POLICIES[name])
    runs = [train(recipe, tmp_path / plan, keys) for plan, keys in PLANS.items()]
    first, *others = [rows(run) for run in runs]
    assert len(first) == 2
    for row in first:
        assert abs(row["actor/kl"]) < 1e-6
        assert row["actor/clip_fraction"] == 0.0
        assert row["actor/grad_norm"] > 0
    assert others == [first, first]
    assert [weights(run) for run in runs[1:]] == 2 * [weights(runs[0])]


@pytest.mark.slow
def test_the_first_robot_that_a_newcomer_trains(tmp_path):
    """`reach-openvla-ppo` from demonstrations to a step of PPO, in little."""
    pytest.importorskip("metaworld")
    little = {
        "env.num_envs": 4,
        "env.num_groups": 2,
        "env.num_steps": 2,
        "env.num_eval_episodes": 2,
        "sft_warm_up.num_episodes": 2,
        "sft_warm_up.num_steps": 2,
        "run.num_steps": 1,
        "run.evaluate_every": 1,
        "algorithm.num_minibatches": 1,
        "algorithm.num_epochs": 1,
        "mode": "collocated",
        "cluster.num_devices": 1,
    }
    run = train("reach-openvla-ppo", tmp_path / "run", little)
    (row,) = rows(run)
    assert abs(row["actor/kl"]) < 1e-6
    assert row["actor/grad_norm"] > 0
    scores = [row["success_at_end"] for row in rows(run, "evaluations.jsonl")]
    assert len(scores) == 2
