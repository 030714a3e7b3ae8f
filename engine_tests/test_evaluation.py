"""`rlinf eval` with SGLang or vLLM, compared with transformers."""

import json
import subprocess

import pytest
import torch

from command_line import RLINF, environment  # pyright: ignore[reportMissingImports]
from served_checks import ENGINE


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A small model with random weights, and problems to count."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlinf.config.reasoning import ArchitectureConfig
    from rlinf.tasks.language import write_model_folder

    folder = tmp_path_factory.mktemp("inputs")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    shape = ArchitectureConfig(hidden_size=128, intermediate_size=64, num_layers=2, max_positions=512)
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
    completions = evaluate(inputs, tmp_path / ENGINE, ENGINE)
    assert len(completions) == 12
    assert completions == evaluate(inputs, tmp_path / "huggingface", "huggingface")
