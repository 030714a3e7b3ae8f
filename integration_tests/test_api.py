"""A program that trains through `rlinf.train`, as a user writes it: without `if __name__ == "__main__"`."""

import json
import subprocess
import sys

import pytest

from command_line import END_TIMEOUT_S, SHORT_SORT, environment, numbers

PROGRAM = """
import json, sys, torch
import rlinf

print("the program runs", file=sys.stderr)
keys, folder = json.load(open(sys.argv[1])), sys.argv[2]
steps = []
run = rlinf.train("sort-grpo", keys, output=folder, on_step=lambda step, metrics: steps.append((step, len(metrics))))
run.resume(run={"num_steps": 3}, on_step=lambda step, metrics: steps.append((step, len(metrics))))

def score(completion, answer):
    return 1.0

try:
    rlinf.train("sort-grpo", reward={"kind": "function", "path": score})
except rlinf.UserError as error:
    refusal = str(error)
rows = {"steps": steps, "metrics": len(run.metrics), "evaluations": len(run.evaluations), "samples": len(run.samples)}
has_config = (run.export(folder + "-exported") / "config.json").exists()
print(json.dumps({**rows, "refusal": refusal, "score": run.result["score"], "exported": has_config}))
"""


@pytest.mark.slow
def test_a_program_trains_resumes_and_exports(sort_run, tmp_path):
    keys = {key: json.loads(value) if isinstance(value, str) and value in ("null", "false") else value
            for key, value in SHORT_SORT.items()}  # fmt: skip
    (tmp_path / "keys.json").write_text(json.dumps(keys | {"run.num_steps": 2}))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "keys.json", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=END_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("the program runs") == 1
    values = json.loads(done.stdout.splitlines()[-1])
    assert [step for step, _ in values["steps"]] == [0, 1, 2] and min(count for _, count in values["steps"]) > 10
    assert (values["metrics"], values["score"], values["exported"]) == (3, "accuracy", True)
    assert values["evaluations"] >= 2 and values["samples"] > 0
    assert 'name it "my_module:score"' in values["refusal"] and "%%writefile my_module.py" in values["refusal"]
    assert numbers(tmp_path / "run") == numbers(sort_run)
