"""Divergences over the vocabulary against float64 numpy, gradients by finite differences, memory by counting."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    distillation_terms,
    divergence,
    kl_full,
    reverse_kl_advantages,
)
from rlinf_algos.divergence import vocabulary_divergence

KINDS = ["reverse", "forward", "js"]
NAN, INF = float("nan"), float("inf")


def softmax(logits, temperature):
    z = logits / temperature
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def kl(a, b):
    """0 log 0 is 0."""
    return np.where(a > 0, a * (np.log(np.where(a > 0, a, 1.0)) - np.log(np.where(b > 0, b, 1.0))), 0.0).sum(-1)


def reference(logits, other, temperature, kind, beta):
    p, q = softmax(logits, temperature), softmax(other, temperature)
    m = beta * q + (1 - beta) * p
    return {"reverse": kl(p, q), "forward": kl(q, p), "js": beta * kl(q, m) + (1 - beta) * kl(p, m)}[kind]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.6, 2.5]),
    st.sampled_from(KINDS),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.sampled_from([0.1, 3.0, 40.0]),
    st.integers(0, 2**32 - 1),
)
def test_values(B, T, V, temperature, kind, beta, scale, seed):
    rng = np.random.default_rng(seed)
    logits, other = rng.normal(0.0, scale, (2, B, T, V))
    if V > 1:
        logits[..., 0] = other[..., 0] = -INF  # banned in both
    mask = rng.random((B, T)) < 0.7
    expected = np.where(mask, reference(logits, other, temperature, kind, beta), 0.0)
    logits[~mask], other[~mask] = NAN, NAN
    found = vocabulary_divergence(
        torch.tensor(logits),
        torch.tensor(other),
        temperature,
        kind=kind,
        beta=beta,
        loss_mask=torch.tensor(mask),
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_gradients_by_finite_differences(monkeypatch, kind, elements):
    monkeypatch.setattr(divergence, "_CPU_CHUNK_ELEMENTS", elements)
    logits, other = torch.randn(2, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 1]])):
        function = partial(
            vocabulary_divergence, other_logits=other, temperature=0.7, kind=kind, beta=0.3, loss_mask=mask
        )
        assert torch.autograd.gradcheck(function, logits.clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_a_banned_token_has_no_gradient(kind):
    logits = torch.tensor([1.0, -INF, 2.0], dtype=torch.float64, requires_grad=True)
    vocabulary_divergence(logits, torch.tensor([0.0, -INF, 0.5], dtype=torch.float64), kind=kind).backward()
    assert logits.grad is not None
    assert logits.grad[1] == 0
    assert logits.grad.isfinite().all() and logits.grad[0] != 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_divergences_keep_their_digits(kind, dtype):
    """At 1e-6 nats the plain sum in float32 is wrong in its first digit."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 20_000, generator=generator).to(dtype)
    other = (logits.float() + 0.002 * torch.randn(8, 20_000, generator=generator)).float()
    found = vocabulary_divergence(logits, other, kind=kind)
    assert found.dtype == torch.float32
    expected = reference(logits.double().numpy(), other.double().numpy(), 1.0, kind, 0.5)
    assert expected.max() < 3e-6
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_chunk_size_changes_nothing(monkeypatch, kind):
    logits, other = torch.randn(2, 4, 6, 33, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    results = []
    for elements in (1, 100, 1 << 20):
        monkeypatch.setattr(divergence, "_CPU_CHUNK_ELEMENTS", elements)
        out = vocabulary_divergence(logits, other, 0.9, kind=kind)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), logits)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-7)


class Largest(TorchDispatchMode):
    """Remembers the most elements any operator put into a tensor of its own (views do not count)."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        pointers = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in pointers:
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_larger_than_a_chunk_is_made_but_the_gradient(monkeypatch, kind):
    monkeypatch.setattr(divergence, "_CPU_CHUNK_ELEMENTS", 200)
    base, other = torch.randn(6, 9, 100).bfloat16().requires_grad_(), torch.randn(6, 8, 100).bfloat16()
    with Largest() as seen:
        out = vocabulary_divergence(base[:, :-1], other, kind=kind)  # not contiguous: flattening would copy
    assert seen.num_elements <= 200
    with Largest() as seen:
        out.sum().backward()
    assert seen.num_elements <= 6 * 9 * 100
    assert base.grad is not None and base.grad.dtype == torch.bfloat16
    assert (base.grad[:, -1] == 0).all()


def test_ends_of_js_and_names():
    """With TRL's meaning of beta: near 0 js / beta is the forward KL, near 1 js / (1 - beta) the reverse one."""
    logits, other = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forward, reverse = (vocabulary_divergence(logits, other, kind=kind) for kind in ("forward", "reverse"))
    found = distillation_terms(logits, other, kind="js", beta=1e-6) / 1e-6
    torch.testing.assert_close(found, forward, rtol=1e-4, atol=1e-6)
    found = distillation_terms(logits, other, kind="js", beta=1 - 1e-6) / 1e-6
    torch.testing.assert_close(found, reverse, rtol=1e-4, atol=1e-6)
    assert torch.equal(kl_full(logits, other), reverse)
    assert torch.equal(distillation_terms(logits, other), reverse)


