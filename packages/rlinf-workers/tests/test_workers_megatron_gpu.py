"""The backend `megatron` on one GPU, against transformers' model on the same GPU: no shim, no Transformer Engine."""

import sys
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from workers_megatron_ranks import packed_of

from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.backends import NUM_ROWS, update
from rlinf_workers.testing.language_backends import TEMPERATURE, LanguageSubject
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
SIZES = {
    "vocab_size": 4_003,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128}
MODELS = {"qwen2": SIZES, "qwen3_moe": {**SIZES, **EXPERTS}}
ADAMW = OptimizerSettings(learning_rate=1e-3, epsilon=1e-4, max_grad_norm=1.0)


class OnGPU(LanguageSubject):
    """Batches on the device."""

    def rows(self, which):
        return super().rows(which).to(GPU)


@pytest.fixture(scope="module")
def worker():
    """This process, as the only rank of a group with a GPU."""
    identity = Identity(role="actor", rank=0, num_ranks=1, devices=("cuda:0",))
    return WorkerHost(identity, lambda *_, **__: Future()).make(Worker)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    return tiny_architecture(request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param])


def backend_of(kind, worker, **options):
    from rlinf_workers.trainers.megatron.make import megatron

    backend: Any = megatron(kind, worker, optimizer=ADAMW, num_shards=1, **options)
    assert all(weight.device.type == "cpu" for weight in backend.weights().values()), "what is made waits on the host"
    backend.onload()
    return backend


@pytest.fixture(autouse=True)
def without_shim():
    yield
    assert "rlinf_workers.trainers.megatron.shim" not in sys.modules
    if "megatron.core" in sys.modules:
        from rlinf_workers.trainers.megatron import parallel

        parallel.disconnect()


def worst(actual, expected):
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def compare(kind, worker, subject):
    """Answers and one update beside transformers' model, autograd and torch's AdamW, all in float32."""
    reference = kind.build(GPU)
    backend = backend_of(kind, worker)
    expected = kind.answers(reference, subject.batch, entropies=True)
    actual = backend.forward(subject.batch, entropies=True)
    mask = subject.batch.loss_mask.bool()
    name = "logprobs" if isinstance(kind, TokenModel) else "values"
    answers = float((getattr(actual, name) - getattr(expected, name)).detach()[mask].abs().max())
    adamw = ADAMW.adamw(reference.named_parameters())
    (subject.loss(subject.batch, expected) / NUM_ROWS).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), ADAMW.max_grad_norm))
    adamw.step()
    backend.begin(2)
    backend.backward(0, subject.batch, subject.loss_of(subject.batch), entropies=True)
    backend.finish_backward()
    norms = abs(backend.step(NUM_ROWS) / norm - 1)
    trained = backend.forward(subject.batch)
    after = kind.answers(reference, subject.batch, entropies=False)
    moved = float((getattr(trained, name) - getattr(after, name)).detach()[mask].abs().max())
    return {"answers": answers, "norm": norms, "answers_after_a_step": moved}


def test_it_says_and_learns_what_transformers_does(model, worker):
    differences = compare(TokenModel(model, TEMPERATURE), worker, OnGPU())
    assert differences["answers"] <= 1e-4, differences
    assert differences["norm"] <= 1e-4, differences
    assert differences["answers_after_a_step"] <= 1e-3, differences


class WithValues(OnGPU):
    def loss(self, batch, answers):
        return ((answers.values - 1.0).square() * batch.loss_mask).sum()


def test_a_critic_does_too(model, worker):
    differences = compare(ValueModel(model), worker, WithValues())
    assert differences["answers"] <= 1e-5, differences
    assert differences["norm"] <= 1e-4, differences
    assert differences["answers_after_a_step"] <= 1e-3, differences


def test_packed_rows_equal_padded_ones(model, worker):
    subject, kind = OnGPU(), TokenModel(model, TEMPERATURE)
    padded, results = subject.batch, []
    for batch in (padded, packed_of(padded.to(torch.device("cpu"))).to(GPU)):
        backend = backend_of(kind, worker)
        logprobs = backend.forward(batch).logprobs * padded.loss_mask
        backend.begin(2)
        backend.backward(0, batch, subject.loss_of(padded), entropies=True)
        backend.finish_backward()
        results.append((logprobs, backend.step(NUM_ROWS)))
    (expected, expected_norm), (actual, norm) = results
    assert (actual - expected).abs().max() <= 1e-4
    assert norm == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}, {"compute_dtype": "bfloat16"}])
def test_it_leaves_the_device_and_comes_back(options, model, worker):
    """In the middle of an update, and between two, to the bit."""
    subject, kind = OnGPU(), TokenModel(model, TEMPERATURE)
    moved, stayed = (backend_of(kind, worker, **options) for _ in range(2))
    stayed.offload()
    resting = torch.cuda.memory_allocated()
    moved.offload()
    assert moved._model.decoder.layers[0].self_attention.linear_qkv.weight.untyped_storage().nbytes() == 0
    assert torch.cuda.memory_allocated() < resting

    def aside():
        moved.offload()
        assert all(weight.device.type == "cpu" for weight in moved.weights().values())
        moved.onload()

    moved.onload()
    stayed.onload()
    for _ in range(2):
        update(stayed, subject)
        aside()
        update(moved, subject, pause=aside)
        aside()
    for name, weight in stayed.weights().items():
        assert torch.equal(weight, moved.weights()[name]), name


def test_bfloat16_is_near(model, worker):
    subject, kind = OnGPU(), TokenModel(model, TEMPERATURE)
    exact = backend_of(kind, worker).forward(subject.batch).logprobs
    from rlinf_workers.trainers.megatron import parallel

    parallel.disconnect()
    rounded = backend_of(kind, worker, compute_dtype="bfloat16").forward(subject.batch).logprobs
    mask = subject.batch.loss_mask.bool()
    assert 0 < worst(rounded[mask], exact[mask]) < 0.3


def test_layers_are_computed_again(model, worker):
    subject, kind = OnGPU(), TokenModel(model, TEMPERATURE)
    expected = backend_of(kind, worker)
    update(expected, subject)
    from rlinf_workers.trainers.megatron import parallel

    parallel.disconnect()
    recomputing = backend_of(kind, worker, recompute=True)
    update(recomputing, subject)
    for name, weight in expected.weights().items():
        assert worst(recomputing.weights()[name], weight) < 1e-5, name
