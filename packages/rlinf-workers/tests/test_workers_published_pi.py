"""Folders of pi0 and pi0.5 as openpi, its users and RLinf publish them: files in other places, or left out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workers_openpi_files import WORDS, write_layout

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Policy, PolicyError
from rlinf_workers.policies.pi0.openpi_files import own_name
from rlinf_workers.policies.pi0.policy import Pi0
from rlinf_workers.policies.pi0.processor import tokenizer_ids
from rlinf_workers.policies.pi05.policy import Pi05
from rlinf_workers.testing.policies import random_fields

pytest.importorskip("transformers", minversion="5.17")

FIELDS = {
    "state": FieldSpec(shape=(3,), dtype="float32"),
    "image.front": FieldSpec(shape=(28, 28, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
ACTIONS = ActionSpec(kind="continuous", shape=(2,), low=-torch.ones(2), high=torch.ones(2))
POLICIES = {"pi0": Pi0, "pi05": Pi05}


@pytest.fixture(params=["pi0", "pi05"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path, kind) -> Path:
    write_layout(tmp_path, "openpi", kind)
    return tmp_path


def _options(folder: Path, **options) -> dict:
    return {"folder": str(folder), "dataset": "lab", "chunk_size": 2, "num_denoising_steps": 1, **options}


def _actions(kind: str, options: dict) -> torch.Tensor:
    policy = POLICIES[kind]
    policy.needs(FIELDS, ACTIONS, **options)
    with torch.no_grad():
        return policy(FIELDS, ACTIONS, **options).act(random_fields(FIELDS, 2), None).actions


def test_statistics_beside_the_weights_are_those_of_rlinf(folder, kind):
    expected = _actions(kind, _options(folder))
    shutil.move(folder / "assets" / "lab", folder / "physical-intelligence" / "libero")
    assert torch.equal(_actions(kind, _options(folder, dataset="physical-intelligence/libero")), expected)
    with pytest.raises(PolicyError, match=r"dataset='libero': .* of physical-intelligence/libero; name one of them"):
        POLICIES[kind].needs(FIELDS, ACTIONS, **_options(folder, dataset="libero"))
    (folder / "assets" / "lab").mkdir()
    shutil.copy(folder / "physical-intelligence" / "libero" / "norm_stats.json", folder / "assets" / "lab")
    assert torch.equal(_actions(kind, _options(folder)), expected)


def test_a_folder_without_config_acts_with_the_horizon_of_the_recipe(folder, kind):
    expected = _actions(kind, _options(folder))
    (folder / "config.json").unlink()
    assert torch.equal(_actions(kind, _options(folder, horizon=3)), expected)
    with pytest.raises(PolicyError, match=r"config.json does not exist, .* set policy.options.horizon \(in openpi 50"):
        POLICIES[kind].needs(FIELDS, ACTIONS, **_options(folder))
    with pytest.raises(PolicyError, match=r"has chunk_size=1; here are 2 actions"):
        POLICIES[kind].needs(FIELDS, ACTIONS, **_options(folder, horizon=1))


def test_a_horizon_that_config_json_contradicts_is_refused(folder, kind):
    with pytest.raises(PolicyError, match=r"options.horizon=50: .* predicts 3 actions, by its config.json"):
        POLICIES[kind].needs(FIELDS, ACTIONS, **_options(folder, horizon=50))


def test_jax_weights_of_openpi_are_named_with_their_conversion(tmp_path, kind):
    (tmp_path / "params").mkdir()
    with pytest.raises(PolicyError, match=r"has JAX weights .*/convert_jax_model_to_pytorch.py"):
        POLICIES[kind].needs(FIELDS, ACTIONS, **_options(tmp_path))


def test_heads_of_reinforcement_learning_are_left_out_with_a_note(folder, kind):
    expected = _actions(kind, _options(folder))
    added = {"value_head.0.weight": torch.zeros(9, 9), "reinflow_explore_noise_net.fc.weight": torch.zeros(1)}
    save_file(load_file(folder / "model.safetensors") | added, folder / "model.safetensors")
    assert torch.equal(_actions(kind, _options(folder)), expected)
    (note,) = POLICIES[kind].needs(FIELDS, ACTIONS, **_options(folder)).notes
    assert "reinflow_explore_noise_net and value_head (2 tensors, from reinforcement learning) not loaded" in note


def test_tokenizer_json_alone_is_a_tokenizer(folder, kind):
    expected, actions = tokenizer_ids(str(folder))("Task: push, 3"), _actions(kind, _options(folder))
    (folder / "tokenizer_config.json").unlink()
    assert tokenizer_ids(str(folder))("Task: push, 3") == expected == [1, 3, 4, 10]
    assert torch.equal(_actions(kind, _options(folder)), actions)
    text = (folder / "tokenizer.json").read_text().replace(json.dumps(WORDS[1]), '"<start>"')
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(PolicyError, match=r"tokenizer.json has no begin token, <bos>"):
        POLICIES[kind].needs(
            FIELDS, ACTIONS, **_options(folder, state_in_prompt=False) if kind == "pi05" else _options(folder)
        )


@pytest.mark.parametrize("name", ["tokenizer.model", "paligemma_tokenizer.model"])
def test_sentencepiece_files_are_tokenizers(tmp_path, name):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = iter(["push the cube", "reach for the red cube", "Task: push, State: 1 2 3;"] * 5)
    with (tmp_path / name).open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=texts,
            model_writer=file,
            model_type="bpe",
            vocab_size=60,
            bos_id=2,
            eos_id=1,
            pad_id=0,
            unk_id=3,
            user_defined_symbols=["\n"],
            add_dummy_prefix=False,
            minloglevel=2,
        )
    ids = tokenizer_ids(str(tmp_path))("push the cube\n")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / name))
    assert ids == [2, *pieces.encode("push the cube"), *pieces.encode("\n")]
    assert pieces.decode(ids[1:]) == "push the cube\n"


def test_a_sentencepiece_file_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(PolicyError, match=r"pip install sentencepiece, or put PaliGemma's tokenizer.json there"):
        tokenizer_ids(str(tmp_path))


@pytest.mark.parametrize("are_differences", [True, False])
def test_statistics_that_contradict_the_recipe_are_noted(folder, kind, are_differences):
    """LIBERO's hand is turned by about pi; openpi takes the state away from the actions of its `pi0_libero`."""
    path = folder / "assets" / "lab" / "norm_stats.json"
    statistics = json.loads(path.read_text())["norm_stats"]
    statistics["state"]["mean"] = [2.97, 0.0, 0.0, 0.0]
    statistics["actions"]["mean"] = [-2.95 if are_differences else 0.02, 0.0, 0.0, 0.0]
    path.write_text(json.dumps({"norm_stats": statistics}))
    right, wrong = (_options(folder, relative_to_state=choice) for choice in (are_differences, not are_differences))
    assert POLICIES[kind].needs(FIELDS, ACTIONS, **right).notes == ()
    (note,) = POLICIES[kind].needs(FIELDS, ACTIONS, **wrong).notes
    assert f"relative_to_state is {str(not are_differences).lower()}, but the statistics of dataset='lab'" in note


