"""Files of a model and its optimizer: those that transformers and safetensors write, shared out over ranks."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.models.weight_files import WeightFiles, file_names, index_name
from rlinf_workers.models.weight_writer import index_of, write_tensors
from rlinf_workers.testing.architectures import ARCHITECTURES, SIZES, tiny_architecture
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers.checkpoint import CheckpointFiles, writers
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend


def test_a_file_is_that_of_the_safetensors_library(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.randn(5).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "step": torch.tensor([7], dtype=torch.int64),
        "flag": torch.tensor([True, False]),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "größe": torch.ones(3, dtype=torch.float64),
    }
    digest = write_tensors(tmp_path / "model.safetensors", tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert content == safetensors.torch.save(contiguous, metadata={"format": "pt"})
    assert digest == hashlib.sha256(content).hexdigest()


@pytest.fixture(params=ARCHITECTURES)
def saved(request, tmp_path) -> Path:
    """A folder that transformers wrote, with a tokenizer."""
    tiny_architecture(request.param, tmp_path / "saved")
    tokenizer = tiny_model(tmp_path / "tokenizer").folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes(Path(tokenizer, name).read_bytes())
    return tmp_path / "saved"


@pytest.mark.parametrize("has_weights", [True, False])
def test_what_ranks_write_is_what_transformers_writes(saved, tmp_path, has_weights):
    """A third of the model each; loaded again it is the same to the bit."""
    if has_weights:
        GenerationConfig.from_pretrained(saved).save_pretrained(saved, temperature=0.5)
    else:
        (saved / "generation_config.json").unlink()
    kind = TokenModel(ModelSettings(folder=str(saved), has_weights=has_weights, seed=3), 1.0)
    model: Any = kind.build(torch.device("cpu"))
    model.save_pretrained(tmp_path / "whole")
    expected = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")

    folder, num_ranks = tmp_path / "shared", 3
    folder.mkdir()
    ranks = writers(kind, model, num_ranks)
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    files = {}
    for rank, name in enumerate(file_names("model", num_ranks)):
        part = kind.to_files(model, {key: tensor for key, tensor in tensors.items() if ranks[key] == rank})
        write_tensors(folder / name, part)
        files[name] = {key: tensor.nbytes for key, tensor in part.items()}
    (folder / index_name("model")).write_text(index_of(files))
    kind.describe(str(folder))

    weight_files = WeightFiles(folder)
    assert set(weight_files.specs) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weight_files.read(name), tensor), name
    total = sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((folder / index_name("model")).read_text())["metadata"]["total_size"] == total
    assert max(sum(sizes.values()) for sizes in files.values()) < 0.5 * total
    for name in ("config.json", "generation_config.json"):
        assert (folder / name).read_text() == (tmp_path / "whole" / name).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(model) and AutoConfig.from_pretrained(folder).to_dict() == loaded.config.to_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_what_becomes_one_tensor_in_a_file_is_written_by_one_rank(monkeypatch):
    """As for models whose queries, keys and values are one tensor on disk."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    joined = WeightConverter(
        source_patterns=["self_attn.qkv.weight"],
        target_patterns=["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [joined])
    kind = TokenModel(ModelSettings(folder="", has_weights=False), 1.0)
    ranks = writers(kind, model, 4)
    for layer in range(2):
        assert len({ranks[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"}) == 1
    assert set(ranks.values()) == {0, 1, 2, 3}


def test_a_full_disk_is_told_with_the_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("/dev/full")
    worker = trial_worker()
    files = CheckpointFiles(worker, str(tmp_path))
    files.add_model(ReplicatedBackend(Chooser(), worker, optimizer=None, num_shards=1))
    with pytest.raises(OSError, match=r"No space left on device: '.*/model\.safetensors'"):
        files.start().wait()
