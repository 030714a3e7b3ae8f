"""What is refused of a model folder, and what is said of it, before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Phi3Config

from rlinf.errors import UserError
from rlinf.jobs.models import check_architecture, check_end_tokens, code_notes
from rlinf_workers.models import load_tokenizer
from rlinf_workers.models.language_model import stop_token_ids
from rlinf_workers.roles.language.probe import recurrent_state, rope_limit

TRAIN = (
    "train gsm8k-grpo --model.path model --task.train_files [train.jsonl] --task.eval_files [test.jsonl] "
    "--rollout.max_prompt_tokens 100 --rollout.max_new_tokens 30"
)
EVAL = "eval own=test.jsonl --model model --benchmarks.own.reward exact_match --max_new_tokens 16"


def edit(path: Path, **changes: Any) -> None:
    """Changes values of a JSON file; None takes one away."""
    values = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.fixture
def model(gsm8k_inputs: Path) -> Path:
    return gsm8k_inputs / "model"


# -- end tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [TRAIN, EVAL], ids=["train", "eval"])
def test_a_model_whose_completions_cannot_end_is_refused(refused, model: Path, line: str):
    edit(model / "config.json", eos_token_id=None)
    edit(model / "tokenizer_config.json", eos_token=None)
    message = refused(*line.split())
    assert "model: nothing names an end token (eos_token_id of generation_config.json, of config.json" in message
    assert "hint: put the id of the token that ends an answer into generation_config.json" in message


def test_all_end_tokens_that_are_named_end_completions(model: Path):
    """Llama-3 fine-tunes: config.json names the end of a text, the tokenizer the end of a turn."""
    edit(model / "config.json", eos_token_id=3)
    edit(model / "generation_config.json", eos_token_id=[4, 3])
    tokenizer = load_tokenizer(str(model))
    assert stop_token_ids(str(model), tokenizer) == (4, 3, tokenizer.eos_token_id)
    (note,) = check_end_tokens(model, tokenizer)
    assert "each of the end tokens b, a (generation_config.json); a (config.json); <end> (the tokenizer)" in note


def test_one_end_token_needs_no_note(model: Path):
    tokenizer = load_tokenizer(str(model))
    edit(model / "generation_config.json", eos_token_id=[tokenizer.eos_token_id])
    assert check_end_tokens(model, tokenizer) == ()
    assert stop_token_ids(str(model), tokenizer) == (tokenizer.eos_token_id,)


def test_the_end_token_of_a_model_with_parts_is_that_of_its_text(model: Path):
    edit(model / "config.json", eos_token_id=None, text_config={"eos_token_id": 4})
    tokenizer = load_tokenizer(str(model))
    assert stop_token_ids(str(model), tokenizer) == (4, tokenizer.eos_token_id)


# -- code in the folder --------------------------------------------------------------------------------------------

RUNS = "raise SystemExit('code of the folder was run')\n"


@pytest.mark.parametrize("line", [TRAIN, EVAL], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}}, "has no model_type='mine'"),
        ("tokenizer_config.json", {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.T", None]}}, "Mine"),
    ],
    ids=["model", "tokenizer"],
)
def test_code_that_a_folder_needs_is_refused_and_not_run(
    refused, model: Path, line: str, file: str, changes: dict[str, Any], says: str
):
    edit(model / file, **changes)
    (model / "mine.py").write_text(RUNS)
    message = refused(*line.split())
    assert f"{file} names code in the folder (auto_map: Auto" in message and says in message
    assert "code that a model brings along is never run" in message


def test_code_that_transformers_does_not_need_is_not_run_and_noted(rlinf, model: Path):
    edit(model / "config.json", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})
    (model / "mine.py").write_text(RUNS)
    assert code_notes(model) == (
        "model.path: config.json names code in the folder (auto_map: AutoConfig, AutoModelForCausalLM), which is not "
        "run; transformers' own classes are used",
    )
    with pytest.raises(AssertionError, match="a job was started"):
        rlinf(*TRAIN.split())


# -- architectures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [TRAIN, EVAL], ids=["train", "eval"])
@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next", "rwkv", "bert"])
def test_an_architecture_that_would_be_computed_wrongly_is_refused(refused, model: Path, line: str, kind: str):
    """Falcon-H1 was evaluated wrongly in silence; Qwen3-Next and RWKV failed in a worker; BERT looks ahead."""
    config = json.loads((model / "config.json").read_text())
    edit(model / "config.json", model_type=kind, architectures=None, **{"rope_parameters": None, "layer_types": None})
    assert config["model_type"] == "qwen2"
    message = refused(*line.split())
    assert f"model: model_type='{kind}' cannot be used here: " in message
    assert ("log-probabilities are up to" if kind == "bert" else "keeps a recurrent state") in message
    assert "hint: docs/models.md lists" in message


def test_a_rope_that_depends_on_the_length_is_refused_beyond_it(model: Path):
    """Phi-3 with 128k positions has other frequencies for all tokens of a sequence beyond 4,096."""
    factors = [1.0] * 4
    config = Phi3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    )
    config.save_pretrained(model)
    check_architecture(model, ["engine"], num_tokens=64)
    with pytest.raises(UserError, match="rope depends on a sequence's length beyond 64 tokens"):
        check_architecture(model, ["engine"], num_tokens=65)


def test_what_depends_on_the_length_is_read_from_the_config():
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert rope_limit(AutoConfig.for_model("llama", max_position_embeddings=77, rope_parameters=dynamic)) == 77
    assert rope_limit(AutoConfig.for_model("llama")) is None
    conv = AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    assert (
        recurrent_state(conv)
        == "Lfm2ForCausalLM has layers with a recurrent or convolutional state (LinearAttentionLayer)"
    )
    assert recurrent_state(AutoConfig.for_model("mistral")) is None
    indexed = recurrent_state(AutoConfig.for_model("deepseek_v32"))
    assert indexed is not None and "choose keys by an index of their own (DynamicIndexedLayer)" in indexed
