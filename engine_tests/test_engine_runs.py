"""Whole commands with the engine `sglang`: placements of engines, runs whose engine dies or lies."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

import broken_loader
from command_line import (
    END_TIMEOUT_S,
    SHORT_SORT,
    all_gone,
    start,
    steps_done,
    train,
    wait_for,
)  # pyright: ignore[reportMissingImports]

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
