"""`rlinf eval` with real processes: the same samples on any number of devices, after a kill, and an interrupt."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from command_line import (
    END_TIMEOUT_S,
    RLINF,
    SHORT_SORT,
    all_gone,
    environment,
    flags,
    rlinf,
    rows,
    train,
    wait_for,
    worker_processes,
)
from rlinf.cli.main import main
from rlinf_workers.testing.venvs import second_venv

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A small model with random weights, 12 problems to count and 5 of the form of AIME."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlinf.config.reasoning import ArchitectureConfig
    from rlinf.tasks.language import write_model_folder

    folder = tmp_path_factory.mktemp("inputs")
    shape = ArchitectureConfig(hidden_size=32, intermediate_size=64, num_layers=2, max_positions=512)
    write_model_folder(folder / "model", shape, ALPHABET, "float32")
    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    own = [{"question": f"{'1 + ' * i}1 =", "answer": str(i + 1)} for i in range(12)]
    aime = [{"problem": f"Find {i}.", "answer": f"{i:03d}"} for i in range(5)]
    for name, problems in (("own", own), ("aime", aime)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    return folder


def arguments(inputs, output, *more):
    benchmarks = [f"own={inputs / 'own.jsonl'}", f"aime24={inputs / 'aime.jsonl'}"]
    settings = {
        "model": inputs / "model",
        "benchmarks.own.reward": "numeric_match",
        "benchmarks.aime24.reward": "numeric_match",  # needs no extra
        "k": "1,4",
        "temperature": 1.0,
        "max_new_tokens": 100,
        "max_batch_sequences": 16,
        "cluster.oversubscribe": "true",
    }
    return ["eval", *benchmarks, *flags(settings), "--output", str(output), *more]


def command(inputs, output, *more):
    return [*RLINF, *arguments(inputs, output, *more)]


def run(line):
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=END_TIMEOUT_S)


def resume_here(output, capsys, *more):
    """`rlinf eval --resume` in this process, for what starts no worker: the exit code and both streams."""
    capsys.readouterr()
    return main(["eval", "--resume", "--output", str(output), *more]), *capsys.readouterr()


def samples(output):
    """Rows by benchmark, problem and sample."""
    lines = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    rows_by_key = {(row["benchmark"], row["problem"], row["sample"]): row for row in lines}
    assert len(rows_by_key) == len(lines), "a sample is there twice"
    return rows_by_key


def scores(output):
    return json.loads((output / "result.json").read_text())["benchmarks"]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An evaluation on one device, and what it printed."""
    output = tmp_path_factory.mktemp("whole") / "eval"
    done = rlinf(*arguments(inputs, output, "--cluster.num_devices", "1"))
    assert done.returncode == 0
    return output, done.stdout


def test_the_folder_and_the_table(whole):
    output, printed = whole
    rows_by_key = samples(output)
    assert set(rows_by_key) == {
        (name, problem, i)
        for name, count in (("own", 12), ("aime24", 5))
        for problem in range(1, count + 1)
        for i in range(4)
    }
    assert len({row["completion"] for row in rows_by_key.values()}) > 40, "samples differ"
    for row in rows_by_key.values():
        assert row["num_completion_tokens"] == 100 or not row["truncated"]
        assert row["outcome"] in ("right", "wrong", "unparseable")
        assert (row["answer"] is None) == (row["outcome"] == "unparseable")
    table = [line.split() for line in printed.splitlines() if line.startswith(("benchmark", "own", "AIME 24"))]
    assert table[-3][:5] == ["benchmark", "problems", "avg@4", "pass@4", "maj@4"]
    result = scores(output)
    for name, count in (("own", 12), ("aime24", 5)):
        mine = [row for key, row in rows_by_key.items() if key[0] == name]
        assert result[name]["num_problems"] == count
        assert result[name]["scores"]["avg@4"]["value"] == sum(row["outcome"] == "right" for row in mine) / len(mine)
        assert result[name]["num_truncated"] == sum(row["truncated"] for row in mine) > 0
        assert sum(result[name]["outcomes"].values()) == len(mine)


