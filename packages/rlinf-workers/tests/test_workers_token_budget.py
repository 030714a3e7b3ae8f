"""Micro-batches by a budget of tokens: every completion once, none too large, and what is learned stays the same."""

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_algos import preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.balance import balanced
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.packed import PackedBatch
from rlinf_workers.roles.language import reference
from rlinf_workers.roles.language.actor import Actor, ActorSettings
from rlinf_workers.roles.language.micro_batches import bins_within, filled_up, num_tokens_of, split
from rlinf_workers.roles.language.reference import Reference
from rlinf_workers.roles.records.language import Prompt, SampleGroup, ScoredGroup
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings
from rlinf_workers.worker import StepContext, Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

NUM_TOKENS, LIMIT = 6, 24
ROUNDING = rounding_bound(additions_of_transformer(num_layers=2, width=32, inner_width=64, num_tokens=10))
"""Of the tiny model's log-probabilities, in float32."""
ALGORITHMS = {
    "grpo": {},
    "grpo gathered": {},
    "with a KL": {"kl_coef": 0.1},
    "updates": {"num_minibatches": 2, "num_epochs": 2},
    "dapo": {"dynamic_sampling": True, "oversampling": 1.5},
    "ppo": {},
    "chosen tokens": {
        "policy_loss": "kl_cov",
        "options": {"cov_fraction": 0.2},
        "num_epochs": 2,
        "top_entropy_fraction": 0.5,
    },
    "otb": {"advantage": "otb"},
}


def sample_group(index, prompt_length, lengths):
    generator = torch.Generator().manual_seed(index)
    mask = (torch.arange(NUM_TOKENS) < torch.tensor(lengths)[:, None]).float()
    prompt_ids = torch.randint(2, 13, (prompt_length,), generator=generator)
    return SampleGroup(
        prompt=Prompt(index=index, token_ids=prompt_ids, reference_answer=""),
        completion_ids=torch.randint(2, 13, mask.shape, generator=generator),
        loss_mask=mask,
        rollout_logprobs=-torch.rand(mask.shape, generator=generator) * mask,
        ref_logprobs=-torch.rand(mask.shape, generator=generator) * mask,
        policy_version=0,
    )


def scored_groups(num_groups=9, group_size=4):
    generator = torch.Generator().manual_seed(3)
    groups = []
    for index in range(num_groups):
        lengths = torch.randint(1, NUM_TOKENS + 1, (group_size,), generator=generator).tolist()
        samples = sample_group(index, 1 + index % 4, lengths)
        rewards = torch.zeros(group_size)
        rewards[: index % 4] = 1.0  # every fourth group has no signal
        groups.append(ScoredGroup(samples=samples, rewards=rewards, completions=("",) * group_size))
    return groups


def settings_of(model, name, **changes):
    algorithm = preset("ppo" if name == "ppo" else "grpo", **ALGORITHMS[name])
    settings = ActorSettings(
        model=model,
        algorithm=algorithm,
        optimizer=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3),
        critic=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3),
        backend=BackendSettings(num_shards=2),
        micro_batch_groups=2,
        max_tokens_per_micro_batch=LIMIT,
        balance_shards=name == "grpo gathered",
        num_prompts=6,
        max_completion_tokens=NUM_TOKENS,
        temperature=1.0,
    )
    return dataclasses.replace(settings, **changes)


sizes_st = st.lists(st.integers(0, 40), min_size=1, max_size=30)
group_st = st.tuples(st.integers(1, 9), st.lists(st.integers(0, NUM_TOKENS), min_size=1, max_size=8))


@given(group_st, st.integers(4, 40))
def test_a_group_is_split_into_parts_within_the_limit(drawn, limit):
    group = sample_group(0, *drawn)
    subsets = [group.subset(rows) for rows in split(group, limit)]
    assert torch.equal(torch.cat([subset.completion_ids for subset in subsets]), group.completion_ids)
    assert all(num_tokens_of(subset) <= limit or len(subset.loss_mask) == 1 for subset in subsets)
    for one, other in pairwise(subsets):  # none could have taken the next completion too
        assert num_tokens_of(one) + num_tokens_of(other.subset(slice(0, 1))) - len(group.prompt.token_ids) > limit


