"""Finite checks, shapes and masks: the message names tensor, place and value."""

import pytest
import torch

from rlinf_algos import AlgosError, NonFiniteError, RewardError, ShapeError, check_finite
from rlinf_algos.checks import as_mask, masked

NAN, INF = float("nan"), float("inf")


def test_check_finite_names_tensor_index_value_and_count():
    tensor = torch.zeros(2, 3)
    tensor[1, 2], tensor[1, 1] = NAN, -INF
    with pytest.raises(NonFiniteError, match=r"^advantages\[1, 1\]=-inf is not finite \(2 of 6 elements are not\)"):
        check_finite("advantages", tensor)
    with pytest.raises(NonFiniteError, match=r"^gamma=nan"):
        check_finite("gamma", torch.tensor(NAN))


def test_check_finite_looks_inside_the_mask_only():
    tensor = torch.tensor([1.0, NAN, INF])
    check_finite("x", tensor, torch.tensor([True, False, False]))
    with pytest.raises(NonFiniteError, match=r"x\[2\]=inf"):
        check_finite("x", tensor, torch.tensor([True, False, True]))


def test_check_finite_passes_what_is_finite():
    check_finite("x", torch.tensor([1.0, -3.0e38]))
    check_finite("x", torch.empty(0))
    check_finite("x", torch.arange(3))
    check_finite("x", torch.ones(2, dtype=torch.bfloat16))


def test_as_mask_takes_bools_and_zeros_and_ones():
    like = torch.zeros(2, 2)
    expected = torch.tensor([[True, False], [True, True]])
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        assert torch.equal(as_mask("m", expected.to(dtype), "x", like), expected)
    assert as_mask("m", None, "x", like).all()


def test_as_mask_refuses_weights_and_other_shapes():
    with pytest.raises(AlgosError, match=r"loss_mask\[1\]=0.5; a mask holds 0 and 1 only"):
        as_mask("loss_mask", torch.tensor([1.0, 0.5]), "x", torch.zeros(2))
    with pytest.raises(AlgosError, match=r"loss_mask\[0\]=nan"):
        as_mask("loss_mask", torch.tensor([NAN, 0.5]), "x", torch.zeros(2))
    with pytest.raises(ShapeError, match=r"loss_mask has shape \[2, 1\], x has \[2\]"):
        as_mask("loss_mask", torch.ones(2, 1), "x", torch.zeros(2))


def test_masked_keeps_garbage_out_of_value_and_gradient():
    x = torch.tensor([2.0, NAN, INF], requires_grad=True)
    output = masked("x", x, torch.tensor([True, False, False]))
    assert output.tolist() == [2.0, 0.0, 0.0]
    output.exp().sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad[1:].tolist() == [0.0, 0.0]


def test_masked_computes_in_float32_at_least():
    mask = torch.ones(1, dtype=torch.bool)
    for dtype, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert masked("x", torch.ones(1, dtype=dtype), mask).dtype == expected


def test_errors_are_value_errors():
    for error in (ShapeError, NonFiniteError, RewardError):
        assert issubclass(error, AlgosError)
    assert issubclass(AlgosError, ValueError)


def test_a_finite_tensor_whose_sum_overflows_passes():
    large = torch.full((4,), 3.0e38)
    check_finite("x", large)
    assert torch.equal(masked("x", large, torch.ones(4, dtype=torch.bool)), large)
    check_finite("x", torch.full((4,), 60000.0, dtype=torch.float16))


def test_infinities_that_cancel_are_found():
    tensor = torch.tensor([1.0, INF, -INF])
    with pytest.raises(NonFiniteError, match=r"x\[1\]=inf is not finite \(2 of 3"):
        check_finite("x", tensor)
    with pytest.raises(NonFiniteError, match=r"x\[1\]=inf"):
        masked("x", tensor, torch.ones(3, dtype=torch.bool))
