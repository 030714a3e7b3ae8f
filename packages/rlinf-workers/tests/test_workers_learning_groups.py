"""What a group learns from: advantages against formulas in float64, the choice of groups, whitening over shards."""

import dataclasses

import pytest
import torch

from rlinf_algos import preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.roles.language.advantages import AdvantageMaker, LearningGroup, choose_groups, signals, whiten
from rlinf_workers.roles.language.micro_batches import tokens_of
from rlinf_workers.roles.records.language import Prompt, SampleGroup, ScoredGroup
from rlinf_workers.testing.backends import ORDINARY, Chooser, trial_worker
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 8, 4, 5


def scored_groups():
    """In group g the first 1 + g % 3 completions are right; in group 5 all are."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for index in range(NUM_GROUPS):
        lengths = torch.randint(1, NUM_TOKENS + 1, (GROUP_SIZE, 1), generator=generator)
        mask = (torch.arange(NUM_TOKENS)[None] < lengths).float()
        samples = SampleGroup(
            prompt=Prompt(index=index, token_ids=torch.arange(3), reference_answer=""),
            completion_ids=torch.zeros(GROUP_SIZE, NUM_TOKENS, dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=-torch.rand(GROUP_SIZE, NUM_TOKENS, generator=generator) * mask,
            ref_logprobs=-torch.rand(GROUP_SIZE, NUM_TOKENS, generator=generator) * mask,
            policy_version=0,
        )
        rewards = (torch.arange(GROUP_SIZE) <= index % 3).float() if index != 5 else torch.ones(GROUP_SIZE)
        groups.append(ScoredGroup(samples=samples, rewards=rewards, completions=("",) * GROUP_SIZE))
    return groups


def backend(num_shards=2):
    return ReplicatedBackend(Chooser(), trial_worker(), optimizer=ORDINARY, num_shards=num_shards)


def with_advantages(group, name="grpo", values=None, **changes):
    return AdvantageMaker(preset(name, **changes), max_completion_tokens=NUM_TOKENS).make(
        [group], {} if values is None else {group.samples.index: values}
    )[0]


def lengths_of(group):
    return [int(row.sum()) for row in group.samples.loss_mask]


@pytest.mark.parametrize("pack", [pack_groups, pack_without_padding])
def test_groups_of_different_widths_stand_side_by_side(pack):
    """SGLang, and an engine that refills rows, give each group the width of its own longest completion."""
    wide = [with_advantages(group, "ppo", torch.rand(GROUP_SIZE, NUM_TOKENS)) for group in scored_groups()]
    for group in wide:
        group.proximal_logprobs = group.samples.rollout_logprobs * 0.5
    narrow = [fitted(group) for group in wide]
    assert len({group.samples.loss_mask.shape[1] for group in narrow}) > 1
    expected, tokens = (tokens_of(groups, torch.device("cpu"), pack) for groups in (wide, narrow))
    assert expected is not None and tokens is not None, "there are groups"
    for field in ("advantages", "rollout_logprobs", "ref_logprobs", "proximal_logprobs", "values", "returns"):
        is_read = expected.sequences.loss_mask != 0
        assert_bitwise_equal(getattr(tokens, field)[is_read], getattr(expected, field)[is_read])
    assert_bitwise_equal(tokens.sequences.completion_ids, expected.sequences.completion_ids)


def fitted(group):
    """The group without the columns that none of its completions reaches."""
    width = max(lengths_of(group))
    cut = {
        f.name: getattr(group, f.name)
        for f in dataclasses.fields(group)
        if f.name not in ("samples", "rewards", "minibatch", "first_row")
    }
    of_samples = {name: getattr(group.samples, name)[:, :width] for name in PER_TOKEN}
    return dataclasses.replace(
        group,
        samples=dataclasses.replace(group.samples, **of_samples),
        **{name: None if tensor is None else tensor[:, :width] for name, tensor in cut.items()},
    )


PER_TOKEN = ("completion_ids", "loss_mask", "rollout_logprobs", "ref_logprobs")


def test_rloo():
    group = scored_groups()[1]
    rewards = group.rewards.double()
    expected = [float(r - (rewards.sum() - r) / (GROUP_SIZE - 1)) for r in rewards]
    assert with_advantages(group, "rloo").advantages.tolist() == pytest.approx(expected)


def test_a_kl_in_the_reward_of_groups():
    group = scored_groups()[1]
    samples = group.samples
    kl = [
        sum(float(samples.rollout_logprobs[g, t] - samples.ref_logprobs[g, t]) for t in range(length))
        for g, length in enumerate(lengths_of(group))
    ]
    rewards = [float(r) - 0.3 * k for r, k in zip(group.rewards, kl, strict=True)]
    expected = [r - (sum(rewards) - r) / (GROUP_SIZE - 1) for r in rewards]
    assert with_advantages(group, "rloo", kl_coef=0.3).advantages.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_kl_in_the_reward_of_tokens():
    group = scored_groups()[2]
    advantages = with_advantages(group, "reinforce_plus_plus", kl_coef=0.2, gamma=0.9).advantages
    for g, length in enumerate(lengths_of(group)):
        carry = 0.0
        for t in reversed(range(NUM_TOKENS)):
            if t >= length:
                assert advantages[g, t] == 0
                continue
            kl = float(group.samples.rollout_logprobs[g, t]) - float(group.samples.ref_logprobs[g, t])
            carry = (float(group.rewards[g]) if t == length - 1 else 0.0) - 0.2 * kl + 0.9 * carry
            assert float(advantages[g, t]) == pytest.approx(carry, rel=1e-5, abs=1e-6)


def test_gae_with_values():
    group = scored_groups()[0]
    values = torch.rand(GROUP_SIZE, NUM_TOKENS) * group.samples.loss_mask
    learning_group = with_advantages(group, "ppo", values, gamma=0.9, gae_lambda=0.8)
    assert learning_group.returns is not None
    for g, length in enumerate(lengths_of(group)):
        carry, following = 0.0, 0.0
        for t in reversed(range(length)):
            value = float(values[g, t])
            reward = float(group.rewards[g]) if t == length - 1 else 0.0
            carry = reward + 0.9 * following - value + 0.9 * 0.8 * carry
            following = value
            assert float(learning_group.advantages[g, t]) == pytest.approx(carry, rel=1e-5, abs=1e-6)
            assert float(learning_group.returns[g, t]) == pytest.approx(carry + value, rel=1e-5, abs=1e-6)


def test_the_overlong_penalty_begins_at_the_buffer():
    """Lengths 1 ... 5 of at most 5 with a buffer of 4: the reward falls by 0, 0.25, 0.5, 0.75, 1 times the penalty."""
    group = scored_groups()[0]
    group.samples.loss_mask[:] = (torch.arange(NUM_TOKENS)[None] < torch.tensor([[1], [2], [3], [5]])).float()
    group.rewards[:] = 1.0
    learning_group = with_advantages(group, "rloo", overlong_buffer_tokens=4, overlong_penalty=2.0)
    rewards = [1.0, 0.5, 0.0, -1.0]
    assert learning_group.advantages.tolist() == pytest.approx([r - (sum(rewards) - r) / 3 for r in rewards])
    assert learning_group.rewards.tolist() == [1.0] * GROUP_SIZE, "as scored"


def test_opo_weighs_the_baseline_by_lengths():
    group = scored_groups()[1]
    lengths, rewards = lengths_of(group), group.rewards.tolist()
    baseline = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    assert with_advantages(group, advantage="opo").advantages.tolist() == pytest.approx([r - baseline for r in rewards])


def with_parts(group, parts=((1.0, 5.0), (1.0, 0.0), (0.0, 5.0), (0.0, 0.0))):
    weights = torch.tensor([0.75, 0.25])
    return dataclasses.replace(group, parts=torch.tensor(parts), part_weights=weights)


def test_gdpo_brings_every_part_to_one_scale():
    """Both parts split the group in halves, so their normalised values are +-std, whatever their scales."""
    high = 0.5 / ((1.0 / 3.0) ** 0.5 + 1e-4)
    wide = 2.5 / ((25.0 / 3.0) ** 0.5 + 1e-4)
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    expected = [0.75 * a * high + 0.25 * b * wide for a, b in signs]
    assert with_advantages(with_parts(scored_groups()[0]), "gdpo").advantages.tolist() == pytest.approx(
        expected, rel=1e-5
    )
    with pytest.raises(ValueError, match="advantage 'gdpo' reads reward components; this reward has none"):
        with_advantages(scored_groups()[0], "gdpo")


def test_parts_may_differ_where_their_sum_does_not():
    group = dataclasses.replace(with_parts(scored_groups()[5], ((1.0, 0.0), (0.0, 3.0)) * 2), rewards=torch.ones(4))
    assert signals([group]) == [False]
    assert signals([group], by_parts=True) == [True]


def test_distillation_learns_from_each_tokens_distance_to_the_teacher():
    """The reverse KL's own part of each token, whatever the reward was."""
    group = scored_groups()[1]
    learning_group = with_advantages(group, "distillation")
    expected = (group.samples.ref_logprobs.double() - group.samples.rollout_logprobs) * group.samples.loss_mask
    torch.testing.assert_close(learning_group.advantages.double(), expected, rtol=1e-5, atol=1e-6)
    beside = with_advantages(group, "distillation", reward_coef=2.0).advantages - learning_group.advantages
    for g, length in enumerate(lengths_of(group)):
        at_end = [0.0] * (length - 1) + [2.0 * float(group.rewards[g])] + [0.0] * (NUM_TOKENS - length)
        assert beside[g].tolist() == pytest.approx(at_end, abs=1e-6)


