"""A launcher of one's own, named by its import path in a recipe."""

import pytest

from command_line import rows, train
from rlinf_workers.testing.launchers import CHECKS

RECIPE = """
extends: pushcube-ppo
mode: collocated
cluster:
  num_devices: 1
  launcher: integration_tests.extensions.launcher:CountingLauncher
  launcher_options: {{counts_file: {counts}}}
algorithm: {{num_minibatches: 1, num_epochs: 1}}
env: {{num_steps: 5, max_episode_steps: 5, num_eval_episodes: 8}}
run: {{num_steps: 10, evaluate_every: 10, stop_at_score: null}}
"""


@pytest.mark.slow
def test_a_launcher_of_ones_own_trains_ten_steps(tmp_path):
    recipe, counts = tmp_path / "counting.yaml", tmp_path / "counts.txt"
    recipe.write_text(RECIPE.format(counts=counts))
    assert len(rows(train(recipe, tmp_path / "run", {}))) == 10
    calls = {name: int(number) for number, _, name in (line.partition(" ") for line in counts.read_text().splitlines())}
    assert calls["actor/0 run_stage"] == 10
    assert calls["env/0 run_stage"] == 10 + 2, "evaluated before and after"


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_launcher_of_the_docs_conforms(check, tmp_path):
    from integration_tests.extensions.launcher import CountingLauncher

    check(CountingLauncher, tmp_path)
