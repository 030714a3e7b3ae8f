"""`rlinf data`: what a run would train on."""

import json
from pathlib import Path

import pytest


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


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HI, YO, MORE = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "x" * 9))
)


@pytest.fixture
def chat_model(model_folder, tmp_path: Path) -> None:
    """`model` with a chat template."""
    model_folder("abcdefghijklmnopqrstuvwxyz<>\n", max_positions=1024)
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))


@pytest.mark.usefixtures("chat_model")
def test_examples_are_shown_with_their_tokens_that_have_a_loss(rlinf, tmp_path: Path):
    rows = [{"messages": [HI, YO, HI, YO], "id": 1}, {"messages": [MORE, YO]}, {"messages": [HI]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("data", "--recipe", "sft", "rows.jsonl", "--task.on_bad_row", "skip", "--examples", "1")
    plain = rlinf(*command)
    assert plain.code == 0, plain.err
    assert "rows.jsonl: 2 examples, 1 bad rows\n" in plain.out and "messages  list of 4  chat " in plain.out
    assert "\n     user | hi\nassistant | yo\n     user | hi\nassistant | yo\n" in plain.out
    limited = rlinf(*command, "--model.path", "model", "--task.max_tokens", "40")
    assert "task.prompt_format=auto: the tokenizer's chat template" in limited.out
    assert "examples have 30 to 46 tokens, and 9 tokens have a loss:" in limited.out
    assert (
        "a run would end with this error: " in limited.out and "rows.jsonl: 1 of 2 examples are longer" in limited.out
    )
    assert (
        "\n     | <user>hi\n     | <assistant>\nloss | yo\n     | <user>hi\n     | <assistant>\nloss | yo\n"
        in limited.out
    )
    dropped = rlinf(*command, "--model.path", "model", "--task.max_tokens", "40", "--task.long_examples", "drop").out
    assert "longer than 40 tokens (up to 46); they were dropped\n" in dropped and "1 of 2 examples are used" in dropped


@pytest.mark.usefixtures("chat_model")
def test_pairs_are_shown_with_both_answers(rlinf, tmp_path: Path):
    pair = {"prompt": "hi", "chosen": "yo", "rejected": "no", "score": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair))
    for recipe in ("dpo", "reward-model"):
        outcome = rlinf("data", "--recipe", recipe, "rows.jsonl", "--model.path", "model")
        assert outcome.code == 0, outcome.err
        rows = [line.split() for line in outcome.out.splitlines()]
        assert ["chosen", "text", "chosen", "yo"] in rows and ["score", "number", "3"] in rows
        assert "  prompt | <user>hi\n  prompt | <assistant>\n  chosen | yo\nrejected | no\n" in outcome.out
