"""RLinf from Python: configs, plans and refusals. integration_tests/test_api.py trains."""

import importlib
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pandas
import pytest

import rlinf
from rlinf.api import _current_modules
from rlinf.config.load import load_config as load_from_text
from rlinf.config.overrides import parse_overrides


def test_a_run_is_named_by_text_or_path(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time_s": 0.5, "metrics": {"reward/mean": 0.25}}\n')
    assert rlinf.Run(str(tmp_path)).metrics[0]["reward/mean"] == 0.25
    assert rlinf.Run(str(tmp_path)) == rlinf.Run(tmp_path)


def test_samples_are_completions_alone(tmp_path: Path):
    rows = [{"step": 0, "prompt": "21=", "completion": "12"}, {"step": 0, "worst_token": "1", "before": "21="}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rlinf.Run(tmp_path).samples == rows[:1]


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


@pytest.mark.usefixtures("brief_search")
def test_a_plan_needs_no_gpu():
    explanation = rlinf.plan("math-grpo-1.5b", {"model.path": "Qwen2.5-1.5B"}, num_devices=8, gpu="H200")
    assert explanation.plan.to_json()
    assert [device.name for device in explanation.problem.cluster.devices] == ["NVIDIA H200 SXM"] * 8
    with pytest.raises(rlinf.UserError, match=r"cluster\.num_devices=auto"):
        rlinf.plan("math-grpo-1.5b", {"model.path": "Qwen2.5-1.5B"})


@pytest.mark.usefixtures("brief_search")
def test_a_plan_of_a_problem_file_shows_its_tables_and_what_if_answers():
    problem = Path(__file__).parents[2] / "rlinf-sched" / "examples" / "laptop.json"
    explanation = rlinf.plan(problem, what_if=True)
    text = str(explanation)
    assert text.startswith("One step of laptop takes 16 items") and "critical path" in text
    assert "twice the devices" in {answer.question for answer in explanation.answers} and "twice the devices" in text
    assert pandas.DataFrame(explanation.modes)["is_chosen"].sum() == 1
    with pytest.raises(rlinf.UserError, match="only a recipe takes overrides"):
        rlinf.plan(problem, num_devices=8)


def test_a_module_that_a_cell_wrote_anew_is_imported_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    config = rlinf.load_config("sort-grpo", reward={"kind": "function", "path": "reward_of_a_cell:score"})
    for value in (1, 22, 333):
        (tmp_path / "reward_of_a_cell.py").write_text(f"def score(completion, answer):\n    return {value}\n")
        with _current_modules(config):  # around each training
            module = importlib.import_module("reward_of_a_cell")
            assert module.score("", "") == value
    first = module.score
    (tmp_path / "reward_of_a_cell.py").write_text("def score(completion, answer):\n    return 4444\n")
    with _current_modules(config):
        edited = rlinf.load_config("sort-grpo", reward={"kind": "function", "path": first})
    assert edited.model_dump()["reward"]["path"] == "reward_of_a_cell:score"


def test_a_notebook_shows_the_message_of_an_error_without_a_traceback():
    error = rlinf.UserError("seed=x: not a number", hint="give a number")
    assert error._render_traceback_() == ["UserError: seed=x: not a number\nhint: give a number"]


def test_an_interrupt_does_not_cut_the_import_of_torch(tmp_path: Path):
    (tmp_path / "torch.py").write_text("""
import os, signal, __main__
os.kill(os.getpid(), signal.SIGINT)
__main__.interrupted.wait()
__main__.imports.append("complete")
""")
    program = """
import threading
from rlinf.torch_import import import_torch
interrupted, imports = threading.Event(), []
try:
    import_torch()
except KeyboardInterrupt:
    imports.append("interrupted")
    interrupted.set()
import_torch()
print(imports)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.stdout, done.stderr) == ("['interrupted', 'complete']\n", "")
