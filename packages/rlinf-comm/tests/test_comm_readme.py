"""The README's programs run as they stand, and print what their comments say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 8, "moe_intermediate_size": 4,
}  # fmt: skip


def program_of(heading):
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return program


def printed_by(program, folder):
    script = folder / "example.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


HEADINGS = [
    "Records, keys and weights",
    "Tensors by reference",
    "Named peers",
    "Resharding between two custom layouts",
    "Proof that the right weights are served",
]
WEIGHTS = "Weights from a trainer to an engine"
BORDER = "--- the next program ---"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Lines by heading; the programs run one after the other in one process, which imports torch once."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = "import json\n" + program_of(WEIGHTS) + "print(reshard.num_bytes > 0, store.name)\n"
    programs = ["import torch\n" + program_of(heading) for heading in HEADINGS]
    (folder / "programs.json").write_text(json.dumps([*programs, weights]))
    run_all = f"""
import json
for program in json.load(open("programs.json")):
    exec(program, {{"__name__": "__main__"}})
    print({BORDER!r})
"""
    programs = "\n".join(printed_by(run_all, folder)).split(BORDER)
    return {heading: text.split("\n") for heading, text in zip([*HEADINGS, WEIGHTS], programs, strict=False)}


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_program_prints_what_its_comments_say(heading, printed):
    expected = re.findall(r"print\(.*\)  # (.*)", program_of(heading))
    assert expected
    assert [line for line in printed[heading] if line] == expected


def test_a_channel_between_two_processes(tmp_path):
    lines = printed_by(program_of("A channel between two processes"), tmp_path)
    assert "".join(lines).count("4999950000") == 2  # the sum of arange(100_000), for each prompt


def test_a_trainer_and_an_engine(printed):
    assert [line for line in printed[WEIGHTS] if line] == ["True actor-to-rollout"]


def test_every_heading_of_the_table_is_there():
    for anchor in re.findall(r"\]\(#([a-z0-9-]+)\)", README):
        headings = [re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-") for line in README.splitlines()]
        assert anchor in headings
