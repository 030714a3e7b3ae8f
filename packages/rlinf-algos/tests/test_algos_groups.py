"""Group baselines against float64 numpy references that walk over the groups one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import (
    AlgosError,
    NonFiniteError,
    ShapeError,
    gdpo_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)

quick = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-9)


def grpo_reference(rewards, normalize_std, epsilon):
    out = np.zeros_like(rewards)
    for p, group in enumerate(rewards):
        if len(set(group.tolist())) <= 1:
            continue
        mean = sum(group) / len(group)
        std = np.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        out[p] = [(r - mean) / (std + epsilon) if normalize_std else r - mean for r in group]
    return out


@quick
@given(st.integers(0, 5), st.integers(1, 9), st.booleans(), st.sampled_from([1e-6, 1e-4, 0.1]), seeds)
def test_grpo(P, G, normalize_std, epsilon, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, (P, G)) / 2 if rng.random() < 0.5 else rng.normal(3.0, 2.0, (P, G))
    advantages = grpo_advantages(torch.tensor(rewards), normalize_std=normalize_std, epsilon=epsilon)
    close(advantages, grpo_reference(rewards, normalize_std, epsilon))


@quick
@given(st.integers(0, 4), st.integers(0, 6), st.booleans(), seeds)
def test_pass_at_k(P, G, normalize_std, seed):
    """The gradient of E[largest reward of a group], with what the group would have had without a sample as baseline:
    largest of all less largest of the others, which only the best sample changes."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 4, (P, G)) / 2 if rng.random() < 0.5 else rng.normal(3.0, 2.0, (P, G))
    expected = np.zeros((P, G))
    for p in range(P):
        group = dict(enumerate(rewards[p]))
        std = np.std(list(group.values()), ddof=1) if len(group) > 1 else 0.0
        for g in group if len(group) > 1 else ():
            lead = max(group.values()) - max(reward for other, reward in group.items() if other != g)
            expected[p, g] = lead / (std + 1e-4 if normalize_std else 1.0)
    close(pass_at_k_advantages(torch.tensor(rewards), normalize_std=normalize_std), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -7.3])
def test_grpo_equal_rewards_give_exactly_zero(dtype, normalize_std, value):
    for num in (1, 3, 7):
        advantages = grpo_advantages(torch.full((2, num), value, dtype=dtype), normalize_std=normalize_std, epsilon=0.0)
        assert torch.equal(advantages, torch.zeros_like(advantages))


def test_grpo_float32_and_half_precision():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    expected = grpo_reference(rewards.double().numpy(), True, 1e-4)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        advantages = grpo_advantages(rewards.to(dtype))
        assert advantages.dtype == torch.float32
        close(advantages, expected.astype(np.float32))


def test_grpo_carries_no_gradient():
    assert not grpo_advantages(torch.rand(2, 4, requires_grad=True)).requires_grad


def test_grpo_refuses():
    with pytest.raises(ShapeError, match=r"rewards has shape \[4\]; expected \[P, G\]"):
        grpo_advantages(torch.zeros(4))
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 1\]=nan"):
        grpo_advantages(torch.tensor([[0.0, float("nan")]]))
    with pytest.raises(AlgosError, match="epsilon=-1"):
        grpo_advantages(torch.zeros(1, 2), epsilon=-1)


def of_grpo(group, lengths):
    deviation = np.sqrt(sum((r - np.mean(group)) ** 2 for r in group) / max(1, len(group) - 1))
    return [(r - np.mean(group)) / (deviation + 1e-4) for r in group]


def of_rloo(group, lengths):
    return [r - np.mean([*group[:i], *group[i + 1 :]]) for i, r in enumerate(group)]


def of_opo(group, lengths):
    lengths = lengths if sum(lengths) else [1] * len(group)
    baseline = sum(length * r for length, r in zip(lengths, group, strict=True)) / sum(lengths)
    return [r - baseline for r in group]


def without_std(rewards, group_ids=None, mask=None):
    return grpo_advantages(rewards, group_ids, mask, normalize_std=False)


BY_IDS = {
    "grpo": (grpo_advantages, of_grpo),
    "dr_grpo": (without_std, lambda group, lengths: [r - np.mean(group) for r in group]),
}
BY_ROWS = {
    "grpo": (lambda rewards, lengths: grpo_advantages(rewards), of_grpo),
    "dr_grpo": (lambda rewards, lengths: without_std(rewards), BY_IDS["dr_grpo"][1]),
    "rloo": (lambda rewards, lengths: rloo_advantages(rewards), of_rloo),
    "opo": (opo_advantages, of_opo),
}


def reference(of_group, rewards, lengths, ids, mask):
    """Group by group: dictionaries and lists, no tensors."""
    members = {}
    for place in zip(*np.nonzero(mask), strict=True):
        members.setdefault(int(ids[place]), []).append(place)
    out = np.zeros(rewards.shape)
    for places in members.values():
        group, tokens = [float(rewards[p]) for p in places], [int(lengths[p]) for p in places]
        if len(set(group)) > 1:
            for place, advantage in zip(places, of_group(group, tokens), strict=True):
                out[place] = advantage
    return out


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(BY_IDS)),
    st.sampled_from([(0,), (1,), (7,), (24,), (5, 4), (3, 0), (2, 3, 4)]),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.6, 1.0]),
    seeds,
)
def test_groups_of_any_size(name, shape, num_groups, mask_rate, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, shape) / 2 if rng.random() < 0.5 else rng.normal(3.0, 2.0, shape)
    ids = rng.permutation(10**12 + np.arange(num_groups) * 10**15)[rng.integers(0, num_groups, shape)]
    function, of_group = BY_IDS[name]
    mask = rng.random(shape) < mask_rate
    expected = reference(of_group, rewards, np.ones(shape), ids, mask)
    close(function(*map(torch.tensor, (np.where(mask, rewards, np.nan), ids, mask))), expected)


