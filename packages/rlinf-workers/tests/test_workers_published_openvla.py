"""Folders of OpenVLA as others publish them: statistics in two files, adapters, heads of reinforcement learning."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from workers_plain_openvla import MEANS, STDS, published_tensors, write_checkpoint

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.checkpoint import spec_of_folder
from rlinf_workers.policies.openvla.pixels import center_cropped, resized
from rlinf_workers.policies.openvla.policy import OpenVLA
from rlinf_workers.roles.records.embodied import text_tensor
from rlinf_workers.testing.policies import random_fields

FIELDS = {
    "image.front": FieldSpec(shape=(21, 21, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
ACTIONS = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.tensor([1.0, 2.0, 3.0]))
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    write_checkpoint(tmp_path, published_tensors())
    return tmp_path


def _options(folder: Path, **options) -> dict:
    return {"folder": str(folder), "unnorm_key": "bridge_orig", **options}


def _fields(num_rows: int = 2) -> dict[str, torch.Tensor]:
    pictures = random_fields({"image.front": FIELDS["image.front"]}, num_rows)
    return pictures | {"instruction": text_tensor(["push the cube"] * num_rows)}


def _logprobs(policy: OpenVLA, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return policy.evaluate(fields, torch.zeros(len(fields["image.front"]), 1, 3), {}).logprobs


def test_statistics_of_both_files_are_read_and_those_of_fine_tuning_count(folder):
    mine = {"q01": [-0.1, -0.1, 0.0], "q99": [0.1, 0.1, 1.0]}
    (folder / "dataset_statistics.json").write_text(json.dumps({"mine": {"action": mine}, "kuka": {"action": mine}}))
    lows = {
        key: spec_of_folder(str(folder), key, "quantiles").statistics.low for key in ("bridge_orig", "mine", "kuka")
    }
    assert lows == {"bridge_orig": [-0.5, 0.0, 0.25], "mine": mine["q01"], "kuka": mine["q01"]}
    (folder / "dataset_statistics.json").write_text(json.dumps({"mine": {"action": mine}}))
    assert spec_of_folder(str(folder), None, "quantiles").dataset == "mine"


def test_colours_are_normalized_with_the_numbers_of_the_published_processor(folder):
    """openvla's conversion stores rounded numbers there, which its processor uses."""
    path = folder / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    rows = [{"inplace": False, "mean": mean, "std": std} for mean, std in zip(MEANS, STDS, strict=True)]
    exact = {"means": [[0.485, 0.456, 0.406], [0.5] * 3], "stds": [[0.229, 0.224, 0.225], [0.5] * 3]}
    expected = _logprobs(OpenVLA(FIELDS, ACTIONS, **_options(folder)), _fields())
    path.write_text(json.dumps(processor | exact))
    assert not torch.equal(_logprobs(OpenVLA(FIELDS, ACTIONS, **_options(folder)), _fields()), expected)
    path.write_text(json.dumps(processor | exact | {"tvf_normalize_params": rows}))
    assert torch.equal(_logprobs(OpenVLA(FIELDS, ACTIONS, **_options(folder)), _fields()), expected)


def test_heads_of_reinforcement_learning_are_left_out_with_a_note(folder, tmp_path_factory):
    options = _options(folder)
    policy = OpenVLA(FIELDS, ACTIONS, **options)
    assert OpenVLA.needs(FIELDS, ACTIONS, **options).notes == ()
    added = {"value_head.0.weight": torch.zeros(512, 24), "value_head.mlp.2.weight": torch.zeros(128, 512)}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(load_file(folder / SHARD) | added, folder / SHARD)
    (note,) = OpenVLA.needs(FIELDS, ACTIONS, **options).notes
    assert "value_head (2 tensors, from reinforcement learning) not loaded" in note
    with_head = OpenVLA(FIELDS, ACTIONS, **options)
    assert torch.equal(_logprobs(with_head, _fields()), _logprobs(policy, _fields()))
    exported = tmp_path_factory.mktemp("exported")
    with_head.write_published(exported)
    assert load_file(exported / SHARD)["value_head.0.weight"].shape == (512, 24)