def test_a_wrong_shape_is_named(monkeypatch):
    maker = AdvantageMaker(preset("grpo"), max_completion_tokens=NUM_TOKENS)
    monkeypatch.setattr(maker._advantage, "_function", lambda rewards, **_: rewards[0])
    with pytest.raises(ValueError, match=r"advantage 'grpo' returned the shape \[4\] for rewards \[1, 4\]"):
        maker.make(scored_groups()[:1])


@pytest.mark.parametrize(("limit", "expected"), [(99, [0, 1, 2, 3, 4, 6, 7]), (3, [0, 1, 2]), (0, [])])
def test_dynamic_sampling_takes_the_first_groups_with_a_signal(limit, expected):
    groups = scored_groups()
    chosen = choose_groups(groups, signals(groups), backend(), NUM_GROUPS, limit)
    assert chosen == {index: position for position, index in enumerate(expected)}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_whitening_is_over_all_tokens_of_all_shards(by_token, num_shards):
    groups = [
        LearningGroup(
            samples=group.samples,
            rewards=group.rewards,
            advantages=100 + torch.randn(*((GROUP_SIZE, NUM_TOKENS) if by_token else (GROUP_SIZE,))),
        )
        for group in scored_groups()
    ]
    mask = torch.cat([group.samples.loss_mask for group in groups]).bool()
    before = torch.cat([g.advantages if by_token else g.advantages[:, None].expand(-1, NUM_TOKENS) for g in groups])
    inside = before.double()[mask]
    whiten(groups, lambda index: index % num_shards, backend(num_shards))
    after = torch.cat([g.advantages if by_token else g.advantages[:, None].expand(-1, NUM_TOKENS) for g in groups])
    torch.testing.assert_close(
        after.double()[mask], (inside - inside.mean()) / inside.std(), rtol=1e-4, atol=1e-4
    )  # float32 near 100 has 5 digits behind the point