@given(sizes_st, st.integers(1, 6))
def test_no_bin_is_fuller_than_another_by_more_than_its_smallest_item(sizes, num_bins):
    bins = balanced(sizes, num_bins)
    filled = [[size for size, number in zip(sizes, bins, strict=True) if number == n] for n in range(num_bins)]
    assert sum(map(len, filled)) == len(sizes)
    for items in filled:
        assert sum(items) - min(items, default=0) <= min(map(sum, filled))


@given(sizes_st, st.integers(1, 50))
def test_bins_hold_every_item_once_and_keep_to_the_limit(sizes, limit):
    for bins in (bins_within(sizes, limit), list(filled_up(range(len(sizes)), sizes.__getitem__, limit))):
        assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
        assert all(sum(sizes[item] for item in items) <= limit or len(items) == 1 for items in bins)


def micro_batches_of(make_worker, reader, settings, groups):
    """Those of one training step, each update a list."""
    actor = make_worker(Actor, settings, num_items=len(groups))
    actor.begin_step()
    learning = actor.learning_groups(groups)
    return [list(actor.micro_batches(minibatch)) for minibatch in actor.minibatches(learning)], actor


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_completion_is_in_one_micro_batch_of_an_epoch_and_the_budget_holds(make_worker, reader, model, name):
    groups = scored_groups()
    updates, _ = micro_batches_of(make_worker, reader, settings_of(model, name), groups)
    counts = Counter()
    for batch in (batch for update in updates for batch in update):
        for tokens in (batch.for_policy, batch.for_critic):
            if tokens is not None:
                assert isinstance(tokens.sequences, PackedBatch)
                assert len(tokens.sequences.token_ids) <= LIMIT
        if batch.for_policy is not None:
            mask = batch.for_policy.sequences.loss_mask
            ids = batch.for_policy.sequences.completion_ids
            counts.update(tuple(row[inside != 0].tolist()) for row, inside in zip(ids, mask, strict=True))
    algorithm = settings_of(model, name).algorithm
    learned = [g for g in groups if algorithm.has_critic or algorithm.kl_coef or len(set(g.rewards.tolist())) > 1]
    expected = Counter(
        tuple(row[inside != 0].tolist())
        for group in learned[: 6 if algorithm.dynamic_sampling else None]
        for row, inside in zip(group.samples.completion_ids, group.samples.loss_mask, strict=True)
    )
    assert counts == Counter({key: count * algorithm.num_epochs for key, count in expected.items()})


