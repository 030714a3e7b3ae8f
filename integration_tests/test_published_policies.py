"""Published checkpoints are played, scored and compared by their recipe and folder, without a training run."""

import json
from functools import partial
from pathlib import Path

import pytest
from workers_openpi_files import write_layout
from workers_plain_openvla import published_tensors, write_checkpoint

from command_line import refusal
from rlinf.cli.main import main
from trained_policy import make_run

RECIPE = """
extends: pushcube-ppo
name: %s
policy: {name: %s, options: {%s}}
algorithm: {num_minibatches: 1, num_epochs: 1}
env:
  kind: import
  id: integration_tests.extensions.spots:Spots
  num_envs: 2
  num_groups: 1
  num_steps: 4
  max_episode_steps: 4
  num_eval_episodes: 2
run: {num_steps: 2, evaluate_every: 1, stop_at_score: null}
"""
PI0 = RECIPE % ("spots-pi0", "pi0", "dataset: lab, chunk_size: 2, num_denoising_steps: 1")
OPENVLA = RECIPE % ("spots-openvla", "openvla", "unnorm_key: spots, temperature: 0.7")
FOLDER = "--policy.options.folder"
FEW = ("--cluster.num_devices", "1", "--compare.num_episodes", "3", "--compare.first_seed", "5")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """pi0.yaml and openvla.yaml, and the folders pi0 and openvla of their published checkpoints."""
    top = tmp_path_factory.mktemp("published")
    for name, recipe in (("pi0", PI0), ("openvla", OPENVLA)):
        (top / f"{name}.yaml").write_text(recipe)
        (top / name).mkdir()
    write_layout(top / "pi0", "openpi", "pi0")
    write_checkpoint(top / "openvla", published_tensors())
    statistics = {"q01": [-1.0, -1.0], "q99": [1.0, 1.0], "mask": [True, True]}
    (top / "openvla" / "dataset_statistics.json").write_text(json.dumps({"spots": {"action": statistics}}))
    return top


@pytest.fixture
def refused(tmp_path, capsys):
    return partial(refusal, out=tmp_path / "out", capsys=capsys)


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_published_checkpoint_is_scored_by_one_command(places, tmp_path, capsys):
    out, folder = tmp_path / "out", places / "openvla"
    line = ["play", str(places / "openvla.yaml"), FOLDER, str(folder), "--episodes", "3", "--seed", "5", *FEW[:2]]
    assert main([*line, "--no-video", "--output", str(out)]) == 0
    assert "spots-openvla, openvla: 3 episodes in " in capsys.readouterr().out
    scored = result(out)
    low, high = scored["interval_95"]
    assert low <= scored["success_at_end"] <= high and 0 < high - low < 1
    assert scored["checkpoint"] == str(folder) and len(scored["digest"]) == len(scored["protocol"]["digest"]) == 64
    assert scored["protocol"]["acting"] == {
        "cameras": "above",
        "normalization": "quantiles",
        "center_crop": "False",
        "dtype": "float32",
        "unnorm_key": "spots",
    }
    assert [json.loads(row)["seed"] for row in (out / "episodes.jsonl").read_text().splitlines()] == [5, 6, 7]


@pytest.mark.slow
def test_a_published_checkpoint_is_compared_with_a_run_that_started_from_it(places, tmp_path):
    """An untrained run acts as what it started from, to the bit."""
    folder = str(places / "pi0")
    run = make_run(tmp_path / "run", PI0, f"{FOLDER}={folder}")
    line = ["eval", "--compare", str(places / "pi0.yaml"), str(run), f"--a.{FOLDER[2:]}", folder, *FEW]
    assert main([*line, "--compare.num_films", "0", "--output", str(tmp_path / "out")]) == 0
    compared = result(tmp_path / "out")
    acting = {"dataset": "lab", "normalization": "mean_std", "relative_to_state": "False", "num_denoising_steps": "1"}
    assert compared["protocol"]["acting"] == {"cameras": "above", "dtype": "float32", **acting}
    assert compared["a"]["checkpoint"] == folder and compared["b"]["checkpoint"] == str(run / "checkpoints/step-000003")
    rows = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    of_a, of_b = ([{**row, "policy": ""} for row in rows if row["policy"] == side] for side in "ab")
    assert len(of_a) == 3 and of_a == of_b


def test_mistakes_are_refused_before_anything_is_written(places, refused, tmp_path):
    recipe, folder = str(places / "pi0.yaml"), str(places / "pi0")
    play = partial(refused, "play")
    assert play(recipe).startswith(f"{recipe}: the policy has random weights")
    assert play("faucet-pi0-dsrl", FOLDER, folder).startswith("faucet-pi0-dsrl: the policy has random weights")
    assert play(folder).startswith(f"{folder} is the folder of a published checkpoint, which does not say in which")
    assert f"--checkpoint best: {recipe} is a recipe" in play(recipe, FOLDER, folder, "--checkpoint", "best")
    assert "absent" in play(recipe, FOLDER, str(tmp_path / "absent"))
    assert "policy.name='pi0'" in play(recipe, FOLDER, str(places / "openvla"))
    assert "with --policy.options.folder" in play(recipe, "--policy.options.foldr", folder)
    compare = partial(refused, "eval", "--compare", recipe, recipe)
    assert compare(f"--a.{FOLDER[2:]}", folder).startswith(f"{recipe}: the policy has random weights")
    assert "--b.env.max_episode_stepps" in compare(FOLDER, folder, "--b.env.max_episode_stepps", "3")