KEPT_BY_OPENPI = (
    "vision_tower.vision_model.embeddings.patch_embedding.",
    "vision_tower.vision_model.embeddings.position_embedding.",
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
)
"""Of openpi's `to_bfloat16_for_selected_params`, which converts the other parameters of `paligemma_with_expert`."""


def test_bfloat16_leaves_in_float32_what_openpi_leaves(folder, kind):
    policy = POLICIES[kind](FIELDS, ACTIONS, **_options(folder, dtype="bfloat16"))
    wide = {name for name, parameter in policy.named_parameters() if parameter.dtype == torch.float32}
    wide_in_openpi = {
        f"model.{own_name(name, policy.spec)}"
        for name in load_file(folder / "model.safetensors")
        if not name.startswith("paligemma_with_expert.") or any(part in name for part in KEPT_BY_OPENPI)
    }
    assert {name for name in wide if not name.startswith(("value_head.", "noise_head."))} == wide_in_openpi
    assert any(parameter.dtype == torch.bfloat16 for parameter in policy.parameters())
    expected = _actions(kind, _options(folder))
    torch.testing.assert_close(_actions(kind, _options(folder, dtype="bfloat16")), expected, rtol=0, atol=0.1)
    policy.evaluate(*_sampled(policy)).logprobs.sum().backward()


def _sampled(policy: Policy) -> tuple:
    fields = random_fields(FIELDS, 2)
    with torch.no_grad():
        answer = policy.act(fields, torch.randn(2, policy.noise_size))
    return fields, answer.actions, answer.extras