def trained(make_worker, reader, settings, groups, chunk=2):
    """Weights after two steps, and what was recorded."""
    actor = make_worker(Actor, settings, num_items=len(groups))
    for _ in range(2):
        actor.train(reader(groups[i : i + chunk] for i in range(0, len(groups), chunk)))
    return torch.cat([weight.detach().flatten() for weight in actor.weights().values()])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_budget_changes_what_is_learned_by_rounding_alone(make_worker, reader, model, name):
    groups = scored_groups()
    unset = settings_of(model, name, max_tokens_per_micro_batch=None, balance_shards=False)
    expected = trained(make_worker, reader, unset, groups)
    for limit in (12, LIMIT, 1000):
        weights = trained(make_worker, reader, settings_of(model, name, max_tokens_per_micro_batch=limit), groups)
        torch.testing.assert_close(weights, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_without_any_signal_whitens_rounding(make_worker, reader, model, dtype):
    """Nothing is rewarded and the policy is its reference, so all that is left of a KL in the reward is how the
    reference's log-probabilities were rounded. Whitening makes that as large as any advantage, in float32; a kernel
    that adds in another order rounds otherwise. In float64 nothing comes of it. The rounding is drawn here: kernels
    differ between processors, and two of them may round alike."""
    model = dataclasses.replace(model, dtype=dtype)
    groups = [dataclasses.replace(group, rewards=torch.zeros(4)) for group in scored_groups()]
    algorithm = preset("ppo", kl_coef=0.1, kl_in="reward", kl="k1")
    rounding = torch.finfo(getattr(torch, dtype)).eps

    def rounded(seed):
        """Reference log-probabilities that differ from the rollout's by at most one unit in the last place of 1.0."""
        generator = torch.Generator().manual_seed(seed)
        for group in groups:
            logprobs = group.samples.rollout_logprobs.to(getattr(torch, dtype))
            errors = torch.randint(-1, 2, logprobs.shape, generator=generator) * rounding
            samples = dataclasses.replace(group.samples, rollout_logprobs=logprobs, ref_logprobs=logprobs + errors)
            yield dataclasses.replace(group, samples=samples)

    def advantages(scored, limit):
        settings = settings_of(model, "ppo", algorithm=algorithm, max_tokens_per_micro_batch=limit)
        updates, _ = micro_batches_of(make_worker, reader, settings, list(scored))
        by_completion = {}
        for tokens in (batch.for_policy for update in updates for batch in update):
            for row, ids in enumerate(tokens.sequences.completion_ids):
                inside = tokens.sequences.loss_mask[row] != 0
                by_completion[tuple(ids[inside].tolist())] = tokens.advantages[row][inside]
        return torch.cat([by_completion[key] for key in sorted(by_completion)])

    expected, other = advantages(rounded(1), None), advantages(rounded(2), LIMIT)
    largest, difference = float(expected.abs().max()), float((other - expected).abs().max())
    packed = advantages(rounded(1), LIMIT)  # sums of NUM_TOKENS terms, twice, in another order
    torch.testing.assert_close(packed, expected, rtol=0, atol=2 * NUM_TOKENS * rounding * largest)
    assert (largest > 0.5 and difference > 0.5) if dtype == "float32" else largest + difference < 1e-6


@pytest.mark.parametrize("name", ["grpo", "grpo gathered", "ppo"])
def test_chunks_change_no_bit(make_worker, reader, model, name):
    weights = [trained(make_worker, reader, settings_of(model, name), scored_groups(), chunk) for chunk in (1, 3, 9)]
    assert_bitwise_equal(weights[0], weights[1])
    assert_bitwise_equal(weights[0], weights[2])


def test_micro_batches_come_while_groups_arrive(make_worker, model, monkeypatch):
    groups, read, learned = scored_groups(), [], []

    def coming():
        for group in groups:
            read.append(group.samples.index)
            yield [group]

    actor = make_worker(Actor, settings_of(model, "grpo"), num_items=len(groups))
    learn = actor.learn
    monkeypatch.setattr(actor, "learn", lambda batch: (learned.append(len(read)), learn(batch)))
    actor.train(coming())
    assert learned[0] < len(groups)


class Learner(Worker):
    """A rank that gets the groups whose index is its own."""

    def learn(self, settings: ActorSettings) -> tuple[dict[int, int], dict[str, torch.Tensor]]:
        """Two steps; group -> shard of the last, and this rank's part of the weights."""
        actor = Actor.__new__(Actor)  # a worker in this one's place
        actor._host, actor.identity = self._host, self.identity
        actor.__init__(settings)
        groups = [group for group in scored_groups() if group.samples.index % self.num_ranks == self.rank]
        self._host.step = StepContext(step=0, phase="train", seed=0, num_items=len(scored_groups()))
        for _ in range(2):
            actor.train([groups])  # pyright: ignore
        return dict(actor._batches.shared_out), {name: part.detach() for name, part in actor.weights().items()}


CASES = [
    ("grpo", "replicated"),
    ("ppo", "replicated"),
    ("chosen tokens", "replicated"),
    ("grpo", "fsdp2"),
    ("grpo gathered", "fsdp2"),
    ("ppo", "fsdp2"),
    ("chosen tokens", "fsdp2"),
    ("otb", "fsdp2"),
]


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path, make_worker, reader, model):
    """Replicated ones to the bit; groups that are another's by their tokens are sent there."""
    with launched(LocalLauncher) as launcher:
        ranks = start(launcher, tmp_path, Learner, num_ranks=2)
        for name, backend in CASES:
            settings = settings_of(model, name, backend=BackendSettings(name=backend, num_shards=2))
            (shards, first), (others, second) = ranks.call("learn", settings)
            assert shards == others
            assert any(index % 2 != shard for index, shard in shards.items()) == (name != "grpo")

            one = make_worker(Actor, settings_of(model, name), num_items=len(scored_groups()))
            for _ in range(2):
                one.train(reader([scored_groups()]))
            for key, weight in one.weights().items():
                if backend == "replicated":
                    assert_bitwise_equal(first[key], weight.detach())
                else:
                    whole = torch.cat([first[key], second[key]])
                    torch.testing.assert_close(whole, weight.detach(), rtol=0, atol=1e-5)


