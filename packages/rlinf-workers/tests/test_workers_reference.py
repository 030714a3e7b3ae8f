"""The reference takes a share of another model."""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlinf_workers.roles.language.reference import Reference
from rlinf_workers.trainers.base import BackendSettings


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_model_between_two(make_worker, model, tmp_path):
    own, other = (
        make_worker(Reference, dataclasses.replace(model, seed=seed), 1.0, BackendSettings()) for seed in (3, 4)
    )
    own.save_model(str(tmp_path / "own"))
    other.save_model(str(tmp_path / "other"))
    own.write_mixed(str(tmp_path / "other"), str(tmp_path / "mixed"), 0.25)
    before, policy, mixed = (tensors(tmp_path / name) for name in ("own", "other", "mixed"))
    assert before.keys() == mixed.keys() and any(not torch.equal(before[name], policy[name]) for name in before)
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * policy[name])
    own.load_model(str(tmp_path / "mixed"))
    own.save_model(str(tmp_path / "loaded"))
    for name, tensor in tensors(tmp_path / "loaded").items():
        assert torch.equal(tensor, mixed[name])
