"""A custom kind of environments and a custom policy with specs, named by import path: planned, doctored, trained from
its expert's demonstrations and its own experience. No package knows of either."""

import json
from pathlib import Path

import pytest

from command_line import rlinf, rows, train_here

ARM = """
extends: pushcube-ppo
env:
  kind: integration_tests.extensions.arm.spec:KIND
  id: reach
  options: {speed: 0.2}
  num_envs: 8
  num_groups: 2
  num_steps: 20
  max_episode_steps: 20
  num_eval_episodes: 8
policy:
  name: integration_tests.extensions.arm.spec:POLICY
  options: {width: 16}
sft_warm_up: {source: experts, num_episodes: 4, num_steps: 20, batch_size: 8}
algorithm: {num_minibatches: 2, num_epochs: 2}
run: {num_steps: 10, evaluate_every: 10, stop_at_score: null}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "arm.yaml"
    path.write_text(ARM)
    return path


def output(*arguments: object) -> str:
    done = rlinf(*arguments)
    assert done.returncode == 0
    return done.stdout


def test_what_the_specs_say_is_planned(recipe):
    plans = [
        json.loads(output("plan", recipe, "--gpu", "H100", "--cluster.num_devices", 8, "--json", *more))
        for more in ([], ["--env-step-s", "0.002"], ["--env-step-s", "0.2"])
    ]
    spec, same, slow = (plan["step_s"] for plan in plans)
    assert spec == same < slow / 10


def test_the_doctor_has_a_line_of_the_kind_of_a_recipe(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_VENVS", str(tmp_path))  # not the venvs of this machine
    findings = json.loads(output("doctor", "--recipe", recipe, "--json"))
    (arm,) = (finding for finding in findings if finding["subject"] == "arm")
    assert arm["verdict"] == "note" and arm["text"].startswith("the toy arm moves here")


def test_they_train_ten_steps_from_their_experts_demonstrations(recipe, tmp_path):
    run = train_here(recipe, tmp_path / "run", {"mode": "collocated", "cluster.num_devices": 1})
    assert len(rows(run)) == 10 and all(row["actor/grad_norm"] > 0 for row in rows(run))
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert any("reach, whose own limit is 40 actions" in note for note in notes)  # as the spec says
    assert not any("undefined" in note for note in notes)  # steps after the end have a meaning, says the spec
