"""Log-probabilities and entropies from hidden states are those of the plain formula, whatever the tiles."""

from typing import Any

import pytest
import torch

from rlinf_algos import head
from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError
from rlinf_algos.head import head_logprobs, head_logprobs_and_entropy
from rlinf_algos.logprobs import logprobs_and_entropy, token_logprobs

NUM_TOKENS, WIDTH, VOCAB = 13, 6, 23


@pytest.fixture(params=[(5, 35), (8192, 1 << 24), (4, 3)], ids=["uneven tiles", "one tile", "a column a tile"])
def tiles(request, monkeypatch):
    rows, elements = request.param
    monkeypatch.setattr(head, "_MAX_TILE_ROWS", rows)
    monkeypatch.setattr(head, "_CPU_TILE_ELEMENTS", elements)


def inputs(dtype=torch.float64, has_bias=True, scale=2.0) -> tuple[tuple[Any, Any, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64) if has_bias else None
    ids = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    tensors = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    return (tensors[0], tensors[1], tensors[2] if has_bias else None), ids


def plain(hidden, weight, bias, ids, temperature, softcap):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gradients(logprobs, entropies, leaves):
    """The gradient of a loss that weighs each token otherwise, some of them with 0."""
    weights = torch.linspace(-1.0, 2.0, NUM_TOKENS).to(logprobs.dtype)
    weights[::4] = 0.0
    loss = (weights * logprobs).sum()
    if entropies is not None:
        loss = loss + (weights.flip(0) * entropies).sum()
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 900, 1 << 20])
def test_values_and_gradients_equal_the_plain_formula(tiles, softcap, has_bias, kept_bytes):
    leaves, ids = inputs(has_bias=has_bias)
    hidden, weight, bias = leaves
    expected = plain(*leaves, ids, 0.7, softcap)

    settings = {"bias": bias, "softcap": softcap, "kept_bytes": kept_bytes}
    alone = head_logprobs(hidden, weight, ids, 0.7, **settings)
    both = head_logprobs_and_entropy(hidden, weight, ids, 0.7, **settings)

    torch.testing.assert_close(both, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(alone, both[0])
    torch.testing.assert_close(gradients(*both, leaves), gradients(*expected, leaves), rtol=1e-11, atol=1e-12)
    expected_alone = gradients(plain(*leaves, ids, 0.7, softcap)[0], None, leaves)
    torch.testing.assert_close(gradients(alone, None, leaves), expected_alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(tiles, softcap):
    (hidden, weight, bias), ids = inputs()
    leaves = [hidden.detach()[:4].requires_grad_(), weight, bias]

    def both(hidden, weight, bias):
        return head_logprobs_and_entropy(hidden, weight, ids[:4], 1.3, bias=bias, softcap=softcap)

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.12)], ids=str)
def test_lower_precisions_stay_near_float64(tiles, dtype, atol):
    leaves, ids = inputs(dtype)
    hidden, weight, bias = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = hidden, weight, bias
    actual = head_logprobs_and_entropy(*leaves[:2], ids, bias=leaves[2])
    expected = plain(*exact, ids, 1.0, None)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, check_dtype=False)
    for ours, theirs in zip(gradients(*actual, leaves), gradients(*expected, exact), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * atol, check_dtype=False)


def test_a_sure_token_keeps_its_small_gradient_in_bfloat16():
    """p - 1 is rounded, not p: a token of probability 1 - 1e-4 would have no gradient."""
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [9.25]], dtype=torch.bfloat16, requires_grad=True)
    head_logprobs(hidden, weight, torch.tensor([1])).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1].item() == pytest.approx(torch.tensor(-9.25).sigmoid().item(), rel=0.01)


