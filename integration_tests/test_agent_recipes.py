"""The recipes with the settings of published agents, on a tiny model of the same shape: they start, and take a step."""

import json
from pathlib import Path

import pytest

from command_line import rows, train_here

pytest.importorskip("bm25s", reason="pip install 'rlinf[agents]'")
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with the calls of Qwen2.5."""
SMALL = {
    "run.num_steps": 1,
    "run.evaluate_every": 1,
    "task.num_held_out": 2,
    "model.dtype": "float32",
    "rollout.engine": "huggingface",
    "rollout.engine_options": "{refill: true}",
    "rollout.dtype": "null",
    "rollout.tensor_parallel_size": 1,
    "rollout.num_prompts": 8,
    "rollout.max_new_tokens": 6,
    "rollout.max_prompt_tokens": 1200,
    "rollout.agent.max_context_tokens": 2000,
    "rollout.agent.max_turns": 3,
    "actor.backend": "fsdp2",
    "actor.backend_options": "{compute_dtype: float32, recompute: true}",
    "actor.max_tokens_per_micro_batch": 8000,
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
    "mode": "collocated",
}
RECIPES = {
    "search-r1-ppo": {},
    "search-r1-grpo": {"algorithm.group_size": 2},
    "retool-grpo": {"algorithm.group_size": 2},
    "mini-swe-grpo": {"algorithm.group_size": 2},
}
ROWS = {
    "search-r1": {"question": "Where is the tower number {}?", "golden_answers": ["Paris", "paris"], "answer": "Paris"},
    "retool": {"question": "What is {} + 1?", "answer": "4"},
    "mini-swe": {
        "problem_statement": "add returns a difference, see case {}.",
        "files": {"solution.py": "def add(a, b):\n    return a - b\n"},
        "tests": "assert add(2, 3) == 5",
    },
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of two layers with a byte-level tokenizer and a chat template that declares tools."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("chat-model")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=pytest.mark.slow) for name in RECIPES])
def test_a_recipe_of_a_published_agent_takes_a_step(recipe, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = (row for name, row in ROWS.items() if recipe.startswith(name))
    key = "problem_statement" if "problem_statement" in row else "question"
    lines = [json.dumps(row | {key: row[key].format(number)}) + "\n" for number in range(20)]
    Path("train.jsonl").write_text("".join(lines))
    Path("corpus.jsonl").write_text(json.dumps({"text": "The Eiffel tower is in Paris."}) + "\n")
    keys = SMALL | RECIPES[recipe] | {"model.path": model_folder, "task.train_files": "[train.jsonl]"}
    (metrics,) = rows(train_here(recipe, tmp_path / "run", keys))
    assert metrics["agent/turns"] >= 1 and metrics["rollout/completion_tokens"] > 0
    assert sum(value for name, value in metrics.items() if name.startswith("agent/discarded/")) == 0
