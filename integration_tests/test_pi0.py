"""A small pi0 in a whole run: it looks, reads an instruction and denoises chunks of actions."""

import pytest

from command_line import rows, train, weights

RECIPE = """
extends: pushcube-ppo
policy:
  name: pi0
  options: {noise: %s, chunk_size: 2, width: 32, num_layers: 1, image_size: 28, value_width: 16}
algorithm: {num_minibatches: 1, num_epochs: 1, bootstrap_at_termination: false}
env:
  kind: import
  id: integration_tests.extensions.spots:Spots
  num_steps: 8
  max_episode_steps: 8
  num_eval_episodes: 4
run: {num_steps: 2, evaluate_every: 2, stop_at_score: null}
"""


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["flow-sde", "flow-noise"])
def test_pi0_trains_two_steps_of_the_same_numbers_under_two_plans(noise, tmp_path):
    recipe = tmp_path / "pi0.yaml"
    recipe.write_text(RECIPE % noise)
    plans = {"collocated": 1, "disaggregated": 2}
    runs = [train(recipe, tmp_path / mode, {"mode": mode, "cluster.num_devices": num}) for mode, num in plans.items()]
    found = [rows(run) for run in runs]
    assert len(found[0]) == 2
    for row in found[0]:
        assert abs(row["actor/kl"]) < 1e-6
        assert row["actor/clip_fraction"] == 0.0
        assert row["actor/grad_norm"] > 0
    assert found[0] == found[1]
    assert weights(runs[0]) == weights(runs[1])
