"""Advantages of episodes with several turns, against sums over dictionaries in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from workers_trees import trees, turn, written

from rlinf_algos import preset, register_advantage
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.roles.language.actor_loss import ActorLoss
from rlinf_workers.roles.language.advantages import AdvantageMaker, signals
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.micro_batches import MicroBatches
from rlinf_workers.roles.records.language import Prompt, ScoredGroup
from rlinf_workers.trainers.base import ModelOutputs

LIMIT = 40


def task():
    return written("user", [1, 4], -1)


def straight(reward, num_turns=1, *, states=None, turn_rewards=None, **options):
    """Turns of two tokens, with a tool's three between them."""
    nodes = [task()]
    for number in range(num_turns):
        more = {"state": states[number]} if states else {}
        if turn_rewards:
            more["reward"] = turn_rewards[number]
        nodes.append(turn([5 + number, 2], len(nodes) - 1, **more))
        nodes.append(written("tool", [7, 8, 9], len(nodes) - 1))
    return AgentTrajectory(nodes=nodes, reward=reward, **options)


def branched(reward):
    """Two turns from the same place; rows of 2 + 3 + 3 and of 4 tokens of the policy."""
    nodes = [task(), turn([5, 2], 0), written("tool", [7], 1), turn([8, 3, 2], 2), turn([9, 3, 3, 2], 2)]
    return AgentTrajectory(nodes=nodes, reward=reward)


def scored(*trajectories, index=0):
    prompt = Prompt(index=index, token_ids=torch.tensor([1, 4]), reference_answer="")
    samples = group_of(prompt, trajectories, policy_version=0)
    return ScoredGroup(samples=samples, rewards=samples.rewards, completions=("",) * len(trajectories))


def learned(group, name="grpo", values=None, **changes):
    values = {} if values is None else {group.samples.index: values}
    return AdvantageMaker(preset(name, **changes), max_completion_tokens=LIMIT).make([group], values)[0]


def grpo(values):
    values = np.asarray(values, dtype=np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


def close(actual, expected):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)


LOST = straight(1.0, 2, cause="harness_lost")


def test_rows_have_the_advantage_of_their_episode_and_discarded_ones_none():
    group = learned(scored(branched(1.0), LOST, straight(0.0, 2), straight(0.25)))
    first, third, fourth = grpo([1.0, 0.0, 0.25])
    close(group.advantages, [first, first, 0.0, third, fourth])


def test_groups_with_discarded_episodes_do_not_disturb_others():
    whole, part = (
        scored(straight(1.0), straight(0.0), straight(0.0)),
        scored(LOST, straight(0.5), straight(0.0), index=1),
    )
    maker = AdvantageMaker(preset("grpo"), max_completion_tokens=LIMIT)
    both, alone = maker.make([whole, part]), [maker.make([one])[0] for one in (whole, part)]
    for one, other in zip(both, alone, strict=True):
        assert_bitwise_equal(one.advantages, other.advantages)


@pytest.mark.parametrize("name", ["grpo", "ppo", "gigpo", "otb", "rloo"])
def test_a_group_of_discarded_episodes_teaches_nothing(name):
    group = scored(LOST, straight(1.0, cause="service"))
    maker = AdvantageMaker(preset(name), max_completion_tokens=LIMIT)
    zeros = {0: torch.zeros(group.samples.loss_mask.shape)}
    assert not maker.make([group], zeros, zeros)[0].advantages.any()


def test_a_signal_is_between_episodes_that_count():
    has_signal = signals(
        [
            scored(straight(1.0), LOST, straight(1.0)),
            scored(straight(1.0), LOST, straight(0.0)),
            scored(LOST, LOST, LOST),
            scored(LOST, straight(1.0), LOST),
        ]
    )
    assert has_signal == [False, True, False, False]
    assert signals([scored(LOST), scored(LOST)]) == [False, False]


def test_turns_have_a_signal_where_their_rewards_or_numbers_differ():
    equal = scored(straight(1.0, 2), straight(1.0, 2))
    numbers = scored(straight(1.0, 2), straight(1.0, 3))
    rewards = scored(straight(0.0, 2, turn_rewards=[1.0, 0.0]), straight(0.0, 2, turn_rewards=[0.0, 1.0]))
    assert signals([equal, numbers, rewards], by_turns=True) == [False, True, True]
    assert signals([equal, numbers, rewards]) == [False, False, False]


def test_lengths_count_what_the_policy_wrote_in_all_rows():
    group = learned(scored(branched(1.0), straight(0.0, 2)), advantage="opo", normalize_std=None)
    baseline = 9 / (9 + 4)
    close(group.advantages, [1 - baseline, 1 - baseline, -baseline])


