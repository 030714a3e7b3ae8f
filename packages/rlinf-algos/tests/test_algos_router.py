"""The load-balancing loss against transformers' own, and at its least."""

import pytest
import torch

from rlinf_algos import AlgosError, ShapeError, router_balance_loss


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("has_padding", [False, True])
def test_it_is_that_of_transformers(top_k, has_padding):
    module = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.manual_seed(0)
    layers = tuple(torch.randn(12, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]]) if has_padding else None
    expected = module.load_balancing_loss_func(layers, 5, top_k, mask)
    actual = router_balance_loss(layers, top_k=top_k, mask=None if mask is None else mask.flatten())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad(loss, layers, retain_graph=True) for loss in (actual, expected)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_experts_that_are_used_alike_leave_the_least():
    even = 9.0 * torch.eye(4)
    assert router_balance_loss([even], top_k=1).item() == pytest.approx(1.0, rel=1e-6)
    assert router_balance_loss([even[[0, 0, 0, 1]]], top_k=1).item() > 2.0
    assert router_balance_loss([even], top_k=1, mask=torch.zeros(4)).item() == 0.0


def test_refusals():
    with pytest.raises(AlgosError, match="no layer"):
        router_balance_loss([], top_k=1)
    with pytest.raises(AlgosError, match="top_k=5 must be between 1 and 4"):
        router_balance_loss([torch.zeros(2, 4)], top_k=5)
    with pytest.raises(ShapeError, match=r"expected \[N, E\]"):
        router_balance_loss([torch.zeros(2, 4), torch.zeros(3, 4)], top_k=1)
