"""Compiled decoder layers compute what plain ones do, for rows of any length with one compilation, and a compilation
that fails is noted. The compiler here is torch's own without code generation."""

from functools import partial

import pytest
import torch
from test_workers_packed import ARCHITECTURES, SHAPE, TEMPERATURE, model_of, sample_group
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig

from rlinf_workers.models import compiled_layers
from rlinf_workers.models.compiled_layers import compile_layers
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend

CPU = torch.device("cpu")
SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=1e9)
GROUPS = [sample_group(number, 7 + number, [5 + number, 2]) for number in range(4)]
"""Packed rows of four lengths, none of which is another size of the model."""
ROUNDING = 2e-6
BACKENDS = {"replicated": ReplicatedBackend, "fsdp2, recomputed": partial(fsdp2, recompute=True)}


@pytest.fixture
def counter(monkeypatch):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", count)
    yield count
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def kind(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    AutoConfig.for_model("qwen2", **SHAPE).save_pretrained(path)
    return TokenModel(ModelSettings(folder=str(path), has_weights=False), TEMPERATURE)


def trained(make, kind, groups=GROUPS, pack=pack_without_padding, **options):
    """Statistics and norm of an update, log-probabilities after it, and what was noted."""
    worker = trial_worker()
    backend = make(kind, worker, optimizer=SETTINGS, num_shards=1, **options)
    backend.begin(1)
    for group in groups:
        loss_of = lambda answers: (answers.logprobs.sum(), [float(answers.logprobs.detach().sum())])  # noqa: E731
        backend.backward(0, pack([group]), loss_of)
    totals = [*backend.finish_backward(), backend.step(10.0)]
    return totals, backend.forward(pack([groups[0]])).logprobs, worker._host.notes


@pytest.mark.slow
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_compiled_layers_train_alike_and_lengths_compile_nothing(counter, kind, make):
    totals, outputs, _ = trained(make, kind, compile=False)
    assert counter.frame_count == 0
    compiled_totals, compiled_outputs, notes = trained(make, kind, groups=GROUPS[:1], compile=True)
    first = counter.frame_count
    assert first > 0 and notes == []
    compiled_totals, compiled_outputs, _ = trained(make, kind, compile=True)
    assert counter.frame_count == first, "neither other layers nor other lengths compile anew"
    assert compiled_totals == pytest.approx(totals, rel=1e-5)
    torch.testing.assert_close(compiled_outputs, outputs, rtol=0, atol=ROUNDING)


def test_padded_passes_are_not_compiled(counter, kind):
    totals, _, _ = trained(ReplicatedBackend, kind, pack=pack_groups, compile=True)
    assert counter.frame_count == 0
    assert totals == trained(ReplicatedBackend, kind, pack=pack_groups, compile=False)[0]


def test_a_compilation_that_fails_is_noted_once_and_layers_run_as_they_are(monkeypatch, kind):
    torch._dynamo.reset()

    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    totals, outputs, notes = trained(ReplicatedBackend, kind, compile=True)
    torch._dynamo.reset()
    assert len(notes) == 1 and "actor.backend_options.compile: layers could not be compiled" in notes[0]
    expected, expected_outputs, _ = trained(ReplicatedBackend, kind, compile=False)
    assert totals == expected and torch.equal(outputs, expected_outputs)


def test_where_layers_are_not_compiled():
    notes: list[str] = []
    assert not compile_layers(model_of("qwen2"), "auto", CPU, notes.append), "a CPU"
    assert not compile_layers(model_of("qwen2"), False, torch.device("cuda"), notes.append)
    assert notes == []
    assert "qwen3_moe" in ARCHITECTURES
    assert not compile_layers(model_of("qwen3_moe"), "auto", torch.device("cuda"), notes.append)
    assert "compile=auto: layers are not compiled: Qwen3MoeForCausalLM is a mixture of experts" in notes[0]
    with pytest.raises(ValueError, match=r"actor.backend_options.compile=true: Linear has no decoder layers"):
        compile_layers(torch.nn.Linear(2, 2), True, CPU, notes.append)
    assert not compile_layers(torch.nn.Linear(2, 2), "auto", torch.device("cuda"), notes.append)
    assert len(notes) == 1