def test_the_length_penalty_counts_what_the_policy_wrote():
    group = scored(branched(1.0), straight(1.0, 2))
    maker = AdvantageMaker(
        preset("grpo", normalize_std=False, overlong_buffer_tokens=10, overlong_penalty=1.0), max_completion_tokens=16
    )
    # 9 tokens are 3 beyond 16 - 10, so 0.3 of the penalty; 4 are below.
    close(maker.make([group])[0].advantages, [-0.15, -0.15, 0.15])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_returns_skip_what_others_wrote(gamma):
    group = scored(straight(1.0, 2, turn_rewards=[0.25, 0.5]), LOST)
    advantages = learned(group, "reinforce_plus_plus", gamma=gamma, whiten_advantages=False).advantages
    rewards = [0.0, 0.25, 0.0, 1.5]
    to_go = [sum(gamma ** (k - t) * rewards[k] for k in range(t, 4)) for t in range(4)]
    close(advantages[0], [*to_go[:2], 0, 0, 0, *to_go[2:], 0, 0, 0])
    assert not advantages[1].any()


def test_gae_skips_what_others_wrote():
    group = scored(branched(1.0), straight(0.0, 2))
    mask = group.samples.loss_mask
    values = torch.rand(mask.shape) * mask + (1 - mask) * 1e6
    row = learned(group, "ppo", values, gamma=0.9, gae_lambda=0.8)
    for number, reward in enumerate([1.0, 1.0, 0.0]):
        inside = mask[number] != 0
        v = [*values[number][inside].double().tolist(), 0.0]
        advantage, expected = 0.0, []
        for t in reversed(range(len(v) - 1)):
            delta = reward * (t == len(v) - 2) + 0.9 * v[t + 1] - v[t]
            advantage = delta + 0.9 * 0.8 * advantage
            expected.insert(0, advantage)
        close(row.advantages[number][inside], expected)
        close(row.returns[number][inside], np.array(expected) + v[:-1])
        assert not row.advantages[number][~inside].any()
        assert not row.returns[number][~inside].any()


