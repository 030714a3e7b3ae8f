"""`rlinf data`: what a run would train on."""

import json
from pathlib import Path


def test_rows_columns_prompts_and_lengths_are_shown(rlinf, model_folder, tmp_path: Path):
    model_folder("0123456789+= ", max_positions=1024)
    rows = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+1=" * 9, "ground_truth": "3"}, {"prompt": "9"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task.prompt_template", "{question}", "--task.answer_format", "exact", "--model.path", "model"]
    outcome = rlinf("data", "rows.jsonl", *flags, "--rollout.max_prompt_tokens", "8", "--examples", "1")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == f"{tmp_path / 'rows.jsonl'}: 3 problems"
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["prompt", "text", "prompt"],
        ["ground_truth", "text", "answer"],
    ]
    assert "note: 1 rows have no answer" in outcome.out
    assert "prompts have 1 to 36 tokens:" in outcome.out
    assert "1 are longer than rollout.max_prompt_tokens=8: task.long_prompts=" in outcome.out
    assert "rows.jsonl:1: 4 tokens, answer '2'" in outcome.out and lines[-2] == "1+1="


def test_a_model_is_not_needed_and_a_recipe_without_files_is_refused(rlinf, gsm8k_inputs: Path):
    outcome = rlinf("data", "train.jsonl", "test.jsonl")
    assert outcome.code == 0 and outcome.out.count(" problems\n") == 2 and "characters:" in outcome.out
    assert "--recipe sort-grpo: it reads no data files" in rlinf("data", "train.jsonl", "--recipe", "sort-grpo").err
