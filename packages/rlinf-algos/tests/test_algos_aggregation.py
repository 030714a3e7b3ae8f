"""Aggregation: formulas, and that micro-batches add up to the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    constant_length_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
)
from rlinf_algos.aggregation import aggregated_sum, aggregation_divisor, count_tokens_and_sequences
from rlinf_algos.presets import AGGREGATIONS

quick = settings(max_examples=60)


def draw(B, T, seed):
    rng = np.random.default_rng(seed)
    terms = rng.normal(size=(B, T))
    mask = np.arange(T) < rng.integers(0, T + 1, (B, 1))  # ragged, empty rows included
    if rng.random() < 0.1:
        mask = np.zeros_like(mask)
    return terms, mask


def aggregate(name, terms, mask, num_tokens, num_sequences):
    return {
        "token_mean": lambda: token_mean(terms, mask, num_tokens),
        "token_sum": lambda: token_sum(terms, mask),
        "sequence_mean_token_mean": lambda: sequence_mean_token_mean(terms, mask, num_sequences),
        "sequence_mean_token_sum": lambda: sequence_mean_token_sum(terms, mask, num_sequences),
        "constant_length_mean": lambda: constant_length_mean(terms, mask, num_sequences, 64),
    }[name]()


def reference(name, terms, mask):
    rows = [row[keep] for row, keep in zip(terms, mask, strict=True)]
    total = sum(row.sum() for row in rows)
    return {
        "token_mean": total / max(1, mask.sum()),
        "token_sum": total,
        "sequence_mean_token_mean": sum(row.mean() for row in rows if len(row)) / len(rows),
        "sequence_mean_token_sum": total / len(rows),
        "constant_length_mean": total / (len(rows) * 64),
    }[name]


NAMES = ["token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length_mean"]


@quick
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_formulas(name, B, T, seed):
    terms, mask = draw(B, T, seed)
    expected = reference(name, terms, mask)
    actual = aggregate(name, torch.tensor(np.where(mask, terms, np.nan)), torch.tensor(mask), int(mask.sum()), B)
    np.testing.assert_allclose(actual.item(), expected, rtol=1e-6, atol=1e-12)


@quick
@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_micro_batches_add_up_to_the_batch_in_value_and_gradient(name, B, T, size, seed):
    terms, mask = draw(B, T, seed)
    terms, mask = torch.tensor(terms, requires_grad=True), torch.tensor(mask)
    num_tokens = int(mask.sum())
    whole = aggregate(name, terms, mask, num_tokens, B)
    (gradient,) = torch.autograd.grad(whole, terms)
    micro = [aggregate(name, t, m, num_tokens, B) for t, m in zip(terms.split(size), mask.split(size), strict=True)]
    total = torch.stack(micro).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)
    (of_total,) = torch.autograd.grad(total, terms)
    assert torch.equal(of_total, gradient)


def test_totals_may_be_tensors_and_masks_may_be_left_out():
    terms = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert token_mean(terms, None, torch.tensor(4)).item() == 3.0
    assert token_mean(terms, None, torch.tensor([8.0])).item() == 1.5
    assert sequence_mean_token_mean(terms, None, 2).item() == 3.0
    assert sequence_mean_token_sum(terms, None, 2).item() == 6.0
    assert constant_length_mean(terms, None, 2, 3).item() == 2.0
    assert token_mean(terms.bfloat16(), None, 4).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_update_gives_zero_with_a_gradient_of_zero(name):
    terms = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = aggregate(name, terms, torch.zeros(2, 3), 0, 0)
    loss.backward()
    assert loss.item() == 0.0
    assert terms.grad is not None
    assert (terms.grad == 0).all()


def test_refusals():
    ones = torch.ones(2, 3)
    with pytest.raises(AlgosError, match="total_tokens=5, but this mask alone holds 6 tokens"):
        token_mean(ones, None, 5)
    with pytest.raises(AlgosError, match="total_sequences=1, but this mask alone holds 2 sequences"):
        sequence_mean_token_mean(ones, None, 1)
    with pytest.raises(AlgosError, match="total_sequences=1"):
        sequence_mean_token_sum(ones, None, 1)
    with pytest.raises(AlgosError, match="total_tokens=nan"):
        token_mean(ones, None, float("nan"))
    with pytest.raises(AlgosError, match="total_tokens=inf"):
        token_mean(ones, None, float("inf"))
    with pytest.raises(ShapeError, match="total_tokens has shape"):
        token_mean(ones, None, torch.ones(2))
    with pytest.raises(AlgosError, match="max_completion_tokens=0"):
        constant_length_mean(ones, None, 2, 0)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        sequence_mean_token_mean(ones[0], None, 3)
    with pytest.raises(NonFiniteError, match=r"terms\[0, 0\]=nan"):
        token_mean(ones * float("nan"), None, 6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_sums_and_divisors_of_micro_batches_make_the_aggregation(name):
    generator = torch.Generator().manual_seed(3)
    terms = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    mask = torch.arange(5)[None] < torch.tensor([[5], [1], [0], [3], [2], [4]])
    parts = [slice(0, 2), slice(2, 3), slice(3, 6)]
    total = sum(aggregation_divisor(name, mask[part], max_completion_tokens=7) for part in parts)
    actual = sum(aggregated_sum(name, terms[part], mask[part]) for part in parts) / (total or 1.0)
    by_row = [terms[b, : int(mask[b].sum())] for b in range(6) if mask[b].any()]
    expected = {
        "token_mean": torch.cat(by_row).mean(),
        "token_sum": torch.cat(by_row).sum(),
        "sequence_mean_token_mean": torch.stack([row.mean() for row in by_row]).mean(),
        "sequence_mean_token_sum": torch.stack([row.sum() for row in by_row]).mean(),
        "constant_length_mean": torch.stack([row.sum() for row in by_row]).mean() / 7,
    }
    torch.testing.assert_close(actual, expected[name])


def test_tokens_and_sequences_with_tokens_are_counted():
    assert [int(n) for n in count_tokens_and_sequences(torch.tensor([[1, 1, 0], [0, 0, 0]]))] == [2, 1]