def test_it_agrees_with_what_starts_from_logits(tiles):
    leaves, ids = inputs(torch.float32, has_bias=False)
    hidden, weight = (leaf.detach() for leaf in leaves[:2])
    logits = hidden @ weight.T
    actual = head_logprobs_and_entropy(hidden, weight, ids, 0.9)
    torch.testing.assert_close(actual, logprobs_and_entropy(logits, ids, 0.9), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(head_logprobs(hidden, weight, ids, 0.9), token_logprobs(logits, ids, 0.9))


def test_tokens_outside_the_mask_are_nothing(tiles):
    leaves, ids = inputs()
    hidden, weight, bias = leaves
    mask = (torch.arange(NUM_TOKENS) % 3 != 1).reshape(1, NUM_TOKENS)
    spoiled = hidden.detach().clone()
    spoiled[~mask[0]] = float("nan")
    spoiled.requires_grad_()
    wild = torch.where(mask[0], ids, 10**6)[None]

    actual = head_logprobs_and_entropy(spoiled[None], weight, wild, bias=bias, loss_mask=mask)
    expected = [(column * mask[0])[None] for column in plain(*leaves, ids, 1.0, None)]
    torch.testing.assert_close(list(actual), expected, rtol=1e-12, atol=1e-12)
    ours = gradients(actual[0][0], actual[1][0], [spoiled, weight, bias])
    theirs = gradients(expected[0][0], expected[1][0], leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_without_any_token_gradients_are_zero():
    leaves, ids = inputs()
    nothing = torch.zeros(NUM_TOKENS)
    logprobs = head_logprobs(leaves[0], leaves[1], ids, bias=leaves[2], loss_mask=nothing)
    assert torch.equal(logprobs, torch.zeros(NUM_TOKENS, dtype=torch.float64))
    assert not any(gradient.any() for gradient in torch.autograd.grad(logprobs.sum(), leaves))


def test_only_what_asks_for_a_gradient_gets_one():
    leaves, ids = inputs()
    frozen = leaves[1].detach()
    head_logprobs(leaves[0], frozen, ids).sum().backward()
    assert leaves[0].grad is not None and frozen.grad is None


def test_a_banned_column_has_probability_zero(tiles):
    """A bias of -inf, as padded vocabularies have it, in columns that fill a tile of their own."""
    leaves, ids = inputs()
    hidden, weight, bias = leaves
    banned = torch.cat([torch.full((8,), -torch.inf, dtype=torch.float64), bias.detach()[8:]])
    ids = ids.clamp(min=8)
    actual = head_logprobs_and_entropy(hidden, weight, ids, bias=banned)
    expected = plain(hidden, weight[8:], banned[8:], ids - 8, 1.0, None)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(*actual, [hidden, weight]), gradients(*expected, [hidden, weight])
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_no_tensor_of_tokens_by_vocabulary_is_kept(monkeypatch):
    monkeypatch.setattr(head, "_CPU_TILE_ELEMENTS", 4 * NUM_TOKENS)
    leaves, ids = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda t: t):
        head_logprobs(leaves[0], leaves[1], ids).sum()
    assert max(saved) == VOCAB * WIDTH < NUM_TOKENS * VOCAB


def test_what_is_wrong_is_said():
    (hidden, weight, bias), ids = inputs()
    with pytest.raises(ShapeError, match=r"weight \[23, 5\]"):
        head_logprobs(hidden, weight[:, :5], ids)
    with pytest.raises(ShapeError, match=r"bias has shape \[22\]"):
        head_logprobs(hidden, weight, ids, bias=bias[:22])
    with pytest.raises(AlgosError, match=r"weight is torch.float32.*one dtype"):
        head_logprobs(hidden, weight.float(), ids)
    with pytest.raises(AlgosError, match=r"softcap=0.0"):
        head_logprobs(hidden, weight, ids, softcap=0.0)
    with pytest.raises(AlgosError, match=r"temperature=0.0"):
        head_logprobs(hidden, weight, ids, 0.0)
    with pytest.raises(AlgosError, match=r"token_ids\[2\]=23 is not in the vocabulary"):
        head_logprobs(hidden, weight, ids.index_fill(0, torch.tensor(2), VOCAB))
    spoiled = bias.detach().clone()
    spoiled[7] = float("nan")
    with pytest.raises(NonFiniteError, match=r"logits\[0, 7\]=nan is not finite \(13 of 13 rows"):
        head_logprobs(hidden, weight, ids, bias=spoiled)