def test_the_expected_k1_is_the_full_kl():
    logits, other = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    torch.testing.assert_close(kl_full(logits, other), (log_p.exp() * (log_p - log_q)).sum(-1))


def test_reverse_kl_advantages():
    student, teacher = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-0.5, -4.0, -INF]])
    found = reverse_kl_advantages(student.requires_grad_(), teacher, torch.tensor([[1, 1, 0]]), coef=2.0)
    assert found.tolist() == [[1.0, -4.0, 0.0]]
    assert not found.requires_grad
    with pytest.raises(NonFiniteError, match=r"student_logprobs\[0, 2\]=nan"):
        reverse_kl_advantages(student, teacher.clamp(min=-9.0))
    with pytest.raises(NonFiniteError, match=r"teacher_logprobs\[0, 2\]=-inf"):
        reverse_kl_advantages(torch.zeros(1, 3), teacher)
    with pytest.raises(ShapeError, match="teacher_logprobs has shape"):
        reverse_kl_advantages(student, teacher[0])
    with pytest.raises(AlgosError, match="coef=-1"):
        reverse_kl_advantages(student, teacher, coef=-1)


@pytest.mark.parametrize(
    ("row", "other_row", "text"),
    [
        ([0.0, NAN], [0.0, 0.0], r"^logits\[0, 1, 1\]=nan is not finite \(1 of 2"),
        ([0.0, 0.0], [INF, 0.0], r"^other_logits\[0, 1, 0\]=inf is not finite"),
        ([-INF, -INF], [0.0, 0.0], r"^logits\[0, 1, 0\]=-inf and so is every other token"),
        ([0.0, 0.0], [0.0, -INF], r"^the divergence at \[0, 1\] is inf: .* to a token \(token 1\)"),
    ],
)
def test_non_finite_logits(row, other_row, text):
    logits, other = torch.zeros(2, 1, 2, 2)
    logits[0, 1], other[0, 1] = torch.tensor(row), torch.tensor(other_row)
    with pytest.raises(NonFiniteError, match=text):
        vocabulary_divergence(logits, other)
    found = vocabulary_divergence(logits, other, loss_mask=torch.tensor([[1, 0]]))
    assert found.tolist() == [[0.0, 0.0]]


def test_far_distributions_under_js_stay_finite():
    logits, other = torch.tensor([[200.0, -INF]]), torch.tensor([[-INF, 0.0]])
    assert vocabulary_divergence(logits, other, kind="js").item() == pytest.approx(np.log(2))


def test_refusals():
    ones = torch.ones(1, 2, 3)
    with pytest.raises(ShapeError, match="other_logits has shape"):
        vocabulary_divergence(ones, ones[:, :1])
    with pytest.raises(ShapeError, match="at least one token in V"):
        vocabulary_divergence(ones[..., :0], ones[..., :0])
    with pytest.raises(ShapeError, match="loss_mask has shape"):
        vocabulary_divergence(ones, ones, loss_mask=ones)
    with pytest.raises(AlgosError, match=r"other_logits has dtype torch\.int64"):
        vocabulary_divergence(ones, ones.long())
    with pytest.raises(AlgosError, match='kind="jeffreys" is none of'):
        vocabulary_divergence(ones, ones, kind="jeffreys")  # pyright: ignore[reportArgumentType]
    for beta in (0.0, 1.0):
        with pytest.raises(AlgosError, match=f"beta={beta} must be between 0 and 1"):
            vocabulary_divergence(ones, ones, kind="js", beta=beta)
    for temperature in (0.0, INF, NAN):
        with pytest.raises(AlgosError, match=f"temperature={temperature} must be above 0"):
            vocabulary_divergence(ones, ones, temperature)
