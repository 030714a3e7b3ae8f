"""The README's resharding examples run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTION = README.split("## Resharding between two layouts of your own")[1].split("\n## ")[0]
RESHARD, BUILDERS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def run(code, folder):
    script = folder / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_layouts_of_ones_own(tmp_path):
    expected = re.findall(r"print\(.*\)  # (.*)", RESHARD)
    assert len(expected) == 2
    assert run(RESHARD, tmp_path).splitlines() == expected


def test_ready_layouts(tmp_path):
    config = {
        "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "num_experts": 8, "moe_intermediate_size": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    check = "\nfrom rlinf_comm.weights import plan\nprint(plan(trainer, engine).num_bytes > 0)\n"
    assert run("import json\n" + BUILDERS + check, tmp_path) == "True\n"
