"""Choosing over parts and ranks against sorting everything at one place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError
from rlinf_algos.selection import choose_largest, sequence_hash


def alone(rows):
    return rows.sum(0)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(-1, 12),
    st.sampled_from(["few", "wide", "tiny", "ids"]),
    st.integers(0, 2**32 - 1),
)
def test_the_largest_of_all_parts_ties_included(sizes, num_chosen, kind, seed):
    rng = np.random.default_rng(seed)
    draw = {
        "few": lambda n: rng.integers(-2, 3, n).astype(np.float32),
        "wide": lambda n: (rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n)).astype(np.float32),
        "tiny": lambda n: (1.0 + rng.integers(0, 9, n) * 2.0**-23).astype(np.float32),
        "ids": lambda n: rng.integers(0, 2**32, n),
    }[kind]
    parts = [draw(n) for n in sizes]
    ranked = np.sort(np.concatenate(parts))[::-1]
    masks = choose_largest([torch.tensor(part) for part in parts], num_chosen, alone)
    if num_chosen < 1 or not len(ranked):
        assert not any(mask.any() for mask in masks)
        return
    least = ranked[min(num_chosen, len(ranked)) - 1]
    for part, mask in zip(parts, masks, strict=True):
        assert mask.numpy().tolist() == (part >= least).tolist()


def test_zero_has_one_place_and_integers_have_a_range():
    (mask,) = choose_largest([torch.tensor([0.0, -0.0, -1.0])], 1, alone)
    assert mask.tolist() == [True, True, False]
    with pytest.raises(AlgosError, match="between 0 and"):
        choose_largest([torch.tensor([-1])], 1, alone)


def test_what_is_scattered_looks_drawn_and_is_a_function_of_its_ids():
    prompts, rows, places = torch.arange(64)[:, None, None], torch.arange(8)[:, None], torch.arange(50)
    hashes = sequence_hash([prompts, rows, places])
    assert hashes.shape == (64, 8, 50)
    assert torch.equal(hashes[3, 2], sequence_hash([torch.tensor(3), torch.tensor(2), places]))
    assert len(hashes.unique()) > 0.999 * hashes.numel()
    shares = hashes.double() / 2**32
    for dims in ((1, 2), (0, 2), (0, 1)):
        means = shares.mean(dim=dims)
        assert ((means - 0.5).abs() < 6 * (1 / 12 / (hashes.numel() / len(means))) ** 0.5).all()
    assert abs(float(torch.corrcoef(torch.stack([shares[:-1].flatten(), shares[1:].flatten()]))[0, 1])) < 0.03
