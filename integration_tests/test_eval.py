"""`rlinf eval` with real processes: the same samples on any number of devices, after a kill, and an interrupt."""

import json
import os
import signal
import subprocess

import pytest

from command_line import END_TIMEOUT_S, RLINF, all_gone, environment, wait_for, worker_processes

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
    for name, rows in (("own", own), ("aime", aime)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def command(inputs, output, *more):
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
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return [*RLINF, "eval", *benchmarks, *flags, "--output", str(output), *more]


def run(line):
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=END_TIMEOUT_S)


def samples(output):
    """Rows by benchmark, problem and sample."""
    rows = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    found = {(row["benchmark"], row["problem"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "a sample is there twice"
    return found


def scores(output):
    return json.loads((output / "result.json").read_text())["benchmarks"]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An evaluation on one device, and what it printed."""
    output = tmp_path_factory.mktemp("whole") / "eval"
    done = run(command(inputs, output, "--cluster.num_devices", "1"))
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


def test_the_folder_and_the_table(whole):
    output, printed = whole
    found = samples(output)
    assert set(found) == {
        (name, problem, i)
        for name, count in (("own", 12), ("aime24", 5))
        for problem in range(1, count + 1)
        for i in range(4)
    }
    assert len({row["completion"] for row in found.values()}) > 40, "samples differ"
    for row in found.values():
        assert row["num_completion_tokens"] == 100 or not row["truncated"]
        assert row["outcome"] in ("right", "wrong", "unparseable")
        assert (row["answer"] is None) == (row["outcome"] == "unparseable")
    table = [line.split() for line in printed.splitlines() if line.startswith(("benchmark", "own", "AIME 24"))]
    assert table[-3][:5] == ["benchmark", "problems", "avg@4", "pass@4", "maj@4"]
    result = scores(output)
    for name, count in (("own", 12), ("aime24", 5)):
        rows = [row for key, row in found.items() if key[0] == name]
        assert result[name]["num_problems"] == count
        assert result[name]["scores"]["avg@4"]["value"] == sum(row["outcome"] == "right" for row in rows) / len(rows)
        assert result[name]["num_truncated"] == sum(row["truncated"] for row in rows) > 0
        assert sum(result[name]["outcomes"].values()) == len(rows)


def test_a_kill_and_other_devices_change_no_sample(inputs, whole, tmp_path):
    output = tmp_path / "eval"
    process = subprocess.Popen(
        command(inputs, output, "--cluster.num_devices", "3"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    file = output / "samples.jsonl"
    wait_for(lambda: file.exists() and file.stat().st_size > 0, process, "sample")
    workers = list(worker_processes(output).values())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert all_gone(workers)
    before = file.read_bytes()
    assert 0 < len(before.splitlines()) < 68, "killed in the middle"
    torn = before + before.splitlines(keepends=True)[0].replace(b'"problem": ', b'"problem": 99')[:-5]
    file.write_bytes(torn)

    refused = run(command(inputs, output, "--resume", "--seed", "1"))
    assert refused.returncode == 2
    assert "--seed would change seed from 0 to 1" in refused.stderr
    changed = inputs / "own.jsonl"
    text = changed.read_text()
    changed.write_text(text.replace('"answer": "3"', '"answer": "4"'))
    refused = run([*RLINF, "eval", "--resume", "--output", str(output)])
    changed.write_text(text)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: benchmarks.own has changed since the evaluation in")
    assert file.read_bytes() == torn

    done = run([*RLINF, "eval", "--resume", "--output", str(output), "--cluster.num_devices", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert samples(output) == samples(whole[0])
    assert scores(output) == scores(whole[0])
    again = run([*RLINF, "eval", "--resume", "--output", str(output)])
    assert again.returncode == 0, "all is there: the table alone"
    assert "17 problems were answered before; 0 are left" in again.stdout
    assert again.stdout.split("\n\n")[1] == done.stdout.split("\n\n")[1]


def test_an_interrupt_leaves_a_folder_to_go_on_with(inputs, tmp_path):
    output = tmp_path / "eval"
    process = subprocess.Popen(
        command(inputs, output), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for(lambda: len(worker_processes(output)) >= 2, process, "worker")
    workers = list(worker_processes(output).values())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    # Python's resource tracker may add that a library's semaphores went with a worker that was still importing it.
    ours = "".join(err.splitlines(keepends=True)[:2]) if "resource_tracker.py" in err else err
    assert ours == f"go on with: rlinf eval --resume --output {output}\ninterrupted; nothing is left running\n"
    assert all_gone(workers)
    assert json.loads((output / "manifest.json").read_text())["sessions"][-1]["failure"] == "KeyboardInterrupt"