@quick
@given(st.sampled_from(sorted(BY_ROWS)), st.integers(0, 4), st.integers(0, 6), st.booleans(), seeds)
def test_rows_are_groups_without_ids(name, P, G, is_whole, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, (P, G)) / 2 if is_whole else rng.normal(3.0, 2.0, (P, G))
    lengths, ids = rng.integers(0, 4, (P, G)), np.repeat(np.arange(P)[:, None], G, axis=1)
    function, of_group = BY_ROWS[name]
    expected = reference(of_group, rewards, lengths, ids, np.ones((P, G)))
    close(function(torch.tensor(rewards), torch.tensor(lengths)), expected)


@pytest.mark.parametrize("name", sorted(BY_ROWS))
@pytest.mark.parametrize("num", [1, 7])
def test_lone_and_equal_rewards_give_exactly_zero(name, num):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        advantages = BY_ROWS[name][0](torch.full((2, num), 0.1, dtype=dtype), torch.arange(2 * num).view(2, num))
        assert torch.equal(advantages, torch.zeros_like(advantages))


def test_what_is_masked_out_is_in_no_baseline():
    rewards, ids = torch.tensor([1.0, 0.0, 100.0]), torch.tensor([0, 0, 0])
    assert without_std(rewards, ids, torch.tensor([1, 1, 0])).tolist() == [0.5, -0.5, 0.0]


def test_the_dtype_of_a_result():
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        assert rloo_advantages(torch.tensor([[1, 0]]).to(dtype)).dtype == torch.float32
    assert rloo_advantages(torch.zeros(1, 2, dtype=torch.float64)).dtype == torch.float64


def test_rewards_far_from_zero_keep_their_difference():
    rewards = torch.tensor([[16777216.0, 16777218.0]])
    assert without_std(rewards).tolist() == [[-1.0, 1.0]]


def test_rloo_is_the_leave_one_out_baseline():
    assert rloo_advantages(torch.tensor([[1.0, 0.0, 0.0]])).tolist() == [[1.0, -0.5, -0.5]]


@quick
@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 3), seeds)
def test_gdpo(P, G, K, seed):
    rng = np.random.default_rng(seed)
    parts, weights = rng.integers(0, 3, (P, G, K)) * [1.0, 0.1, 5.0][:K], rng.normal(size=K)
    expected = sum(weight * grpo_reference(parts[..., k], True, 1e-4) for k, weight in enumerate(weights))
    close(gdpo_advantages(torch.tensor(parts), torch.tensor(weights)), expected * np.ones((P, G)))


def test_gdpo_tells_apart_what_the_sum_does_not():
    """Answer and form, four completions: two of the sums are equal, and GRPO cannot rank them."""
    parts = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    weights = torch.tensor([1.0, 1.0], dtype=torch.float64)
    of_sum = grpo_advantages(parts @ weights)
    advantages = gdpo_advantages(parts, weights)
    assert of_sum[0, 0] == of_sum[0, 1]
    assert advantages[0, 0] > advantages[0, 1], "a right answer is rarer here than a right form"


def test_gdpo_refuses():
    parts = torch.ones(2, 3, 2)
    with pytest.raises(ShapeError, match=r"parts has shape \[2, 3\]; expected \[P, G, K\]"):
        gdpo_advantages(parts[..., 0], torch.ones(2))
    with pytest.raises(ShapeError, match="part_weights has shape"):
        gdpo_advantages(parts, torch.ones(3))
    with pytest.raises(NonFiniteError, match=r"part_weights\[1\]=inf"):
        gdpo_advantages(parts, torch.tensor([1.0, float("inf")]))


@pytest.mark.parametrize("name", sorted(BY_IDS))
def test_refusals_of_ids_and_masks(name):
    function, ones, ids = BY_IDS[name][0], torch.ones(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"group_ids has shape \[2\]"):
        function(ones, ids[:2])
    with pytest.raises(ShapeError, match=r"mask has shape \[2\]"):
        function(ones, ids, ones[:2])
    with pytest.raises(AlgosError, match="group_ids has dtype"):
        function(ones, ones)


@pytest.mark.parametrize("name", sorted(BY_ROWS))
def test_refusals(name):
    function, ones = BY_ROWS[name][0], torch.ones(1, 3)
    with pytest.raises(ShapeError, match=r"rewards has shape \[3\]; expected \[P, G\]"):
        function(ones[0], ones[0])
    with pytest.raises(NonFiniteError, match=r"rewards\[0, 1\]=inf"):
        function(torch.tensor([[0.0, float("inf"), 0.0]]), ones)
    assert not function(ones.clone().requires_grad_(), ones).requires_grad


def test_opo_refuses_lengths():
    ones = torch.ones(1, 2)
    with pytest.raises(AlgosError, match="lengths holds -1"):
        opo_advantages(ones, torch.tensor([[1, -1]]))
    with pytest.raises(ShapeError, match="lengths has shape"):
        opo_advantages(ones, ones[:, :1])
    with pytest.raises(NonFiniteError, match=r"lengths\[0, 0\]=nan"):
        opo_advantages(ones, ones * float("nan"))
