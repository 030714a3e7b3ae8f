"""Sequence ids: sums, means and counts of packed rows against loops; cumulative lengths; refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    AlgosError,
    ShapeError,
    constant_length_mean,
    count_tokens_and_sequences,
    sequence_ids_of,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
)
from rlinf_algos.packing import index_sequences

quick = settings(max_examples=60)


@quick
@given(st.integers(0, 4), st.integers(0, 8), st.sampled_from([3, 10**12]), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_aggregations_of_packed_rows(B, T, largest_id, extra, seed):
    rng = np.random.default_rng(seed)
    names = rng.integers(0, largest_id, 4)
    ids, mask, terms = names[rng.integers(0, 4, (B, T))], rng.random((B, T)) < 0.7, rng.normal(size=(B, T))
    rows = [terms[mask & (ids == name)] for name in np.unique(ids[mask])]
    total = len(rows) + extra
    expected = {
        sequence_mean_token_mean: sum(row.mean() for row in rows) / max(1, total),
        sequence_mean_token_sum: sum(row.sum() for row in rows) / max(1, total),
    }
    packed = torch.tensor(np.where(mask, ids, -1))
    tensor, inside = torch.tensor(np.where(mask, terms, np.nan), requires_grad=True), torch.tensor(mask)
    for function, value in expected.items():
        actual = function(tensor, inside, total, sequence_ids=packed)
        np.testing.assert_allclose(actual.item(), value, rtol=1e-6, atol=1e-12)
    actual = constant_length_mean(tensor, inside, total, 64, sequence_ids=packed)
    np.testing.assert_allclose(actual.item(), expected[sequence_mean_token_sum] / 64, rtol=1e-6, atol=1e-12)
    num_tokens, num_sequences = count_tokens_and_sequences(inside, sequence_ids=packed)
    assert (int(num_tokens), int(num_sequences)) == (mask.sum(), len(rows))
    sequence_mean_token_mean(tensor, inside, total, sequence_ids=packed).backward()
    gradient = np.zeros((B, T))
    for name in np.unique(ids[mask]):
        mine = mask & (ids == name)
        gradient[mine] = 1.0 / mine.sum() / max(1, total)
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), gradient, rtol=1e-6, atol=1e-12)


def test_values_of_sequences_go_to_their_tokens():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    ids = torch.tensor([[0, 0, 0, 1], [2, 2, 1, -1]])
    sequences = index_sequences(mask, ids)
    assert sequences.lengths.tolist() == [3, 2, 2]
    spread = sequences.spread(torch.tensor([5.0, 6.0, 7.0]))
    assert spread[mask].tolist() == [5, 5, 5, 6, 7, 7, 6]
    assert index_sequences(mask).spread(torch.tensor([5.0, 6.0])).tolist() == [[5.0] * 4, [6.0] * 4]


@quick
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3))
def test_ids_of_cumulative_lengths(lengths, padding):
    ends = torch.tensor([0, *np.cumsum(lengths, dtype=int)], dtype=torch.int32)
    expected = [s for s, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    assert sequence_ids_of(ends, sum(lengths) + padding).tolist() == [expected]


def test_without_a_mask_of_its_own_a_row_is_a_sequence():
    assert [int(n) for n in count_tokens_and_sequences(torch.tensor([[1, 1, 0], [0, 0, 0]]))] == [2, 1]


def test_refusals():
    ones, ids = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"sequence_ids has shape \[1, 3\]; expected \[2, 3\]"):
        sequence_mean_token_mean(ones, None, 2, sequence_ids=ids[:1])
    with pytest.raises(AlgosError, match=r"sequence_ids has dtype torch.float32; expected integers"):
        sequence_mean_token_mean(ones, None, 2, sequence_ids=ones)
    with pytest.raises(AlgosError, match=r"sequence_ids\[0, 0\]=-1 is negative; only padding may be"):
        sequence_mean_token_mean(ones, None, 2, sequence_ids=ids - 1)
    with pytest.raises(AlgosError, match="total_sequences=1, but this mask alone holds 2 sequences"):
        sequence_mean_token_mean(ones, None, 1, sequence_ids=torch.tensor([[0, 0, 1], [1, 1, 1]]))
    with pytest.raises(ShapeError, match="cumulative_lengths has shape"):
        sequence_ids_of(torch.zeros(0), 3)
    for wrong in ([1, 2], [0, 3, 2], [0, 4]):
        with pytest.raises(AlgosError, match=r"must start at 0, never decrease and end at most at num_positions=3"):
            sequence_ids_of(torch.tensor(wrong), 3)
