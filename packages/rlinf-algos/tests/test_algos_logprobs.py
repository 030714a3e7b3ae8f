"""Log-probabilities and entropies against float64 numpy, gradients by finite differences, memory by counting."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    entropy_of_logits,
    logit_norms,
    logprobs,
    logprobs_and_entropy,
    token_logprobs,
)

quick = settings(max_examples=60)
NAN, INF = float("nan"), float("inf")


def reference(logits, ids, temperature):
    """(log-probabilities, entropies), row by row."""
    z = logits / temperature
    z = z - z.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    logp = np.log(np.take_along_axis(p, ids[..., None], -1))[..., 0]
    return logp, -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


@pytest.fixture(params=[1, 7, 1 << 20], ids=lambda n: f"chunk={n}")
def chunk_elements(request, monkeypatch):
    monkeypatch.setattr(logprobs, "_CPU_CHUNK_ELEMENTS", request.param)


@quick
@given(
    st.integers(0, 3), st.integers(0, 5), st.integers(1, 9), st.sampled_from([1.0, 0.6, 2.5]), st.integers(0, 2**32 - 1)
)
def test_values(B, T, V, temperature, seed):
    rng = np.random.default_rng(seed)
    logits, ids = rng.normal(0.0, 3.0, (B, T, V)), rng.integers(0, V, (B, T))
    mask = rng.random((B, T)) < 0.7
    logp, entropy = (np.where(mask, x, 0.0) for x in reference(logits, ids, temperature))
    logits[~mask], ids[~mask] = np.nan, -100
    logits, ids, mask = map(torch.tensor, (logits, ids, mask))
    actual = token_logprobs(logits, ids, temperature, loss_mask=mask)
    np.testing.assert_allclose(actual.numpy(), logp, rtol=1e-6, atol=1e-9)
    actual = entropy_of_logits(logits, temperature, loss_mask=mask)
    np.testing.assert_allclose(actual.numpy(), entropy, rtol=1e-6, atol=1e-9)
    both = logprobs_and_entropy(logits, ids, temperature, loss_mask=mask)
    np.testing.assert_allclose(both[0].numpy(), logp, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(both[1].numpy(), entropy, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("chunk_elements")
def test_logit_norms_are_those_of_the_gradient():
    rng = np.random.default_rng(2)
    logits, ids = torch.tensor(rng.normal(0.0, 3.0, (3, 4, 7))), torch.tensor(rng.integers(0, 7, (3, 4)))
    mask = torch.tensor(rng.random((3, 4)) < 0.8)
    scaled = (logits / 0.7).requires_grad_()
    token_logprobs(scaled, ids, loss_mask=mask).sum().backward()
    assert scaled.grad is not None
    norms = logit_norms(logits.masked_fill(~mask[..., None], NAN), ids, 0.7, loss_mask=mask)
    torch.testing.assert_close(norms, scaled.grad.square().sum(-1))
    logits[0, 1, 2] = NAN
    with pytest.raises(NonFiniteError, match=r"logits\[0, 1, 2\]=nan"):
        logit_norms(logits, ids)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_by_finite_differences(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(0, 5, (2, 3), generator=generator)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    for loss_mask in (None, mask):
        for function in (
            partial(token_logprobs, token_ids=ids, temperature=temperature, loss_mask=loss_mask),
            partial(entropy_of_logits, temperature=temperature, loss_mask=loss_mask),
            partial(logprobs_and_entropy, token_ids=ids, temperature=temperature, loss_mask=loss_mask),
        ):
            assert torch.autograd.gradcheck(function, logits)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_logits_lose_nothing_more(dtype):
    """Against torch's own log-softmax of the same numbers in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 4, 50, generator=generator)).to(dtype).requires_grad_()
    ids = torch.randint(0, 50, (3, 4), generator=generator)
    exact = logits.detach().double().requires_grad_()
    logp = exact.log_softmax(-1)
    for actual, expected in [
        (token_logprobs(logits, ids), logp.gather(2, ids[..., None])[..., 0]),
        (entropy_of_logits(logits), -(logp.exp() * logp).sum(-1)),
    ]:
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(actual.sum(), logits)
        (of_exact,) = torch.autograd.grad(expected.sum(), exact, retain_graph=True)
        assert gradient.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(gradient.double(), of_exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_at_once_are_each_alone_to_the_bit(dtype, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(4, 6, 33, generator=generator)).to(dtype)
    logits[1, 2, 5] = -INF
    ids, mask = torch.randint(6, 33, (4, 6), generator=generator), torch.rand(4, 6, generator=generator) < 0.8
    logits[~mask] = NAN
    logits.requires_grad_()
    alone = (
        token_logprobs(logits, ids, temperature, loss_mask=mask),
        entropy_of_logits(logits, temperature, loss_mask=mask),
    )
    both = logprobs_and_entropy(logits, ids, temperature, loss_mask=mask)
    for one, other in zip(alone, both, strict=True):
        assert torch.equal(one, other)
        gradients = [torch.autograd.grad(out.sum(), logits, retain_graph=True)[0] for out in (one, other)]
        assert torch.equal(*gradients)
        assert (gradients[0][~mask] == 0).all()
    (together,) = torch.autograd.grad(both[0].sum() + 3 * both[1].sum(), logits)
    (first,) = torch.autograd.grad(alone[0].sum(), logits)
    (second,) = torch.autograd.grad(3 * alone[1].sum(), logits)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(together, first + second, rtol=tolerance, atol=tolerance)


def test_a_sharp_distribution_keeps_its_digits():
    """Logits far from 0: the largest one is taken off before anything is rounded."""
    logits = torch.tensor([[1e4, 1e4 - 8.0, 1e4 - 12.0]])
    exact = logits.double().log_softmax(-1)
    logp, entropy = logprobs_and_entropy(logits, torch.tensor([1]))
    assert logp.item() == pytest.approx(exact[0, 1].item(), rel=1e-6)
    assert entropy.item() == pytest.approx(-(exact.exp() * exact).sum().item(), rel=1e-4)


def test_the_chunk_size_changes_no_bit(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 33, generator=generator).requires_grad_()
    ids = torch.randint(0, 33, (4, 6), generator=generator)
    results = []
    for elements in (1, 100, 1 << 20):
        monkeypatch.setattr(logprobs, "_CPU_CHUNK_ELEMENTS", elements)
        out = torch.stack(logprobs_and_entropy(logits, ids, 0.9))
        results.append((out.detach(), *torch.autograd.grad(out.sum(), logits)))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


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


@pytest.mark.parametrize("function", [token_logprobs, logprobs_and_entropy, lambda x, ids: entropy_of_logits(x)])
def test_nothing_larger_than_a_chunk_is_made_but_the_gradient(monkeypatch, function):
    monkeypatch.setattr(logprobs, "_CPU_CHUNK_ELEMENTS", 200)
    base = torch.randn(6, 9, 100).bfloat16().requires_grad_()
    ids = torch.randint(0, 100, (6, 8))
    with Largest() as seen:
        logits = base[:, :-1]  # not contiguous: flattening it would copy it
        out = function(logits, ids)
    assert seen.num_elements <= 200
    gradient_elements = 6 * 9 * 100
    out = out[0] + out[1] if isinstance(out, tuple) else out
    with Largest() as seen:
        out.sum().backward()
    assert seen.num_elements <= gradient_elements
    assert base.grad is not None
    assert (base.grad[:, -1] == 0).all()


def test_any_leading_shape():
    logits, ids = torch.randn(5, 4), torch.randint(0, 4, (5,))
    expected = logits.log_softmax(-1)[torch.arange(5), ids]
    torch.testing.assert_close(token_logprobs(logits, ids), expected)
    torch.testing.assert_close(token_logprobs(logits[0], ids[0]), expected[0])
    deep = logits.view(5, 1, 1, 4).transpose(0, 2)
    torch.testing.assert_close(token_logprobs(deep, ids.view(1, 1, 5)), expected.view(1, 1, 5))


def test_a_banned_token_is_fine_unless_it_is_the_chosen_one():
    logits = torch.tensor([[[0.0, 1.0, -INF]]], requires_grad=True)
    two = torch.tensor([0.0, 1.0])
    logp, entropy = logprobs_and_entropy(logits, torch.tensor([[1]]))
    out = logp + entropy
    p = two.softmax(0)
    assert out.item() == pytest.approx((p[1].log() - (p * p.log()).sum()).item())
    out.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 0, 2] == 0
    with pytest.raises(NonFiniteError, match=r"logits\[0, 0, 2\]=-inf gives the chosen token probability 0"):
        token_logprobs(logits, torch.tensor([[2]]))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([0.0, NAN], r"logits\[1, 0, 1\]=nan is not finite \(1 of 2 rows are affected\)"),
        ([INF, 0.0], r"logits\[1, 0, 0\]=inf is not finite"),
        ([-INF, -INF], r"logits\[1, 0, 0\]=-inf and so is every other token of the row"),
    ],
)
def test_non_finite_logits(row, text):
    logits = torch.tensor([[[0.0, 0.0]], [row]])
    with pytest.raises(NonFiniteError, match=text):
        token_logprobs(logits, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(NonFiniteError, match=text):
        entropy_of_logits(logits)


def test_refusals():
    logits, ids = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"token_ids has shape \[2, 4\], logits \[2, 3, 4\]"):
        token_logprobs(logits, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(AlgosError, match=r"token_ids\[0, 0\]=4 is not in the vocabulary 0 ... 3"):
        token_logprobs(logits, ids + 4)
    with pytest.raises(AlgosError, match=r"token_ids\[0, 0\]=-100 .* pass loss_mask where it is padding"):
        token_logprobs(logits, ids - 100)
    for wrong in (ids.float(), ids.bool()):
        with pytest.raises(AlgosError, match="token_ids has dtype"):
            token_logprobs(logits, wrong)
    for temperature in (0.0, -1.0, INF, NAN):
        with pytest.raises(AlgosError, match="temperature="):
            entropy_of_logits(logits, temperature)
    with pytest.raises(AlgosError, match="logits has dtype"):
        entropy_of_logits(ids)
    with pytest.raises(ShapeError, match="at least one token"):
        entropy_of_logits(torch.zeros(2, 0))
    with pytest.raises(ShapeError, match="loss_mask has shape"):
        entropy_of_logits(logits, loss_mask=torch.ones(2))