def test_the_reference_says_the_same_within_a_budget(make_worker, reader, writer, model):
    logprobs = []
    for limit in (None, 12, 1000):
        worker, out = make_worker(Reference, model, 1.0, BackendSettings(), limit), type(writer)()
        groups = [group.samples for group in scored_groups()]
        worker.logprobs(reader([groups]), out)
        logprobs.append([item.ref_logprobs for item in out.items])
    for other in logprobs[1:]:
        torch.testing.assert_close(other, logprobs[0], rtol=0, atol=ROUNDING)


def passes_of_reference(make_worker, reader, writer, model, groups):
    """The reference's log-probabilities of a chunk, its passes, and the calls of its layers."""
    worker, out = make_worker(Reference, model, 1.0, BackendSettings(), 1000), type(writer)()
    calls, network = Counter(), worker._backend._model
    for name, module in (("passes", network), ("layers", network.model.layers[0]), ("layers", network.model.layers[1])):
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    worker.logprobs(reader([groups]), out)
    return [item.ref_logprobs for item in out.items], calls


def test_on_a_gpu_the_reference_computes_a_chunk_in_one_pass(make_worker, reader, writer, model, monkeypatch):
    """And on a CPU a group at a time. Groups of two policies are computed with those of the first."""
    groups = [group.samples for group in scored_groups()]
    groups[3] = dataclasses.replace(groups[3], of_policies={"actor_b": groups[4]})
    expected, calls = passes_of_reference(make_worker, reader, writer, model, groups)
    assert calls == {"passes": 10, "layers": 20}
    monkeypatch.setattr(reference, "shares_passes", lambda device: True)
    logprobs, calls = passes_of_reference(make_worker, reader, writer, model, groups)
    assert calls == {"passes": 1, "layers": 2}
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["grpo", "updates", "ppo"])
def test_a_step_has_as_few_passes_as_the_budget_allows(make_worker, reader, model, name):
    """With room for all groups of a shard, a pass for each shard and update. ppo also has one for values and one for
    log-probabilities before the first update, and in each update one of the critic."""
    settings = settings_of(model, name, max_tokens_per_micro_batch=100_000)
    actor, calls = make_worker(Actor, settings, num_items=9), Counter()
    for backend in actor._backends.values():
        backend._model.model.layers[0].register_forward_hook(lambda *_: calls.update(["layer"]))
    actor.train(reader([scored_groups()]))
    updates = settings.algorithm.num_updates
    before = {"grpo": 0, "updates": 1, "ppo": 2}[name]
    of_update = 2 if name == "ppo" else 1
    assert calls["layer"] == 2 * (before + of_update * updates)


def of_own_width(group):
    """As an engine returns a group: no wider than its longest completion."""
    samples = group.samples
    width = int(samples.row_lengths.max())
    names = ("completion_ids", "loss_mask", "rollout_logprobs", "ref_logprobs")
    cut = {name: getattr(samples, name)[:, :width] for name in names}
    return dataclasses.replace(group, samples=dataclasses.replace(samples, **cut))


@pytest.mark.parametrize(("name", "limit"), [("grpo", None), ("with a KL", None), ("ppo", None), ("ppo", LIMIT)])
def test_groups_may_have_widths_of_their_own(make_worker, reader, model, name, limit):
    """SGLang and `refill` return groups that are no wider than their longest completion."""
    settings = settings_of(model, name, max_tokens_per_micro_batch=limit, balance_shards=False)
    groups = scored_groups()
    own = [of_own_width(group) for group in groups]
    assert len({group.samples.loss_mask.shape[1] for group in own}) > 1
    expected = trained(make_worker, reader, settings, groups, chunk=3)
    assert_bitwise_equal(trained(make_worker, reader, settings, own, chunk=3), expected)
