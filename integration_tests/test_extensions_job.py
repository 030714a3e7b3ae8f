"""A third kind of training, with a launcher and a weight sync that bring specs, all named by their import paths:
planned, checked and trained without a line in any package."""

import json

import pytest

from command_line import rlinf, rows, train_here

RECIPE = """
name: target
job: integration_tests.extensions.target_job:SPEC
mode: {mode}
cluster:
  device: cpu
  num_devices: 2
  oversubscribe: true
  launcher: integration_tests.extensions.plugins_with_specs:LAUNCHER
  weight_sync: integration_tests.extensions.plugins_with_specs:WEIGHT_SYNC
run: {{num_steps: 10, evaluate_every: 5}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    def write(mode="collocated"):
        path = tmp_path_factory.mktemp("recipe") / "target.yaml"
        path.write_text(RECIPE.format(mode=mode))
        return path

    return write


@pytest.fixture(scope="module")
def means(recipe, tmp_path_factory):
    """What ten steps, collocated and without a stop, learn."""
    return [row["learner/mean"] for row in rows(train_here(recipe(), tmp_path_factory.mktemp("whole") / "run", {}))]


def test_a_custom_job_learns_in_ten_steps(means):
    assert len(means) == 10 and means[-1] > 1.0


def test_it_goes_on_from_its_checkpoint_to_the_same_numbers_in_another_mode(recipe, means, tmp_path):
    """And keeps its target."""
    folder = train_here(recipe("disaggregated"), tmp_path / "run", {"run.num_steps": 6})
    train_here(None, folder, {"run.num_steps": 10})
    assert [row["learner/mean"] for row in rows(folder)] == means
    refused = rlinf("train", "--resume", "--output", folder, "--target.position", "4")
    assert refused.returncode == 2 and "--target.position would change target.position" in refused.stderr


def test_its_config_is_validated_as_the_shipped_ones_are(recipe):
    for arguments, text in {
        ("--target.positoin", "4"): "target.positoin is not a key; did you mean --target.position?",
        ("--target.num_guesses", "3"): "--target.num_guesses=3 is odd",
        ("--job", "integration_tests.extensions.target_job:NONE"): "job: the job",
    }.items():
        done = rlinf("config", "show", recipe(), *arguments)
        assert done.returncode == 2 and text in done.stderr, done.stderr
    done = rlinf("config", "show", recipe())
    assert done.returncode == 0 and "num_guesses: 32" in done.stdout


def test_it_is_planned_from_its_spec(recipe):
    done = rlinf("plan", recipe(), "--cluster.num_devices", "8", "--json")
    assert done.returncode == 0, done.stderr
    explanation = json.loads(done.stdout)
    assert "the times of this job are made up" in explanation["notes"]
    assert {stage["stage"] for stage in explanation["plan"]["stages"]} == {"sampler", "judge", "actor"}


def test_the_cluster_of_a_custom_launcher_is_looked_at():
    done = rlinf(
        "doctor", "--cluster", "--launcher", "integration_tests.extensions.plugins_with_specs:LAUNCHER", "--json"
    )
    assert json.loads(done.stdout)["nodes"][0]["hostname"] == "barn", done.stderr


def test_a_weight_sync_that_cannot_work_says_so_before_any_process_starts(recipe):
    path = "integration_tests.extensions.plugins_with_specs:ON_GPUS_ALONE"
    done = rlinf("train", recipe(), "--cluster.weight_sync", path)
    assert done.returncode == 2 and f"cluster.weight_sync={path}: it needs wings" in done.stderr
