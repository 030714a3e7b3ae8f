"""The examples of the documentation run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import SHORT_PUSH, SHORT_SORT, environment, rlinf, rows, train_here, training

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
EXAMPLE = FOLDER / "custom_flow.py"


@pytest.mark.slow
def test_custom_flow_is_short_and_gives_one_result_in_two_modes():
    assert len(EXAMPLE.read_text().splitlines()) < 80
    outputs = {
        subprocess.run(
            [sys.executable, str(EXAMPLE), mode],
            capture_output=True,
            text=True,
            check=True,
            env=environment(),
            timeout=120,
        ).stdout
        for mode in ("collocated", "disaggregated")
    }
    assert len(outputs) == 1
    assert "step 29: mean 3.0" in outputs.pop()


def test_plain_torch_is_short_and_learns():
    example = FOLDER / "plain_torch.py"
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True, env=environment(), timeout=120
    )
    assert float(done.stdout.splitlines()[-1].split(": ")[1].split(" ")[0]) > 0.8


OWN = {
    "sort-grpo": SHORT_SORT,
    "pushcube-ppo": SHORT_PUSH
    | {
        "env.kind": "gymnasium",
        "env.id": "CartPole-v1",
        "env.num_steps": 40,
        "env.max_episode_steps": 40,
        "algorithm.name": "grpo",
        "algorithm.policy_loss": "cispo",
        "cluster.num_devices": 1,
    },
}


@pytest.mark.parametrize("recipe", ["sort-grpo", pytest.param("pushcube-ppo", marks=pytest.mark.slow)])
def test_an_algorithm_of_ones_own_takes_one_file(tmp_path, monkeypatch, recipe):
    """Found in the current folder by `rlinf train` and by the processes that it starts; the same for robots."""
    overrides = OWN[recipe] | {
        "mode": "collocated",
        "algorithm.advantage": "custom_algorithm:against_median",
        "algorithm.options": "{scale: 2.0}",
    }
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which `rlinf` adds the current folder
    assert any(row["actor/grad_norm"] > 0 for row in rows(train_here(recipe, tmp_path / "run", overrides)))
    wrong = {"algorithm.advantage": "custom_algorithm:against_mean"}
    done = rlinf(*training(recipe, tmp_path / "other", wrong))
    assert done.returncode == 2
    assert "module 'custom_algorithm' has no attribute 'against_mean'" in done.stderr
