"""Groups of turns and steps against float64 numpy references written over dictionaries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    episode_group_advantages,
    first_episode_mask,
    gigpo_advantages,
    grpo_advantages,
    spread_over_tokens,
    state_group_ids,
    turn_group_ids,
)

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
rates = st.sampled_from([0.0, 0.6, 1.0])


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


def grouped(values, normalize_std, epsilon):
    """{place: (group, value)} -> {place: advantage}; equal to 12 digits is equal."""
    out = {}
    for place, (group, value) in values.items():
        others = [v for g, v in values.values() if g == group]
        mean, spread = sum(others) / len(others), max(others) - min(others)
        std = np.sqrt(sum((v - mean) ** 2 for v in others) / max(1, len(others) - 1))
        out[place] = 0.0 if spread < 1e-12 else (value - mean) / (std + epsilon if normalize_std else 1.0)
    return out


@quick
@given(st.integers(0, 6), st.integers(0, 5), rates, st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), seeds)
def test_gigpo(B, K, mask_rate, normalize_std, step_weight, seed):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.integers(0, 3, (B, K)) / 2, rng.random((B, K)) < mask_rate
    ids, states, gamma = rng.integers(0, 2, B), rng.integers(0, 3, (B, K)) * 10**18, 0.5
    episodes, steps = {}, {}
    for b in range(B):
        taken = np.flatnonzero(mask[b])
        if len(taken):
            episodes[b] = ids[b], sum(rewards[b, taken])
        for i, k in enumerate(taken):
            to_go = sum(gamma**j * rewards[b, s] for j, s in enumerate(taken[i:]))
            steps[b, k] = (ids[b], states[b, k]), to_go
    of_episode, of_step = (grouped(values, normalize_std, 1e-4) for values in (episodes, steps))
    expected = np.zeros((B, K))
    for b, k in steps:
        expected[b, k] = of_episode[b] + step_weight * of_step[b, k]
    rewards[~mask] = np.nan
    found = gigpo_advantages(
        *map(torch.tensor, (rewards, ids, states, mask)),
        gamma=gamma,
        step_weight=step_weight,
        normalize_std=normalize_std,
    )
    close(found, expected)


def test_gigpo_credits_the_step_where_two_episodes_parted():
    """Both began in state 7; one went to 1 and was rewarded, the other to 2."""
    found = gigpo_advantages(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        torch.tensor([0, 0]),
        torch.tensor([[7, 1], [7, 2]]),
        gamma=1.0,
        normalize_std=False,
    )
    assert found.tolist() == [[1.0, 0.5], [-1.0, -0.5]]


@quick
@given(st.integers(0, 5), st.integers(0, 6), st.booleans(), st.sampled_from([0.0, 0.2, 1.0]), seeds)
def test_embodied_grpo(T, N, normalize_std, end_rate, seed):
    rng = np.random.default_rng(seed)
    rewards, ids = rng.integers(0, 3, (T, N)) / 2, rng.integers(0, 3, N)
    terminated, truncated = rng.random((2, T, N)) < end_rate
    mask, returns = np.zeros((T, N), dtype=bool), {}
    for n in range(N if T else 0):
        for t in range(T):
            mask[t, n] = True
            if terminated[t, n] or truncated[t, n]:
                break
        returns[n] = ids[n], sum(rewards[mask[:, n], n])
    advantages = grouped(returns, normalize_std, 1e-4)
    expected = np.where(mask, [advantages.get(n, 0.0) for n in range(N)], 0.0)
    found_mask = first_episode_mask(torch.tensor(terminated), torch.tensor(truncated))
    assert found_mask.numpy().tolist() == mask.tolist()
    rewards[~mask] = np.nan
    found = episode_group_advantages(torch.tensor(rewards), found_mask, torch.tensor(ids), normalize_std=normalize_std)
    close(found, expected)


def test_turn_groups():
    ids = turn_group_ids(torch.tensor([8, 3, 8]), 2)
    assert ids.shape == (3, 2)
    assert torch.equal(ids[0], ids[2]) and len(set(ids[:2].flatten().tolist())) == 4
    scores = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 1.0]])
    assert grpo_advantages(scores, ids, normalize_std=False).tolist() == [[0.5, -0.5], [0.0, 0.0], [-0.5, 0.5]]


def test_state_groups_are_within_a_prompt():
    ids = state_group_ids(torch.tensor([2**62, 1]), torch.tensor([[9, -4], [9, 9]]))
    assert ids[1, 0] == ids[1, 1]
    assert len(set(ids.flatten().tolist())) == 3
    assert state_group_ids(torch.empty(0, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


@quick
@given(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3), rates, seeds)
def test_spread_over_tokens(B, T, K, mask_rate, seed):
    rng = np.random.default_rng(seed)
    advantages, mask = rng.normal(size=(B, K)), rng.random((B, T)) < mask_rate * (K > 0)
    turns = np.where(mask, rng.integers(0, max(1, K), (B, T)), -7)
    expected = np.zeros((B, T))
    for b, t in zip(*np.nonzero(mask), strict=True):
        expected[b, t] = advantages[b, turns[b, t]]
    for b in range(B):
        advantages[b, [k for k in range(K) if k not in turns[b]]] = np.nan
    close(spread_over_tokens(*map(torch.tensor, (advantages, turns, mask))), expected)


def test_refusals():
    ones, ids = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    states = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"rewards has shape \[2\]; expected \[B, K\]"):
        gigpo_advantages(ones[:, 0], ids, states)
    with pytest.raises(AlgosError, match="step_weight=-1"):
        gigpo_advantages(ones, ids, states, step_weight=-1)
    with pytest.raises(AlgosError, match="gamma=2"):
        gigpo_advantages(ones, ids, states, gamma=2)
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 0\]=nan"):
        gigpo_advantages(ones * float("nan"), ids, states)
    with pytest.raises(ShapeError, match=r"state_ids has shape \[2, 3\], group_ids \[1\]"):
        state_group_ids(ids[:1], states)
    with pytest.raises(AlgosError, match="state_ids has dtype"):
        state_group_ids(ids, ones)
    with pytest.raises(ShapeError, match=r"expected \[B\]"):
        turn_group_ids(states, 2)
    with pytest.raises(ShapeError, match=r"expected \[T, N\]"):
        first_episode_mask(ids, ids)
    with pytest.raises(ShapeError, match="truncated has shape"):
        first_episode_mask(ones, ones[:1])
    with pytest.raises(ShapeError, match="group_ids has shape"):
        episode_group_advantages(ones, None, ids)
    with pytest.raises(ShapeError, match=r"expected \[T, N\]"):
        episode_group_advantages(ids, None, ids)
    with pytest.raises(AlgosError, match=r"turn_index\[0, 1\]=3, but turn_advantages has turns 0 ... 2"):
        spread_over_tokens(ones, torch.tensor([[0, 3], [0, 0]]), torch.ones(2, 2))
    with pytest.raises(NonFiniteError, match=r"turn_advantages\[0, 0\]=nan"):
        spread_over_tokens(ones * float("nan"), states, torch.ones(2, 3))
    with pytest.raises(ShapeError, match=r"expected \[B, K\] and \[B, T\]"):
        spread_over_tokens(ones[:, 0], states, torch.ones(2, 3))
