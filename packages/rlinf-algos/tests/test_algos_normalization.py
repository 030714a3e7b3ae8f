"""Means, moments and whitening against numpy."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import Moments, NonFiniteError, ShapeError
from rlinf_algos.normalization import masked_mean

quick = settings(max_examples=60)
shapes = st.tuples(st.integers(0, 4), st.integers(1, 6))
seeds = st.integers(0, 2**32 - 1)


def draw(shape, seed):
    """Values with garbage outside a ragged mask."""
    rng = np.random.default_rng(seed)
    values = rng.normal(2.0, 3.0, shape)
    mask = rng.random(shape) < rng.choice([0.0, 0.3, 1.0])
    return np.where(mask, values, np.nan), mask


@quick
@given(shapes, seeds)
def test_masked_mean(shape, seed):
    values, mask = draw(shape, seed)
    expected = values[mask].mean() if mask.any() else 0.0
    np.testing.assert_allclose(masked_mean(torch.tensor(values), torch.tensor(mask)).item(), expected, rtol=1e-6)


def test_masked_mean_has_a_gradient_and_refuses():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda v: masked_mean(v, mask), values)
    with pytest.raises(ShapeError):
        masked_mean(torch.ones(2), torch.ones(2, 1))
    with pytest.raises(NonFiniteError, match=r"values\[0\]=nan"):
        masked_mean(torch.ones(2) * float("nan"))


def on_ranks(parts_of_ranks, function):
    """Calls function(parts, sum_over_parts) for every rank, in threads that meet at every sum."""
    barrier, contributions = threading.Barrier(len(parts_of_ranks)), [torch.zeros(0)] * len(parts_of_ranks)

    def run(rank):
        def sum_over_parts(rows):
            contributions[rank] = rows.sum(0)
            barrier.wait(timeout=30)
            total = torch.stack(contributions).sum(dim=0)
            barrier.wait(timeout=30)
            return total

        return function(parts_of_ranks[rank], sum_over_parts)

    with ThreadPoolExecutor(len(parts_of_ranks)) as pool:
        return list(pool.map(run, range(len(parts_of_ranks))))


@quick
@given(st.integers(0, 7), st.integers(1, 4), seeds)
def test_statistics_over_ranks_are_those_of_the_whole(num_rows, num_ranks, seed):
    values, mask = draw((num_rows, 3), seed)
    cuts = np.sort(np.random.default_rng(seed).integers(0, num_rows + 1, num_ranks - 1))
    pieces = [torch.tensor(v[m]) for v, m in zip(np.split(values, cuts), np.split(mask, cuts), strict=True)]
    chosen = values[mask]
    expected = np.zeros(values.shape)
    if len(chosen) > 1:
        expected[mask] = (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-8)
    for moments in on_ranks([[piece] for piece in pieces], Moments.of_parts):
        assert moments.count.item() == mask.sum()
        np.testing.assert_allclose(moments.mean.item(), chosen.mean() if len(chosen) else 0.0, rtol=1e-9, atol=1e-12)
        whitened = moments.whiten(torch.tensor(values), torch.tensor(mask))
        np.testing.assert_allclose(whitened.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_statistics_keep_their_digits_far_from_zero():
    """The mean of the squares less the square of the mean would have none left."""
    values = torch.tensor([1e8, 1e8 + 8, 1e8 + 16])  # exact in float32
    assert Moments.of_parts([values], lambda rows: rows.sum(0)).whiten(values).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_equal_values_on_all_ranks_give_exactly_zero(dtype, num_ranks):
    for value in (0.1, -7.3, 1e20, 0.0):
        pieces = [torch.full((997 + k,), value, dtype=dtype) for k in range(num_ranks)]
        for moments in on_ranks([[piece] for piece in pieces], Moments.of_parts):
            whitened = moments.whiten(pieces[0])
            assert torch.equal(whitened, torch.zeros_like(whitened))


def test_a_bad_value_on_one_rank_raises_on_all():
    def moments_of(parts, sum_over_parts):
        with pytest.raises(NonFiniteError) as raised:
            Moments.of_parts(parts, sum_over_parts)
        return str(raised.value)

    clean, bad = on_ranks([[torch.zeros(2)], [torch.tensor([0.0, float("nan")])]], moments_of)
    assert "1 elements that are not finite, on other ranks" in clean
    assert "1 elements that are not finite, in part 0 of this rank" in bad


def test_moments_of_parts_are_those_of_the_whole():
    parts = [torch.tensor([1e8, 1e8 + 8]), torch.zeros(0), torch.tensor([[1e8 + 16]])]
    moments = Moments.of_parts(parts, lambda rows: rows.sum(0))
    assert (moments.count.item(), moments.mean.item(), moments.variance.item()) == (3, 1e8 + 8, 64)
    with pytest.raises(NonFiniteError, match=r"values holds 1 elements that are not finite, in part 1 of this rank"):
        Moments.of_parts([torch.zeros(2), torch.tensor([float("nan")])], lambda rows: rows.sum(0))


def test_whitening_is_in_the_dtype_of_the_values():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    moments = Moments.of_parts([values], lambda rows: rows.sum(0))
    whitened = moments.whiten(values.requires_grad_())
    assert not whitened.requires_grad
    assert torch.equal(whitened, (values - float(moments.mean)) / (float(moments.variance) ** 0.5 + 1e-8))
