"""Means, whitening and explained variance against numpy."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    Moments,
    NonFiniteError,
    ShapeError,
    explained_variance,
    masked_mean,
    masked_whiten,
    normalize_advantages,
    normalize_returns,
    sum_over_group,
)

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


@quick
@given(shapes, st.sampled_from([0.0, 1e-8, 0.5]), seeds)
def test_masked_whiten(shape, epsilon, seed):
    values, mask = draw(shape, seed)
    expected = np.zeros(shape)
    if mask.sum() > 1:
        chosen = values[mask]
        expected[mask] = (chosen - chosen.mean()) / (chosen.std(ddof=1) + epsilon)
    for function in (masked_whiten, normalize_advantages):
        actual = function(torch.tensor(values), torch.tensor(mask), epsilon=epsilon)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_whitening_equal_values_gives_exactly_zero():
    for values in (torch.full((5,), 0.1), torch.tensor([3.0]), torch.empty(0)):
        assert torch.equal(masked_whiten(values, epsilon=0.0), torch.zeros_like(values))


def test_gradients():
    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda v: masked_whiten(v, mask, epsilon=0.1), values)
    assert torch.autograd.gradcheck(lambda v: masked_mean(v, mask), values)
    assert not normalize_advantages(values, mask).requires_grad


@quick
@given(shapes, seeds)
def test_explained_variance(shape, seed):
    values, mask = draw(shape, seed)
    returns = np.where(mask, values + np.random.default_rng(seed + 1).normal(size=shape), np.nan)
    actual = explained_variance(torch.tensor(values), torch.tensor(returns), torch.tensor(mask)).item()
    if mask.sum() < 2:
        assert math.isnan(actual)
    else:
        errors = returns[mask] - values[mask]
        np.testing.assert_allclose(actual, 1 - errors.var() / returns[mask].var(), rtol=1e-6)


def test_explained_variance_of_perfect_and_constant_critics():
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns).item() == 1.0
    assert explained_variance(torch.zeros(3), returns).item() == pytest.approx(0.0)
    assert math.isnan(explained_variance(returns, torch.ones(3)).item())


def test_refusals():
    ones = torch.ones(2)
    with pytest.raises(ShapeError):
        masked_mean(ones, torch.ones(2, 1))
    with pytest.raises(ShapeError):
        normalize_advantages(ones, torch.ones(2, 1))
    with pytest.raises(ShapeError, match="returns has shape"):
        explained_variance(ones, torch.ones(3))
    with pytest.raises(NonFiniteError, match=r"values\[0\]=nan"):
        masked_whiten(ones * float("nan"))
    with pytest.raises(NonFiniteError, match=r"returns\[0\]=nan"):
        explained_variance(ones, ones * float("nan"))
    with pytest.raises(ValueError, match="epsilon=-1"):
        masked_whiten(ones, epsilon=-1)


def in_pieces(values, mask, cuts):
    """The rows as ranks would hold them."""
    return [
        (torch.tensor(v), torch.tensor(m)) for v, m in zip(np.split(values, cuts), np.split(mask, cuts), strict=True)
    ]


def on_ranks(pieces, function):
    """Calls function(values, mask, sum_over_ranks) for every piece, in threads that meet at every sum."""
    barrier, contributions = threading.Barrier(len(pieces)), [torch.zeros(0)] * len(pieces)

    def run(rank):
        def sum_over_ranks(tensor):
            contributions[rank] = tensor
            barrier.wait(timeout=30)
            total = torch.stack(contributions).sum(dim=0)
            barrier.wait(timeout=30)
            return total

        return function(*pieces[rank], sum_over_ranks)

    with ThreadPoolExecutor(len(pieces)) as pool:
        return list(pool.map(run, range(len(pieces))))


@quick
@given(st.integers(0, 7), st.integers(1, 4), st.sampled_from([0.0, 1e-8, 0.5]), seeds)
def test_statistics_over_ranks_are_those_of_one_rank(num_rows, num_ranks, epsilon, seed):
    values, mask = draw((num_rows, 3), seed)
    cuts = np.sort(np.random.default_rng(seed).integers(0, num_rows + 1, num_ranks - 1))
    alone = normalize_advantages(torch.tensor(values), torch.tensor(mask), epsilon=epsilon)
    together = on_ranks(
        in_pieces(values, mask, cuts),
        lambda v, m, total: normalize_advantages(v, m, epsilon=epsilon, sum_over_ranks=total),
    )
    np.testing.assert_allclose(torch.cat(together).numpy(), alone.numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        alone.numpy(), masked_whiten(torch.tensor(values), torch.tensor(mask), epsilon=epsilon), rtol=1e-6, atol=1e-9
    )


@quick
@given(st.integers(0, 7), st.integers(1, 4), seeds)
def test_merged_moments_are_those_of_the_whole(num_rows, num_pieces, seed):
    values, mask = draw((num_rows, 3), seed)
    cuts = np.sort(np.random.default_rng(seed).integers(0, num_rows + 1, num_pieces - 1))
    merged = functools.reduce(Moments.merge, [Moments.of(v, m) for v, m in in_pieces(values, mask, cuts)])
    chosen = values[mask]
    assert merged.count.item() == mask.sum()
    np.testing.assert_allclose(merged.mean.item(), chosen.mean() if len(chosen) else 0.0, rtol=1e-9, atol=1e-12)
    expected = chosen.var(ddof=1) if len(chosen) > 1 else 0.0
    np.testing.assert_allclose(merged.variance.item(), expected, rtol=1e-9, atol=1e-12)


def test_statistics_keep_their_digits_far_from_zero():
    """The mean of the squares less the square of the mean would have none left."""
    values = torch.tensor([1e8, 1e8 + 8, 1e8 + 16])  # exact in float32
    assert normalize_advantages(values, epsilon=0.0).tolist() == [-1.0, 0.0, 1.0]
    merged = Moments.of(values[:1]).merge(Moments.of(values[1:]))
    assert merged.whiten(values, epsilon=0.0).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_equal_values_on_all_ranks_give_exactly_zero(dtype, num_ranks):
    for value in (0.1, -7.3, 1e20, 0.0):
        pieces = [(torch.full((997 + k,), value, dtype=dtype), None) for k in range(num_ranks)]
        for advantages in on_ranks(
            pieces, lambda v, m, total: normalize_advantages(v, m, epsilon=0.0, sum_over_ranks=total)
        ):
            assert torch.equal(advantages, torch.zeros_like(advantages))


def test_a_bad_value_on_one_rank_raises_on_all():
    pieces = [(torch.zeros(2), None), (torch.tensor([0.0, float("nan")]), None)]

    def whiten(values, mask, total):
        with pytest.raises(NonFiniteError) as raised:
            normalize_advantages(values, mask, sum_over_ranks=total)
        return str(raised.value)

    clean, bad = on_ranks(pieces, whiten)
    assert "1 elements that are not finite, on other ranks" in clean
    assert bad.startswith("advantages[1]=nan is not finite")


def test_normalized_returns_are_whitened_too():
    returns = torch.tensor([1.0, 2.0, 6.0])
    assert torch.equal(normalize_returns(returns), normalize_advantages(returns))
    with pytest.raises(NonFiniteError, match=r"returns\[1\]=inf"):
        normalize_returns(torch.tensor([0.0, float("inf")]))


def whiten_on_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        values = torch.load(f"{folder}/{rank}.pt")
        torch.save(normalize_advantages(values, sum_over_ranks=sum_over_group()), f"{folder}/found{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_processes_with_gloo(tmp_path):
    whole = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)) * 3 + 100
    pieces = whole[:7], whole[7:]
    for rank, piece in enumerate(pieces):
        torch.save(piece, tmp_path / f"{rank}.pt")
    torch.multiprocessing.spawn(whiten_on_rank, (str(tmp_path),), nprocs=2)
    whitened = torch.cat([torch.load(tmp_path / f"found{rank}.pt") for rank in range(2)])
    torch.testing.assert_close(whitened, normalize_advantages(whole), rtol=1e-6, atol=1e-7)


def test_moments_of_parts_are_those_of_the_whole():
    parts = [torch.tensor([1e8, 1e8 + 8]), torch.zeros(0), torch.tensor([[1e8 + 16]])]
    moments = Moments.of_parts(parts, lambda rows: rows.sum(0))
    assert (moments.count.item(), moments.mean.item(), moments.variance.item()) == (3, 1e8 + 8, 64)
    with pytest.raises(NonFiniteError, match=r"values holds 1 elements that are not finite, in part 1 of this rank"):
        Moments.of_parts([torch.zeros(2), torch.tensor([float("nan")])], lambda rows: rows.sum(0))


def test_whitening_in_the_dtype_of_the_values():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    moments = Moments.of(values)
    whitened = moments.whiten(values, in_float64=False)
    assert torch.equal(whitened, (values - float(moments.mean)) / (float(moments.variance) ** 0.5 + 1e-8))