def test_a_custom_function_on_tokens_gets_the_tokens_of_the_policy():
    seen = []

    @register_advantage("test_of_tokens")
    def of_tokens(rewards, loss_mask):
        seen.append((rewards.tolist(), loss_mask.tolist()))
        return rewards + 1

    advantages = learned(
        scored(straight(0.5, 2), straight(0.0)), advantage="test_of_tokens", normalize_std=None
    ).advantages
    assert seen == [([[0, 0, 0, 0.5], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])]
    assert advantages.tolist() == [[1, 1, 0, 0, 0, 1, 1.5, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_a_kl_in_the_reward_is_that_of_all_rows_of_an_episode():
    group = scored(branched(1.0), straight(0.0, 2), LOST)
    ref = torch.rand(group.samples.loss_mask.shape) * group.samples.loss_mask
    samples = dataclasses.replace(group.samples, ref_logprobs=ref)
    group = dataclasses.replace(group, samples=samples)
    kl = ((samples.rollout_logprobs - ref) * samples.loss_mask).double().sum(1).numpy()
    scores = [1.0 - 0.5 * (kl[0] + kl[1]), -0.5 * kl[2]]
    advantages = learned(group, "rloo", kl_coef=0.5).advantages
    close(advantages, [scores[0] - scores[1]] * 2 + [scores[1] - scores[0], 0.0])


def test_turns_of_a_discarded_episode_are_compared_with_nothing():
    others = [straight(1.0, 2), straight(0.0, 3)]
    whole = learned(scored(LOST, *others), "gigpo").advantages
    assert not whole[0].any()
    assert_bitwise_equal(whole[1:], learned(scored(*others), "gigpo").advantages)


def test_a_kl_in_the_reward_is_that_of_a_turn_and_later_ones():
    group = scored(branched(1.0), straight(0.0, 2))
    ref = torch.rand(group.samples.loss_mask.shape) * group.samples.loss_mask
    samples = dataclasses.replace(group.samples, ref_logprobs=ref)
    group = dataclasses.replace(group, samples=samples)
    kl = ((samples.rollout_logprobs - ref) * samples.loss_mask).double()
    by_turn = [
        [float(kl[:2][samples.turns[:2] == number].sum()) for number in range(3)],
        [float(kl[2][samples.turns[2] == number].sum()) for number in range(2)],
    ]
    first, second = ([-0.5 * value for value in values] for values in by_turn)
    first[-1] += 1.0
    returns = [sum(first[k:]) for k in range(3)], [sum(second[k:]) for k in range(2)]
    mean = np.mean([*returns[0], *returns[1]])
    changes = {"kl_coef": 0.5, "kl_in": "reward", "kl": "k1", "gamma": 1.0, "normalize_std": False}
    advantages = learned(group, advantage="turn_returns", **changes).advantages
    for rows, of_episode in ((slice(0, 2), returns[0]), (slice(2, 3), returns[1])):
        for number, value in enumerate(of_episode):
            own = advantages[rows][samples.turns[rows] == number]
            np.testing.assert_allclose(own.numpy(), value - mean, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_advantages_of_turns(data, is_gigpo, normalize_std):
    drawn = []
    for number in range(data.draw(st.integers(1, 4))):
        tree = data.draw(trees(max_nodes=6))
        nodes = [with_reward_and_state(node, data) if node.author == "policy" else node for node in tree.nodes]
        reward, cause = (
            data.draw(st.sampled_from([0.0, 0.5, 1.0])),
            data.draw(st.sampled_from(["", "", "service", "time"])),
        )
        drawn.append(AgentTrajectory(nodes=nodes, reward=reward + number, cause=cause))
    group = scored(*drawn)
    name, gamma = "gigpo" if is_gigpo else "grpo", 0.5
    more = {"options": {"step_weight": 2.0}} if is_gigpo else {"advantage": "turn_returns"}
    row = learned(group, name, gamma=gamma, normalize_std=normalize_std, **more)

    returns, totals, states = {}, {}, {}
    for episode, one in enumerate(drawn):
        if one.is_discarded:
            continue
        turns = [index for index, node in enumerate(one.nodes) if node.author == "policy"]
        rewards = [one.nodes[index].reward or 0.0 for index in turns] or [0.0]
        rewards[-1] += one.reward
        totals[episode] = sum(rewards)
        for t in range(len(rewards)):
            returns[episode, t] = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
            node = one.nodes[turns[t]] if turns else None
            before = () if node is None else tuple(one.token_ids(node.parent))
            states[episode, t] = ("alone", episode) if node is None else node.state or before

    def relative(value, others):
        if max(others) - min(others) < 1e-12:
            return 0.0
        std = np.std(others, ddof=1) + 1e-4 if normalize_std else 1.0
        return (value - np.mean(others)) / std

    for episode, one in enumerate(drawn):
        mine = group.samples.trajectories == episode
        if one.is_discarded:
            assert not row.advantages[mine].any()
            continue
        for t in range(sum(node.author == "policy" for node in one.nodes)):
            if is_gigpo:
                same = [returns[key] for key in returns if states[key] == states[episode, t]]
                expected = relative(totals[episode], list(totals.values()))
                expected += 2.0 * relative(returns[episode, t], same)
            else:
                expected = relative(returns[episode, t], list(returns.values()))
            actual = row.advantages[mine][group.samples.turns[mine] == t]
            np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-4)
        assert not row.advantages[mine][group.samples.turns[mine] < 0].any()


def with_reward_and_state(node, data):
    """The turn, perhaps with a reward or the name of a state."""
    reward, state = data.draw(st.sampled_from([None, 0.0, 1.0])), data.draw(st.sampled_from(["", "a", "b"]))
    return turn(node.token_ids, node.parent, reward=reward, state=state)


def test_a_completion_is_one_turn():
    """All begin in one state, so both parts of GiGPO are GRPO."""
    group = scored(straight(1.0), straight(0.0), straight(0.0))
    plain = dataclasses.replace(
        group.samples,
        lengths=None,
        trajectories=None,
        shared=None,
        shared_with=None,
        turns=None,
        turn_rewards=None,
        turn_states=None,
        segments=(),
        causes=(),
    )
    group = dataclasses.replace(group, samples=plain)
    close(learned(group, "gigpo").advantages, 2.0 * grpo([1.0, 0.0, 0.0]))


AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length_mean",
)


@pytest.mark.parametrize("max_tokens", [None, 1000, 8], ids=["padded", "packed", "one row each"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_episode_is_one_sequence_whatever_its_branches(aggregation, max_tokens):
    algorithm = preset("grpo", aggregation=aggregation)
    groups = [
        scored(branched(1.0), straight(0.0, 2), LOST),
        scored(straight(1.0), branched(0.5), straight(0.0), index=1),
    ]
    learning = AdvantageMaker(algorithm, max_completion_tokens=LIMIT).make(groups)
    batches = MicroBatches(
        algorithm,
        torch.device("cpu"),
        [0],
        num_shards=1,
        num_groups=2,
        max_tokens=max_tokens,
        max_completion_tokens=LIMIT,
        has_critic=False,
        is_gathered=True,
    )
    loss, total, divisor = ActorLoss(algorithm), 0.0, 0.0
    for batch in batches.of(learning):
        divisor += batch.divisor
        if batch.for_policy is not None:
            logprobs = batch.for_policy.rollout_logprobs * batch.for_policy.sequences.loss_mask
            total += float(loss.of(batch, ModelOutputs(logprobs=logprobs))[0])

    terms = [-float(a) for one in learning for a in per_episode(one)]  # the ratio is 1, so a term is -A
    lengths = [n for one in learning for n in one.samples.by_episode(one.samples.loss_mask.sum(-1)).tolist() if n]
    sums = {
        "token_mean": (sum(a * n for a, n in zip(terms, lengths, strict=True)), sum(lengths)),
        "sequence_mean_token_mean": (sum(terms), len(terms)),
    }
    sums["token_sum"] = (sums["token_mean"][0], 0)
    sums["sequence_mean_token_sum"] = (sums["token_mean"][0], len(terms))
    sums["constant_length_mean"] = (sums["token_mean"][0], len(terms) * LIMIT)
    np.testing.assert_allclose((total, divisor), sums[aggregation], rtol=1e-5, atol=1e-5)


def per_episode(group):
    """The advantage of each episode that counts."""
    samples = group.samples
    rows = [int((samples.trajectories == episode).nonzero()[0]) for episode in range(samples.num_episodes)]
    return [group.advantages[row] for row, lost in zip(rows, samples.is_discarded, strict=True) if not lost]