@pytest.mark.slow
def test_a_kill_other_devices_and_environments_change_no_sample(inputs, whole, tmp_path, capsys):
    output, python = tmp_path / "eval", second_venv(tmp_path / "environment")
    venvs = [part for role in ("rollout", "reward") for part in (f"--venvs.{role}", python)]
    process = subprocess.Popen(
        command(inputs, output, "--cluster.num_devices", "3", *venvs),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    file = output / "samples.jsonl"
    wait_for(lambda: file.exists() and file.stat().st_size > 0, process, "sample")
    workers = list(worker_processes(output).values())
    started = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in workers]
    assert started == [python] * len(workers)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert all_gone(workers)
    before = file.read_bytes()
    assert 0 < len(before.splitlines()) < 68, "killed in the middle"
    torn = before + before.splitlines(keepends=True)[0].replace(b'"problem": ', b'"problem": 99')[:-5]
    file.write_bytes(torn)

    code, _, err = resume_here(output, capsys, "--seed", "1")
    assert code == 2
    assert "--seed would change seed from 0 to 1" in err
    changed = inputs / "own.jsonl"
    text = changed.read_text()
    changed.write_text(text.replace('"answer": "3"', '"answer": "4"'))
    code, _, err = resume_here(output, capsys)
    changed.write_text(text)
    assert code == 2
    assert err.startswith("error: benchmarks.own has changed since the evaluation in")
    assert file.read_bytes() == torn

    done = run([*RLINF, "eval", "--resume", "--output", str(output), "--cluster.num_devices", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert samples(output) == samples(whole[0])
    assert scores(output) == scores(whole[0])
    code, again, _ = resume_here(output, capsys)
    assert code == 0, "all is there: the table alone"
    assert "17 problems were answered before; 0 are left" in again
    assert again.split("\n\n")[1] == done.stdout.split("\n\n")[1]


@pytest.mark.slow
def test_an_interrupt_leaves_a_folder_to_go_on_with(inputs, tmp_path):
    output = tmp_path / "eval"
    process = subprocess.Popen(
        command(inputs, output), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for(lambda: len(worker_processes(output)) >= 2, process, "worker")
    workers = list(worker_processes(output).values())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, out + err
    # Python's resource tracker may add that a library's semaphores went with a worker that was still importing it.
    ours = "".join(err.splitlines(keepends=True)[:2]) if "resource_tracker.py" in err else err
    assert ours == f"go on with: rlinf eval --resume --output {output}\ninterrupted; nothing is left running\n"
    assert all_gone(workers)
    assert json.loads((output / "manifest.json").read_text())["sessions"][-1]["failure"] == "interrupted"


@pytest.mark.slow
def test_a_runs_own_model_scores_on_its_held_out_task_what_the_run_said(tmp_path):
    from rlinf.config.tasks import SortTask
    from rlinf.tasks import make_task

    settings = SHORT_SORT | {"sft_warm_up.max_steps": 200, "run.num_steps": 2, "sft_warm_up.target_accuracy": 0.5}
    run_folder = train("sort-grpo", tmp_path / "run", settings)
    accuracy = rows(run_folder, "evaluations.jsonl")[-1]["accuracy"]
    assert 0.1 < accuracy < 1, "a score that another prompt would change"
    held_out = make_task(SortTask(kind="sort", num_digits=3, num_held_out=64), 0).held_out()[""]
    lines = [json.dumps({"question": problem.prompt, "answer": problem.answer}) for problem in held_out]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    benchmark = [f"sort={tmp_path / 'held_out.jsonl'}", "--benchmarks.sort.reward", "exact_match"]
    sampling = ["--temperature", "0", "--max_new_tokens", "4", "--cluster.num_devices", "1"]
    output = tmp_path / "eval"
    done = run([*RLINF, "eval", *benchmark, "--model", str(run_folder), *sampling, "--output", str(output)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert scores(output)["sort"]["num_problems"] == 64
    assert scores(output)["sort"]["scores"]["avg@1"]["value"] == accuracy
