"""Whole commands with the engine `sglang`: an evaluation, placements of engines, runs whose engine dies or lies."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

import broken_loader
from command_line import (
    END_TIMEOUT_S,
    RLINF,
    SHORT_SORT,
    TINY_SORT,
    all_gone,
    environment,
    start,
    steps_done,
    train,
    wait_for,
)  # pyright: ignore[reportMissingImports]
from rlinf_workers.engines.sglang.spec import KEEPS_CACHE
from staleness_checker import check  # pyright: ignore[reportMissingImports]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A small model with random weights, and problems to count."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlinf.config.reasoning import ArchitectureConfig
    from rlinf.tasks.language import write_model_folder

    folder = tmp_path_factory.mktemp("inputs")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    shape = ArchitectureConfig(hidden_size=32, intermediate_size=64, num_layers=2, max_positions=512)
    write_model_folder(folder / "model", shape, alphabet, "float32")
    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    problems = [{"question": f"{'1 + ' * i}1 =", "answer": str(i + 1)} for i in range(12)]
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
    return folder


def evaluate(inputs, output, engine):
    settings = {
        "model": inputs / "model",
        "benchmarks.own.reward": "numeric_match",
        "k": 1,
        "temperature": 0,
        "max_new_tokens": 50,
        "engine": engine,
        "cluster.num_devices": 1,
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [*RLINF, "eval", f"own={inputs / 'own.jsonl'}", *flags, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {row["problem"]: row["completion"] for row in rows}


def test_an_evaluation_at_temperature_0_gives_what_transformers_gives(inputs, tmp_path):
    completions = evaluate(inputs, tmp_path / "sglang", "sglang")
    assert len(completions) == 12
    assert completions == evaluate(inputs, tmp_path / "huggingface", "huggingface")


ROUNDING = 1e-4
"""Nats between two float32 computations of a token."""


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [({"rollout.tensor_parallel_size": 2}, 1), ({}, 2), ({"mode": "auto", "run.num_steps": 12}, 2)],
    ids=["one engine over both devices", "an engine on each", "mode auto measures"],
)
def test_engines_take_the_devices_of_a_plan(tmp_path, settings, num_ranks):
    two = {"rollout.engine": "sglang", "cluster.num_devices": 2, "mode": "collocated"}
    run = train("sort-grpo", tmp_path / "run", SHORT_SORT | {"run.evaluate_every": 12} | two | settings)
    steps = [row["metrics"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert len(steps) == (SHORT_SORT | settings)["run.num_steps"]
    assert len(list((run / "logs" / "rollout").glob("*.log"))) == num_ranks
    gaps = [step["rollout/logprob_gap_max"] for step in steps if "rollout/logprob_gap_max" in step]
    assert gaps, "the gap is measured in groups with an advantage, and SGLang's draws decide which have one"
    assert max(gaps) < ROUNDING


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_completions_go_on_with_weights_that_are_published_meanwhile(tmp_path, how):
    """Generation takes much longer than training, so each version arrives while the next step's completions run."""
    settings = TINY_SORT | {
        "rollout.engine": "sglang",
        "rollout.engine_options": str(dict.fromkeys(KEEPS_CACHE, "true")).replace("'", "") if how == "keep" else "{}",
        "rollout.on_new_weights": how,
        "rollout.max_new_tokens": 48,
        "algorithm.max_staleness": 1,
        "run.record": "true",
        "run.num_steps": 5,
        "run.evaluate_every": 5,
        "run.checkpoint_every": 5,
    }
    outcome = check(train("sort-grpo", tmp_path / "run", settings))
    assert outcome.mistakes == [] and outcome.num_takes and outcome.num_mixed_groups


def test_a_run_whose_engine_is_killed_names_it_and_goes_on_with_another(tmp_path):
    settings = SHORT_SORT | {"rollout.engine": "sglang", "cluster.num_devices": 1, "mode": "collocated"}
    process = start("sort-grpo", tmp_path / "run", settings | {"run.num_steps": 40, "run.evaluate_every": 500})
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process, "step 2")
    family = psutil.Process(process.pid).children(recursive=True)
    (scheduler,) = [one for one in family if one.name().startswith("sglang::sche")]
    os.kill(scheduler.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0, errors
    notes = json.loads((tmp_path / "run" / "manifest.json").read_text())["notes"]
    log = (tmp_path / "run" / "logs" / "rollout" / "0.log").read_text()
    assert f"SGLang's scheduler process 0 of 1 (pid {scheduler.pid}) ended with signal 9" in log
    assert any("; rollout replaced in " in note for note in notes), notes
    assert steps_done(tmp_path / "run") == 40
    assert all_gone([one.pid for one in family])


def test_a_run_whose_loader_lies_ends_on_one_screen_before_a_token_of_that_version(tmp_path, monkeypatch):
    """It says success and one bit is another one: tensor, process and version are named."""
    fault_file = tmp_path / "fault"
    fault_file.write_text("")
    monkeypatch.setenv(broken_loader.FAULT_FILE, str(fault_file))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    settings = SHORT_SORT | {
        "rollout.engine": "lying_engine:LyingEngine",
        "cluster.num_devices": 1,
        "mode": "collocated",
        "run.num_steps": 500,
        "run.evaluate_every": 500,
    }
    output = tmp_path / "run"
    process = start("sort-grpo", output, settings)
    wait_for(lambda: steps_done(output) >= 2, process, "step 2")
    fault_file.write_text("flip 0 model.layers.1.self_attn.qkv_proj.weight 240")
    family = psutil.Process(process.pid).children(recursive=True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors and len(errors.splitlines()) < 30, errors
    assert re.search(r"engine process 0 \(pid \d+\): .*model\.layers\.1\.self_attn\.q_proj\.weight differs", errors)
    (version,) = {int(number) for number in re.findall(r"must not serve version (\d+)", errors)}
    assert steps_done(output) == version - SHORT_SORT["sft_warm_up.max_steps"], "a step was made of that version"
    assert all_gone([one.pid for one in family])
