"""The FSDP2 backend: it conforms on one rank and on two, whose shards may be uneven, and waits for nobody."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.testing.backends import BATCH, Chooser, check_backend, check_ranks, trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.fsdp2.backend import FSDP2Backend, fsdp2
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1, max_grad_norm=1e9)
WIDTHS = {0: (3, 1, 4), 1: (1,)}
"""Rank -> completion tokens of its micro-batches; of one token, a model is called once, else twice."""


def test_it_conforms_alone(tmp_path):
    check_backend(fsdp2, str(tmp_path))


class Moving(FSDP2Backend):
    """Goes to other memory of the host as it goes from a GPU to the host and back."""

    def offload(self) -> None:
        self._move(self._places.take)

    def onload(self) -> None:
        self._move(lambda _, tensor: tensor.clone())


def moving(model, worker, **options):
    if options["optimizer"] is None:
        return fsdp2(model, worker, **options)
    return Moving(model, worker, lower=None, recompute=False, **options)


def test_it_conforms_where_its_memory_moves(tmp_path):
    check_backend(moving, str(tmp_path))


def test_it_conforms_on_two_ranks(tmp_path):
    check_ranks(moving, str(tmp_path), num_ranks=2, num_ranks_per_replica=1)


def batch_of(width: int) -> SequenceBatch:
    """Two completions of a prompt of 3 tokens, padded by one."""
    ids = torch.arange(2 * width).view(2, width) % 5 + 1
    return SequenceBatch(
        prompt_ids=torch.tensor([[0, 2, 1, 4]]),
        prompt_mask=torch.tensor([[0, 1, 1, 1]]),
        completion_ids=ids,
        loss_mask=torch.ones(2, width),
    )


def loss_of(answers):
    return (answers.values.square().sum() - answers.logprobs.sum()), [1.0]


def train(make, worker, model, widths, **options):
    """Policy and critic, with forwards of different numbers between; three updates. Returns the norms."""
    kinds = (TokenModel(model, 1.0), ValueModel(model))
    policy, critic = (make(kind, worker, optimizer=SETTINGS, num_shards=2, **options) for kind in kinds)
    critic.start_from(policy)
    norms = []
    for _ in range(3):
        for width in widths:
            critic.forward(batch_of(width))
        for backend in (policy, critic):
            backend.begin(1)
            for width in widths:
                backend.backward(worker.rank, batch_of(width), loss_of)
            assert backend.finish_backward() == [4.0]
            norms.append(backend.step(4.0))
    return policy, critic, norms


class Uneven(Worker):
    """A rank with micro-batches of its own number and sizes."""

    def learn(self, model, folder: str, options: dict) -> list[float]:
        policy, critic, norms = train(fsdp2, self, model, WIDTHS[self.rank], **options)
        for backend, name in ((policy, "policy"), (critic, "critic")):
            save(backend, self, f"{folder}/{name}")
        return norms

    def idle_update(self, folder: str) -> float:
        """An update for which the second rank has nothing at all."""
        backend = fsdp2(Chooser(), self, optimizer=SETTINGS, num_shards=2)
        backend.begin(1)
        for part in BATCH.split(5) if self.rank == 0 else ():
            backend.backward(0, part, loss_of)
        assert backend.finish_backward() == [5.0]
        return backend.step(1.0)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def language_model(request, tmp_path_factory):
    settings = dataclasses.replace(tiny_model(tmp_path_factory.mktemp("model")), has_weights=False)
    config = AutoConfig.from_pretrained(settings.folder)
    config.tie_word_embeddings = request.param
    config.save_pretrained(settings.folder)
    return settings


class TwoShards(ReplicatedBackend):
    """One rank that has the micro-batches of both."""

    def backward(self, shard, batch, loss_of, *, entropies=False):
        super().backward(0, batch, loss_of, entropies=entropies)


def test_ranks_with_different_micro_batches_learn_what_one_rank_learns(tmp_path, language_model):
    *expected, norms = train(TwoShards, trial_worker(), language_model, [w for ws in WIDTHS.values() for w in ws])
    with launched(LocalLauncher) as launcher:
        group = start(launcher, tmp_path / "ranks", Uneven, num_ranks=2)
        for options in ({}, {"recompute": True}):
            norms_of_ranks = group.call("learn", language_model, str(tmp_path), options)
            assert norms_of_ranks[0] == norms_of_ranks[1] == pytest.approx(norms, rel=1e-5)
            for backend, name in zip(expected, ("policy", "critic"), strict=True):
                check_files(backend, tmp_path / name, tmp_path / f"one-{name}")
        rough = group.call("learn", language_model, str(tmp_path), {"compute_dtype": "bfloat16"})
        assert rough[0] != pytest.approx(norms, rel=1e-5)
        assert rough[0] == pytest.approx(norms, rel=0.05)
        idle = group.call("idle_update", str(tmp_path))
    assert idle[0] == idle[1] > 0


def save(backend, worker, folder: str):
    files = CheckpointFiles(worker, folder)
    files.add_model(backend)
    files.add_optimizer(backend)
    files.start().wait()


def tensors_in(folder: Path, stem: str):
    files = WeightFiles(folder, stem)
    return {name: files.read(name).clone() for name in files.specs}


def check_files(backend, shared_folder: Path, folder: Path):
    """Two ranks wrote what one would, each its share, and one goes on from it."""
    save(backend, trial_worker(), str(folder))
    for stem in ("model", "optimizer"):
        tensors, expected = tensors_in(shared_folder, stem), tensors_in(folder, stem)
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert tensor.dtype == expected[key].dtype
            torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6, msg=f"{stem}: {key}")
        one, other = (path.stat().st_size for path in sorted(shared_folder.glob(f"{stem}-0000?-of-00002.safetensors")))
        assert 0.5 < one / other < 2
    backend.load_model(str(shared_folder))
    backend.load_optimizer(str(shared_folder))
    assert json.loads((shared_folder / "optimizer.json").read_text()) == {"num_steps": 3}


def test_a_frozen_model_is_whole_and_computes_as_the_trained_one(language_model):
    frozen = fsdp2(TokenModel(language_model, 1.0), trial_worker(), optimizer=None, num_shards=2)
    assert frozen.layout().num_ranks == 1
    rough = fsdp2(
        TokenModel(language_model, 1.0), trial_worker(), optimizer=None, num_shards=2, compute_dtype="bfloat16"
    )
    assert {w.dtype for w in rough.weights().values()} == {torch.bfloat16}
    exact, rounded = (backend.forward(batch_of(4)).logprobs for backend in (frozen, rough))
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().max() < 0.05


def test_a_model_without_layers_has_nothing_to_compute_again():
    with pytest.raises(ValueError, match="Sequential has no decoder layers with an `mlp`"):
        fsdp2(Chooser(), trial_worker(), optimizer=SETTINGS, num_shards=2, recompute=True)