def test_a_lora_folder_is_added_as_peft_adds_it(folder, tmp_path_factory):
    peft = pytest.importorskip("peft")
    adapter = tmp_path_factory.mktemp("adapter")
    layers = ["q_proj", "down_proj", "attn.qkv", "patch_embed.proj", "projector.fc1"]
    config = peft.LoraConfig(
        r=4, lora_alpha=2, target_modules=layers, init_lora_weights=False, alpha_pattern={"down_proj": 8}
    )
    adapted = peft.get_peft_model(OpenVLA(FIELDS, ACTIONS, **_options(folder)), config)
    adapted.save_pretrained(adapter)
    expected = adapted.merge_and_unload().state_dict()
    options = _options(folder, lora_folder=str(adapter))
    OpenVLA.needs(FIELDS, ACTIONS, **options)
    policy = OpenVLA(FIELDS, ACTIONS, **options)
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    plain = OpenVLA(FIELDS, ACTIONS, **_options(folder)).state_dict()
    assert sum(not torch.equal(plain[name], tensor) for name, tensor in expected.items()) == 2 + 2 + 3 + 2 + 1


def test_lora_folders_that_do_not_fit_are_refused(folder, tmp_path_factory):
    peft = pytest.importorskip("peft")
    adapter = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], base_model_name_or_path="openvla/openvla-7b")
    peft.get_peft_model(OpenVLA(FIELDS, ACTIONS, **_options(folder)), config).save_pretrained(adapter)
    with pytest.raises(
        PolicyError, match=r"is a LoRA adapter of .*; set options.folder to that base and options.lora_"
    ):
        OpenVLA.needs(FIELDS, ACTIONS, folder=str(adapter))
    with pytest.raises(PolicyError, match=r"adapter_config.json does not exist; options.lora_folder has to be"):
        OpenVLA.needs(FIELDS, ACTIONS, **_options(folder, lora_folder=str(folder)))
    with pytest.raises(PolicyError, match=r"lora_folder is an adapter of a checkpoint; set options.folder"):
        OpenVLA.needs(FIELDS, ACTIONS, lora_folder=str(adapter))
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    for change, says in (
        (
            {"base_model.model.q_proj.lora_magnitude_vector": torch.ones(2)},
            r"it has q_proj.lora_magnitude_vector, which",
        ),
        ({first: torch.ones(4, 7)}, r"the update of language_model.* has the shapes .*, and the weight \[24, 24\]"),
        ({first.replace("layers.0", "layers.9"): torch.ones(4, 24)}, r"layers.9.self_attn.q_proj.weight, which is no"),
    ):
        save_file(tensors | change, adapter / "adapter_model.safetensors")
        with pytest.raises(PolicyError, match=says):
            OpenVLA.needs(FIELDS, ACTIONS, **_options(folder, lora_folder=str(adapter)))


def test_the_middle_of_a_picture_is_seen_alone(folder):
    """Cropped pictures have whole levels, so a policy without the crop sees them as they are."""
    fields = _fields()
    middle = (center_cropped(resized(fields["image.front"], 21)) * 255).round().byte().movedim(1, -1)
    expected = _logprobs(OpenVLA(FIELDS, ACTIONS, **_options(folder)), fields | {"image.front": middle})
    cropped = OpenVLA(FIELDS, ACTIONS, **_options(folder, center_crop=True))
    assert torch.equal(_logprobs(cropped, fields), expected)
    assert not torch.equal(_logprobs(cropped, fields | {"image.front": middle}), expected)


def test_a_checkpoint_of_libero_without_the_crop_is_noted(folder):
    config = json.loads((folder / "config.json").read_text())
    config["norm_stats"] = {"libero_goal_no_noops": config["norm_stats"]["bridge_orig"]}
    (folder / "config.json").write_text(json.dumps(config))
    (note,) = OpenVLA.needs(FIELDS, ACTIONS, folder=str(folder)).notes
    assert "center_crop is false: checkpoints fine-tuned on libero_goal_no_noops" in note
    assert OpenVLA.needs(FIELDS, ACTIONS, folder=str(folder), center_crop=True).notes == ()
    shutil.rmtree(folder)
