"""RLinf from Python: configs, plans and refusals. integration_tests/test_api.py trains."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest

import rlinf
from rlinf.config.load import load_config as load_from_text
from rlinf.config.overrides import parse_overrides


def test_a_run_is_named_by_text_or_path(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time_s": 0.5, "metrics": {"reward/mean": 0.25}}\n')
    assert rlinf.Run(str(tmp_path)).metrics[0]["reward/mean"] == 0.25
    assert rlinf.Run(str(tmp_path)) == rlinf.Run(tmp_path)


def test_values_mean_what_they_mean_on_the_command_line():
    flags = ["--seed=3", "--run.num_steps=5", "--sft_warm_up=null", "--rollout.stop=['null', 'a: b']", "--name='true'"]
    config = rlinf.load_config(
        "sort-grpo", {"run.num_steps": 5, "name": "true"}, seed=3, sft_warm_up=None, rollout={"stop": ["null", "a: b"]}
    )
    assert config == load_from_text("sort-grpo", parse_overrides(flags))
    assert rlinf.load_config("sort-grpo", run={"num_steps": 5}).run.num_steps == 5


def test_functions_stand_for_their_import_paths():
    config = rlinf.load_config("sort-grpo", reward={"kind": "function", "path": json.loads})
    assert config.model_dump()["reward"]["path"] == "json:loads"
    for value, says in (
        (lambda completion, answer: 1.0, "it has no name in a module"),
        (OrderedDict.fromkeys, "it has no name in a module"),
    ):
        with pytest.raises(rlinf.UserError, match=says):
            rlinf.load_config("sort-grpo", reward={"kind": "function", "path": value})


def test_mistakes_are_errors_with_a_hint():
    with pytest.raises(rlinf.UserError, match=r"--run\.num_stepz .*did you mean"):
        rlinf.load_config("sort-grpo", run={"num_stepz": 5})
    with pytest.raises(rlinf.UserError, match=r"seed=.*a set is no value of a recipe\nhint: give text"):
        rlinf.load_config("sort-grpo", seed={1})
    with pytest.raises(rlinf.UserError, match=r"nothing to resume"):
        rlinf.Run(Path("absent")).resume()


def test_a_plan_needs_no_gpu():
    files = {"train_files": "unread.jsonl", "eval_files": "unread.jsonl"}
    explanation = rlinf.plan("math-grpo-1.5b", num_devices=8, model={"path": "Qwen2.5-1.5B"}, task=files)
    assert explanation.plan.to_json()
    assert len(explanation.problem.cluster.compute_devices) == 8