def test_equal_advantages_are_whitened_to_zero():
    groups = [
        LearningGroup(samples=g.samples, rewards=g.rewards, advantages=torch.ones(GROUP_SIZE)) for g in scored_groups()
    ]
    whiten(groups, lambda _: 0, backend(1))
    assert all(not group.advantages.any() for group in groups)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "gdpo", "opo"])
@pytest.mark.parametrize("group_size", [2, 3, 8, 17, 64])
def test_the_number_of_groups_in_a_call_does_not_change_a_bit(name, group_size):
    """A plan chooses how many groups come in a chunk; advantages are of all of them in one call."""
    generator = torch.Generator().manual_seed(group_size)
    algorithm = preset("grpo", advantage="opo") if name == "opo" else preset(name, whiten_advantages=False)
    maker = AdvantageMaker(dataclasses.replace(algorithm, kl_coef=0.0), max_completion_tokens=3)
    groups = []
    for index in range(40):
        mask = (torch.arange(3)[None] < torch.randint(1, 4, (group_size, 1), generator=generator)).float()
        zeros = torch.zeros(group_size, 3)
        samples = SampleGroup(
            prompt=Prompt(index=index, token_ids=torch.arange(3), reference_answer=""),
            completion_ids=zeros.long(),
            loss_mask=mask,
            rollout_logprobs=zeros,
            policy_version=0,
        )
        groups.append(
            ScoredGroup(
                samples=samples,
                rewards=10 * torch.randn(group_size, generator=generator),
                completions=("",) * group_size,
                parts=torch.randn(group_size, 2, generator=generator),
                part_weights=torch.tensor([0.3, 0.7]),
            )
        )
    alone = [maker.make([group])[0].advantages for group in groups]
    for size in (2, 7, 40):
        together = [learning_group for i in range(0, 40, size) for learning_group in maker.make(groups[i : i + size])]
        for one, group in zip(alone, together, strict=True):
            assert_bitwise_equal(group.advantages, one)


def test_an_advantage_of_ones_own_sees_one_group_at_a_time(monkeypatch):
    shapes = []
    monkeypatch.setattr(
        "rlinf_algos.advantages.own", lambda rewards: shapes.append(rewards.shape) or rewards, raising=False
    )
    maker = AdvantageMaker(preset("grpo", advantage="rlinf_algos.advantages:own"), max_completion_tokens=NUM_TOKENS)
    groups = maker.make(scored_groups()[:3])
    assert shapes == [(1, GROUP_SIZE)] * 3
    assert [group.advantages.tolist() for group in groups] == [group.rewards.tolist() for group in scored_groups()[:3]]
