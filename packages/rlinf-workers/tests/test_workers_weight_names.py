"""Tensors of Hugging Face folders, put where a model in memory has them: what transformers itself loads, five
architectures and a critic."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlinf_workers.errors import WeightFilesError
from rlinf_workers.models.weight_names import StoredWeights, plain_weights, pretrained_weights
from rlinf_workers.testing.architectures import ARCHITECTURES, tiny_architecture


def loaded(model, stored: StoredWeights):
    """The model with every tensor of `stored` read anew."""
    tensors = model.state_dict()
    with torch.no_grad():
        for name in stored.layout.ranks[0].buffers:
            tensors[name].fill_(7.0)
    stored.files.fill(stored.layout, 0, tensors)
    return tensors


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_tensors_are_found(tmp_path, name):
    settings = tiny_architecture(name, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tensors = loaded(model, pretrained_weights(model, settings.folder))
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor), key


def test_names_in_memory_are_read_too(tmp_path):
    """As a backend's own files have them."""
    tiny_architecture("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(expected, tmp_path / "model.safetensors")
    for read in (plain_weights, pretrained_weights):
        tensors = loaded(model, read(model, tmp_path))
        assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())


def change(folder: Path, how) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight not in its safetensors files"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight \[3\] instead of \[32\]"),
        (lambda t: t.pop("model.layers.0.mlp.experts.2.up_proj.weight"), r"make up \[3, 32, 32\]; the model's"),
        (lambda t: t.pop("model.layers.0.mlp.experts.2.gate_proj.weight"), r"make up \[3, 32, 32\]; the model's"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(15, 32)}),
            r"0.up_proj.weight and what belongs to it make up \[4, 32, 32\]",
        ),
        (
            lambda t: [t.pop(f"model.layers.0.mlp.experts.3.{part}_proj.weight") for part in ("up", "gate")],
            r"make up \[3, 32, 32\]; the model's .*gate_up_proj is \[4, 32, 32\]",
        ),
        (
            lambda t: [t.pop(f"model.layers.1.mlp.experts.{e}.down_proj.weight") for e in range(4)],
            "model.layers.1.mlp.experts.down_proj not in",
        ),
    ],
)
def test_what_is_not_there_is_named(tmp_path, how, says):
    tiny_architecture("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    change(tmp_path, how)
    with pytest.raises(WeightFilesError, match=says):
        pretrained_weights(model, tmp_path)


def test_what_cannot_be_read_in_parts_is_refused(tmp_path, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    tiny_architecture("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    change(tmp_path, lambda t: t.update({"model.norm.turned": t.pop("model.norm.weight")}))
    turned = WeightConverter("norm.turned", "norm.weight", [Transpose(0, 0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [turned])
    with pytest.raises(WeightFilesError, match=r"makes it of model.norm.turned and others by Transpose, which cannot"):
        pretrained_weights(model, tmp_path)
