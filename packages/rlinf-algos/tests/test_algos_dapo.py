"""Dynamic sampling and overlong completions against plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    grpo_advantages,
    has_signal,
    overlong_filter,
    overlong_penalty,
)

quick = settings(max_examples=100)
seeds = st.integers(0, 2**32 - 1)


@quick
@given(st.integers(0, 5), st.integers(0, 5), seeds)
def test_groups_with_signal_are_those_with_advantages(P, G, seed):
    rewards = torch.tensor(np.random.default_rng(seed).integers(0, 2, (P, G)))
    expected = (grpo_advantages(rewards) != 0).any(dim=1)
    actual = has_signal(rewards)
    assert torch.equal(actual, expected[:, None].expand(P, G))


@quick
@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.0, 1.0, 0.5]), seeds)
def test_overlong_penalty(max_tokens, buffer_tokens, penalty, seed):
    buffer_tokens = min(buffer_tokens, max_tokens)
    lengths = np.random.default_rng(seed).integers(0, 40, (2, 5))
    expected = np.zeros(lengths.shape)
    for place, length in np.ndenumerate(lengths):
        if length > max_tokens:
            expected[place] = -1
        elif length > max_tokens - buffer_tokens:
            expected[place] = ((max_tokens - buffer_tokens) - length) / buffer_tokens
    penalties = overlong_penalty(
        torch.tensor(lengths).double(), max_tokens=max_tokens, buffer_tokens=buffer_tokens, penalty=penalty
    )
    np.testing.assert_allclose(penalties.numpy(), penalty * expected, rtol=1e-6, atol=1e-12)


def test_overlong_penalty_of_integers():
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    penalties = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096)
    assert penalties.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0] and penalties.dtype == torch.float32


def test_overlong_filter():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert overlong_filter(mask, torch.tensor([0, 1, 1])).tolist() == [[True, True], [False, False], [False, False]]
    assert not overlong_filter(mask, torch.ones(3)).any()
    assert torch.equal(overlong_filter(mask, torch.zeros(3, dtype=torch.bool)), mask.bool())


def test_refusals():
    ones = torch.ones(2)
    with pytest.raises(ShapeError, match=r"expected \[P, G\]"):
        has_signal(ones)
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 0\]=nan"):
        has_signal(ones[None] * math.nan)
    for change in ({"max_tokens": 0}, {"buffer_tokens": 0}, {"buffer_tokens": 11}, {"penalty": -1.0}):
        (name,) = change
        with pytest.raises(AlgosError, match=f"{name}="):
            overlong_penalty(ones, **{"max_tokens": 10, "buffer_tokens": 5, **change})
    with pytest.raises(AlgosError, match="lengths holds -1"):
        overlong_penalty(-ones, max_tokens=10, buffer_tokens=5)
    with pytest.raises(NonFiniteError, match=r"lengths\[0\]=nan"):
        overlong_penalty(ones * math.nan, max_tokens=10, buffer_tokens=5)
    with pytest.raises(ShapeError, match=r"expected \[B, T\]"):
        overlong_filter(ones, ones)
    with pytest.raises(ShapeError, match="truncated has shape"):
        overlong_filter(ones[:, None], ones[:1])
