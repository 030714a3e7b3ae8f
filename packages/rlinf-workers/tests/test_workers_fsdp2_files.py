"""Hugging Face folders go through FSDP2 bit for bit, five architectures on two ranks; so do first weights of a seed."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.architectures import ARCHITECTURES, tiny_architecture
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

SETTINGS = OptimizerSettings(learning_rate=1e-2)


class Copier(Worker):
    """Takes a folder into a sharded model and out again."""

    def copy(self, model: ModelSettings, folder: str) -> None:
        """From the folder at start, from the copy later, and first weights of the seed; a critic starts from it too."""

        def make(kind, settings):
            return fsdp2(kind(settings, *[1.0] * (kind is TokenModel)), self, optimizer=SETTINGS, num_shards=2)

        unread = dataclasses.replace(model, has_weights=False, seed=11)
        first, other, critic, next_critic = (
            make(kind, settings) for kind in (TokenModel, ValueModel) for settings in (model, unread)
        )
        self.save(other, f"{folder}/seed")
        self.save(first, f"{folder}/first")
        other.load_model(f"{folder}/first")
        self.save(other, f"{folder}/other")
        self.save(critic, f"{folder}/critic")
        next_critic.load_model(f"{folder}/critic")
        self.save(next_critic, f"{folder}/next_critic")

    def save(self, backend, folder: str) -> None:
        files = CheckpointFiles(self, folder)
        files.add_model(backend)
        files.start().wait()
        self.ranks.barrier()


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """Folders of each architecture: as it was, and what two ranks made of it."""
    folder = tmp_path_factory.mktemp("copied")
    with launched(LocalLauncher) as launcher:
        group = start(launcher, folder / "ranks", Copier, num_ranks=2)
        for name in ARCHITECTURES:
            group.call("copy", tiny_architecture(name, folder / name / "original"), str(folder / name))
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_comes_back_bit_for_bit(copied, name):
    original = copied / name / "original"
    expected = load_file(original / "model.safetensors")
    for copy in ("first", "other"):
        check_same(tensors_in(copied / name / copy), expected)
        for file in ("config.json", "generation_config.json"):
            if copy == "first":
                assert json.loads((copied / name / copy / file).read_text()) == json.loads(
                    (original / file).read_text()
                )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_seed_gives_the_numbers_that_it_gives_without_ranks(copied, tmp_path, name):
    settings = ModelSettings(folder=str(copied / name / "original"), has_weights=False, seed=11)
    build_model(settings, torch.device("cpu")).save_pretrained(tmp_path)
    tensors = tensors_in(copied / name / "seed")
    check_same(tensors, load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_critic_begins_with_the_folder_and_a_head_of_zeros(copied, name):
    settings = ModelSettings(folder=str(copied / name / "original"), has_weights=True)
    expected = ValueModel(settings).build(torch.device("cpu")).state_dict()
    for copy in ("critic", "next_critic"):
        check_same(tensors_in(copied / name / copy), expected)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def check_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensors[key].dtype == tensor.dtype, key
        assert torch.equal(tensors[key], tensor), key
