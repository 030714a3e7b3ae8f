"""Actor: its gradient is that of the formula, whatever the micro-batches, shards and chunks; checkpoints restore
everything."""

import dataclasses
import math

import pytest
import torch

from rlinf_algos import (
    POLICY_LOSSES,
    PolicyLoss,
    optimal_token_advantages,
    policy_gradient_loss,
    preset,
    register_policy_loss,
    rewards_at_last_token,
)
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.metrics import merge
from rlinf_workers.roles.language.actor import Actor, ActorSettings
from rlinf_workers.roles.records.language import ExampleBatch, Prompt, SampleGroup, ScoredGroup
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 8, 4, 5


def actor_settings(model, name="grpo", **changes):
    """Settings for the algorithm of that name; `changes` are fields of the settings themselves or of the algorithm."""
    fields = {
        "model": model,
        "optimizer": OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9),
        "critic": OptimizerSettings(learning_rate=1e-2),
        "sft_warm_up": OptimizerSettings(learning_rate=1e-2),
        "backend": BackendSettings(num_shards=changes.pop("num_shards", 2)),
        "micro_batch_groups": 2,
        "num_prompts": NUM_GROUPS,
        "max_completion_tokens": NUM_TOKENS,
        "temperature": 1.0,
    }
    own = {name: value for name, value in changes.items() if name in fields}
    algorithm = preset(name, **{key: value for key, value in changes.items() if key not in fields})
    return ActorSettings(algorithm=algorithm, **(fields | own))


def scored_groups(prompt_lengths=(4,) * NUM_GROUPS):
    generator = torch.Generator().manual_seed(0)
    groups = []
    for index, length in enumerate(prompt_lengths):
        lengths = torch.randint(1, NUM_TOKENS + 1, (GROUP_SIZE,), generator=generator)
        mask = (torch.arange(NUM_TOKENS)[None] < lengths[:, None]).float()
        ids = torch.randint(2, 13, (GROUP_SIZE, NUM_TOKENS), generator=generator) * mask.long()
        samples = SampleGroup(
            prompt=Prompt(
                index=index, token_ids=torch.randint(2, 13, (length,), generator=generator), reference_answer=""
            ),
            completion_ids=ids,
            loss_mask=mask,
            rollout_logprobs=torch.zeros(GROUP_SIZE, NUM_TOKENS),
            ref_logprobs=-torch.rand(GROUP_SIZE, NUM_TOKENS, generator=generator) * mask,
            policy_version=0,
        )
        rewards = torch.zeros(GROUP_SIZE)
        rewards[: 1 + index % 3] = 1.0
        if index == 5:
            rewards[:] = 1.0
        groups.append(ScoredGroup(samples=samples, rewards=rewards, completions=("",) * GROUP_SIZE))
    return groups


def gradient_after(make_worker, reader, settings, groups, chunk=3):
    """The averaged gradient of one training step, as a flat vector."""
    actor = make_worker(Actor, settings, num_items=len(groups))
    actor.train(reader(groups[i : i + chunk] for i in range(0, len(groups), chunk)))
    return torch.cat([parameter.grad.flatten() for parameter in actor._backend._model.parameters()]), actor


def grpo_reference(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def expected_gradient(make_worker, settings, groups, advantages_of=grpo_reference, weight_of=None):
    """-sum over tokens of advantage * log-probability (+ KL, - entropy), each token with its weight, one sequence at a
    time in plain torch.

    Args:
        advantages_of: [G] float64 rewards -> [G].
        weight_of: tokens of the completion -> weight of each; by default one over all tokens of the batch.
    """
    model = make_worker(Actor, settings)._backend._model.double()
    algorithm = settings.algorithm
    tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        advantages = advantages_of(group.rewards.double())
        for g in range(GROUP_SIZE):
            length, prompt = int(group.samples.loss_mask[g].sum()), group.samples.prompt.token_ids
            completion = group.samples.completion_ids[g, :length]
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            distribution = logits.log_softmax(-1)
            logprobs = distribution[range(length), completion]
            terms = -(advantages[g] * logprobs)
            if algorithm.kl_coef:
                log_ratio = group.samples.ref_logprobs[g, :length].double() - logprobs
                terms = terms + algorithm.kl_coef * (log_ratio.exp() - 1 - log_ratio)
            entropy = -(distribution.exp() * distribution).sum(-1)
            terms = terms - algorithm.entropy_coef * entropy
            total = total + terms.sum() * (weight_of(length) if weight_of else 1 / tokens)
    total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [(4,) * NUM_GROUPS, (4, 2, 6, 3, 4, 5, 1, 2)])
def test_the_gradient_is_the_formulas(make_worker, reader, model, lengths, kl_coef):
    settings = actor_settings(model, kl_coef=kl_coef)
    groups = scored_groups(lengths)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(make_worker, settings, groups)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("num_epochs", [1, 2], ids=["streaming", "gathered"])
def test_groups_may_come_in_any_order(make_worker, reader, model, num_epochs):
    """Only sums of gradients are rounded in the order in which groups come, and not where they are gathered."""
    settings, groups = actor_settings(model, num_epochs=num_epochs), scored_groups((4, 2, 6, 3, 4, 5, 1, 2))
    expected, _ = gradient_after(make_worker, reader, settings, groups)
    gradient, _ = gradient_after(make_worker, reader, settings, [groups[i] for i in (5, 2, 7, 0, 1, 6, 4, 3)], chunk=1)
    torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-7)
    assert num_epochs == 1 or torch.equal(gradient, expected)


NUM_SEQUENCES = NUM_GROUPS * GROUP_SIZE


@pytest.mark.parametrize(
    ("aggregation", "weight_of"),
    [
        ("token_sum", lambda length: 1.0),
        ("sequence_mean_token_mean", lambda length: 1 / (NUM_SEQUENCES * length)),
        ("sequence_mean_token_sum", lambda length: 1 / NUM_SEQUENCES),
        ("constant_length_mean", lambda length: 1 / (NUM_SEQUENCES * NUM_TOKENS)),
    ],
)
def test_aggregations(make_worker, reader, model, aggregation, weight_of):
    settings = actor_settings(model, aggregation=aggregation)
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    expected = expected_gradient(make_worker, settings, scored_groups(), weight_of=weight_of)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "advantages_of"),
    [
        ("rloo", lambda r: (r * GROUP_SIZE - r.sum()) / (GROUP_SIZE - 1)),
        ("dr_grpo", lambda r: r - r.mean()),
    ],
)
def test_other_baselines(make_worker, reader, model, name, advantages_of):
    settings = actor_settings(model, name, aggregation="token_mean")
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    expected = expected_gradient(make_worker, settings, scored_groups(), advantages_of)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step(make_worker, reader, model):
    groups = scored_groups()
    by_token = torch.cat([g.rewards.double().repeat_interleave(g.samples.loss_mask.sum(-1).long()) for g in groups])
    settings = actor_settings(model, "reinforce_plus_plus", num_minibatches=1)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(make_worker, settings, groups, lambda r: (r - by_token.mean()) / by_token.std())
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def logprobs_of(actor, groups):
    return actor._batches.by_token([group.samples for group in groups], actor._logprobs)


@pytest.mark.parametrize(
    ("correction", "weight_of"),
    [
        ("truncated", lambda ratio: ratio.clamp(max=2.0)),
        ("masked", lambda ratio: ratio * (ratio <= 2.0)),
        ("icepop", lambda ratio: ratio * ((ratio >= 0.5) & (ratio <= 5.0))),
    ],
)
def test_corrections_weigh_tokens_by_actor_over_engine(make_worker, reader, model, correction, weight_of):
    """Where the engine finds every token likelier by a factor, all weights are one number."""
    for factor in (1.5, 3.0, 6.0):
        groups = scored_groups()
        probe = make_worker(Actor, actor_settings(model))
        logprobs = logprobs_of(probe, groups)
        groups = [
            dataclasses.replace(
                group,
                samples=dataclasses.replace(
                    group.samples,
                    rollout_logprobs=(logprobs[group.samples.index] - math.log(factor)) * group.samples.loss_mask,
                ),
            )
            for group in groups
        ]
        plain, _ = gradient_after(make_worker, reader, actor_settings(model), groups)
        gradient, _ = gradient_after(make_worker, reader, actor_settings(model, correction=correction), groups)
        torch.testing.assert_close(gradient, plain * weight_of(torch.tensor(factor)), rtol=1e-3, atol=1e-6)


def drifted(make_worker, model, groups, nats):
    """The groups with an engine that finds every token likelier than the actor does, by so many nats."""
    probe = make_worker(Actor, actor_settings(model))
    logprobs = logprobs_of(probe, groups)
    return [
        dataclasses.replace(
            group,
            samples=dataclasses.replace(
                group.samples, rollout_logprobs=(logprobs[group.samples.index] + nats) * group.samples.loss_mask
            ),
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    ("level", "correction", "weight_of"),
    [
        ("sequence", "truncated", lambda length: min(1.3**length, 2.0)),
        ("sequence", "masked", lambda length: 1.3**length if 1.3**length <= 2.0 else 0.0),
        ("sequence", "rejected", lambda length: float(1.3**length <= 2.0)),
        ("geometric", "truncated", lambda length: 1.3),
        ("geometric", "rejected", lambda length: 1.0),
    ],
)
def test_corrections_of_completions(make_worker, reader, model, level, correction, weight_of):
    groups = drifted(make_worker, model, scored_groups(), -math.log(1.3))
    num_tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
    settings = actor_settings(model, correction=correction, correction_level=level)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(make_worker, settings, groups, weight_of=lambda length: weight_of(length) / num_tokens)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_completions_that_were_cut_neither_train_nor_count(make_worker, reader, model):
    groups = scored_groups()
    lengths = torch.cat([group.samples.loss_mask.sum(-1) for group in groups])
    num_tokens = float(lengths[lengths < NUM_TOKENS].sum())
    assert 0 < num_tokens < lengths.sum()
    groups = [
        dataclasses.replace(
            group,
            samples=dataclasses.replace(group.samples, truncated=group.samples.loss_mask.sum(-1) == NUM_TOKENS),
        )
        for group in groups
    ]
    settings = actor_settings(model, overlong_filter=True)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(
        make_worker, settings, groups, weight_of=lambda length: (length < NUM_TOKENS) / num_tokens
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)
    unknown = actor_settings(model, "ppo", overlong_filter=True)
    with pytest.raises(ValueError, match="overlong_filter: the engine does not report which"):
        gradient_after(make_worker, reader, unknown, scored_groups())


def test_a_step_of_nothing_but_cut_completions_changes_nothing_at_first(make_worker, reader, model):
    groups = [
        dataclasses.replace(g, samples=dataclasses.replace(g.samples, truncated=torch.ones(GROUP_SIZE).bool()))
        for g in scored_groups()
    ]
    for name in ("ppo", "grpo"):
        gradient, _ = gradient_after(
            make_worker, reader, actor_settings(model, name, overlong_filter=True, kl_coef=0.1), groups
        )
        assert not gradient.any()


@pytest.mark.parametrize(("threshold", "dropped"), [(0.5, True), (1.5, False)])
def test_bad_completions_far_from_the_policy_that_sampled_are_left_out(make_worker, reader, model, threshold, dropped):
    groups = drifted(make_worker, model, scored_groups(), 1.0)
    settings = actor_settings(model, off_policy_threshold=threshold)
    gradient, actor = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(
        make_worker,
        settings,
        groups,
        lambda rewards: grpo_reference(rewards).clamp(min=0.0 if dropped else -math.inf),
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)
    metrics = merge([actor._host.metrics.drain()])
    assert (metrics["actor/off_policy_fraction"] > 0) == dropped
    assert metrics["actor/rollout_kl"] == pytest.approx(math.exp(-1.0) - 1.0 + 1.0, rel=1e-5)


def test_the_policy_loss_of_the_most_uncertain_tokens(make_worker, reader, model):
    """Over all micro-batches and shards of the step; group 5 has no advantage and makes no forward."""
    settings = actor_settings(model, top_entropy_fraction=0.3)
    groups = scored_groups()
    gradient, actor = gradient_after(make_worker, reader, settings, groups)
    network = make_worker(Actor, settings)._backend._model.double()
    terms, entropies = [], []
    for group in (group for group in groups if group.samples.index != 5):
        for g, advantage in enumerate(grpo_reference(group.rewards.double())):
            length, prompt = int(group.samples.loss_mask[g].sum()), group.samples.prompt.token_ids
            completion = group.samples.completion_ids[g, :length]
            logits = network(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            distribution = logits.log_softmax(-1)
            terms.append(-advantage * distribution[range(length), completion])
            entropies.append(-(distribution.exp() * distribution).sum(-1).detach())
    every, num_tokens = torch.cat(entropies), sum(float(group.samples.loss_mask.sum()) for group in groups)
    least = every.sort(descending=True).values[math.ceil(0.3 * len(every)) - 1]
    (torch.cat(terms)[every >= least].sum() / num_tokens).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)
    assert merge([actor._host.metrics.drain()])["actor/entropy"] == pytest.approx(float(every.mean()), rel=1e-5)


def test_a_clamp_bounds_what_the_kl_adds(make_worker, reader, model):
    """With a clamp that every token is beyond, the KL has a value and no gradient."""
    plain, _ = gradient_after(make_worker, reader, actor_settings(model), scored_groups())
    free, _ = gradient_after(make_worker, reader, actor_settings(model, kl_coef=0.1), scored_groups())
    settings = actor_settings(model, kl_coef=0.1, kl_clamp=1e-9)
    gradient, actor = gradient_after(make_worker, reader, settings, scored_groups())
    torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(free, plain, rtol=1e-3)
    assert merge([actor._host.metrics.drain()])["actor/ref_kl"] == pytest.approx(1e-9)


def test_the_weight_of_the_kl_is_adapted_to_its_target(make_worker, reader, model):
    groups = [
        dataclasses.replace(g, samples=dataclasses.replace(g.samples, rollout_logprobs=-0.1 * g.samples.loss_mask))
        for g in scored_groups()
    ]
    kl = sum(float((g.samples.rollout_logprobs - g.samples.ref_logprobs).sum()) for g in groups) / NUM_SEQUENCES
    settings = actor_settings(model, "rloo", kl_coef=0.3, kl_target=kl / 1.1, kl_horizon=100)
    _, actor = gradient_after(make_worker, reader, settings, groups)
    metrics = merge([actor._host.metrics.drain()])
    assert metrics["actor/kl_coef"] == 0.3, "of this step"
    num_tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
    assert metrics["actor/ref_kl"] == pytest.approx(kl * NUM_SEQUENCES / num_tokens, rel=1e-5)
    assert actor._advantages.kl_coef == pytest.approx(0.3 * (1 + 0.1 * NUM_SEQUENCES / 100), rel=1e-5)


@pytest.mark.parametrize("changes", [{"value_loss": "huber"}, {"value_loss": "clipped"}])
def test_value_losses_train_the_critic(make_worker, reader, model, changes):
    groups = scored_groups()
    _, actor = gradient_after(make_worker, reader, actor_settings(model, "ppo", **changes), groups)
    assert merge([actor._host.metrics.drain()])["critic/grad_norm"] > 0


def test_the_entropy_bonus(make_worker, reader, model):
    settings = actor_settings(model, entropy_coef=0.1)
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    expected = expected_gradient(make_worker, settings, scored_groups())
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_an_adapted_entropy_bonus_begins_with_the_second_step_and_only_below_its_target(make_worker, reader, model):
    """The first step knows no entropy; by then the weight has moved by one step towards the target."""
    plain, _ = gradient_after(make_worker, reader, actor_settings(model), scored_groups())
    settings = actor_settings(model, entropy_target=5.0, entropy_coef_step=0.25)
    gradient, actor = gradient_after(make_worker, reader, settings, scored_groups())
    torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-8)
    assert merge([actor._host.metrics.drain()])["actor/entropy_coef"] == 0.0
    assert actor._loss.entropy_bonus.weight == 0.25, "a vocabulary of 13 has less than 5 nats"
    actor.train(reader([scored_groups()]))
    assert merge([actor._host.metrics.drain()])["actor/entropy_coef"] == 0.25
    high = actor_settings(model, entropy_coef=0.1, entropy_target=0.01, entropy_coef_step=0.25)
    _, actor = gradient_after(make_worker, reader, high, scored_groups())
    assert (actor._loss.entropy_bonus.weight, actor._loss.entropy_bonus._coef) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rejection", "limit", "keeps"),
    [
        ("token_k1", 0.2, lambda length: False),
        ("sequence_sum_k2", 0.1, lambda length: length * math.log(1.3) ** 2 / 2 <= 0.1),
        ("sequence_mean_k3", 0.1, lambda length: True),
    ],
)
def test_a_rejection_goes_together_with_a_correction(make_worker, reader, model, rejection, limit, keeps):
    """Weights of 1.3 for the completions that a divergence leaves in."""
    groups = drifted(make_worker, model, scored_groups(), -math.log(1.3))
    num_tokens = sum(float(group.samples.loss_mask.sum()) for group in groups)
    settings = actor_settings(model, correction="truncated", rejection=rejection, rejection_limit=limit)
    gradient, actor = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(
        make_worker, settings, groups, weight_of=lambda length: 1.3 * keeps(length) / num_tokens
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)
    masks = [group.samples.loss_mask.sum(-1) for group in groups if group.samples.index != 5]
    lengths = torch.cat(masks).tolist()
    rejected = sum(length for length in lengths if not keeps(length)) / sum(lengths)
    assert merge([actor._host.metrics.drain()])["actor/rejected_fraction"] == pytest.approx(rejected, rel=1e-5)


def test_a_ratio_that_is_anchored_at_the_rollout(make_worker, reader, model):
    """Actor over engine is 1.3 or 1.5 everywhere, so the clip at 1.28 stops rewarded tokens and no others."""
    groups = drifted(make_worker, model, scored_groups(), -math.log(1.3))
    settings = actor_settings(model, proximal_policy="rollout", clip_high=0.28)
    gradient, actor = gradient_after(make_worker, reader, settings, groups)
    expected = expected_gradient(
        make_worker, settings, groups, lambda rewards: 1.3 * grpo_reference(rewards).clamp(max=0.0)
    )
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)
    assert merge([actor._host.metrics.drain()])["rollout/logprob_gap_mean"] == pytest.approx(math.log(1.3), rel=1e-4)


def test_several_steps_anchored_at_the_rollout_ask_the_actor_for_no_logprobs(make_worker, reader, model, monkeypatch):
    groups, gaps = noisy(make_worker, model, scored_groups())
    actor = make_worker(Actor, actor_settings(model, "dppo_tv", num_minibatches=2), num_items=len(groups))
    monkeypatch.setattr(actor, "_logprobs", lambda batch: pytest.fail("there is nothing to compute again"))
    actor.train(reader([groups]))
    assert actor.policy_version == 2
    first = -torch.cat([gap for index, gap in gaps.items() if index < NUM_GROUPS // 2])
    metrics = merge([actor._host.metrics.drain()])
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(float(first.abs().mean()), rel=1e-4), "before a step"


def test_corrections_of_reinforce_anchored_at_the_rollout_follow_the_policy(make_worker, reader, model):
    """In one step as without the anchor: the policy in training is the one before the update."""
    groups, _ = noisy(make_worker, model, scored_groups())
    gradient, expected = (
        gradient_after(make_worker, reader, actor_settings(model, "rloo", correction="masked", **changes), groups)[0]
        for changes in ({"proximal_policy": "rollout"}, {})
    )
    assert_bitwise_equal(gradient, expected)


def test_a_kl_with_its_bias_corrected_has_the_gradient_of_the_kl(make_worker, reader, model):
    """On-policy that of `kl * log-probability` beside k3's own, which together is d: the log-ratio."""
    groups = scored_groups()
    plain, _ = gradient_after(make_worker, reader, actor_settings(model, kl_coef=0.1), groups)
    settings = actor_settings(model, kl_coef=0.1, kl_bias_correction=True)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    logprobs = logprobs_of(make_worker(Actor, settings), groups)
    network = make_worker(Actor, settings)._backend._model.double()
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for g in range(GROUP_SIZE):
            length, prompt = int(group.samples.loss_mask[g].sum()), group.samples.prompt.token_ids
            completion = group.samples.completion_ids[g, :length]
            logits = network(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            d = (group.samples.ref_logprobs - logprobs[group.samples.index])[g, :length].double()
            total = total + 0.1 * ((d.exp() - 1 - d) * logits.log_softmax(-1)[range(length), completion]).sum()
            num_tokens += length
    (total / num_tokens).backward()
    more = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    torch.testing.assert_close((gradient - plain).double(), more, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("budget", [None, 16])
def test_the_optimal_token_baseline_reads_the_actors_distributions(make_worker, reader, model, budget):
    groups = scored_groups()
    settings = dataclasses.replace(actor_settings(model, "otb", clip_high=9.0), max_tokens_per_micro_batch=budget)
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    network = make_worker(Actor, settings)._backend._model.double()
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        masks = group.samples.loss_mask
        logprobs, norms = (torch.zeros(masks.shape, dtype=torch.float64) for _ in range(2))
        for g in range(GROUP_SIZE):
            length, prompt = int(masks[g].sum()), group.samples.prompt.token_ids
            completion = group.samples.completion_ids[g, :length]
            logits = network(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            distribution = logits.log_softmax(-1)
            logprobs[g, :length] = distribution[range(length), completion]
            p = distribution.detach().exp()
            norms[g, :length] = 1 - 2 * p[range(length), completion] + p.square().sum(-1)
            num_tokens += length
        rewards = rewards_at_last_token(group.rewards.double(), masks)
        total = total - (optimal_token_advantages(rewards, masks, norms) * logprobs).sum()
    (total / num_tokens).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


@pytest.fixture
def own_loss():
    """Registers `terms_of(policy_logprobs, advantages [B, 1])` as the policy loss "test_own"."""

    def register(terms_of):
        def loss(policy_logprobs, proximal_logprobs, advantages, loss_mask) -> PolicyLoss:
            plain = policy_gradient_loss(policy_logprobs, proximal_logprobs, advantages, loss_mask)
            return dataclasses.replace(plain, loss_terms=terms_of(policy_logprobs, advantages[:, None]))

        register_policy_loss("test_own")(loss)

    yield register
    POLICY_LOSSES._added.pop("test_own")


def test_what_a_loss_of_ones_own_says_of_padding_does_not_count(make_worker, reader, model, own_loss):
    own_loss(lambda logprobs, advantages: -advantages * logprobs)
    settings = actor_settings(model, policy_loss="test_own")
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    expected = expected_gradient(make_worker, settings, scored_groups())
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_a_loss_of_ones_own_sees_groups_without_advantage(make_worker, reader, model, own_loss):
    own_loss(lambda logprobs, advantages: -(advantages + 1.0) * logprobs)
    settings = actor_settings(model, policy_loss="test_own")
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    expected = expected_gradient(make_worker, settings, scored_groups(), lambda rewards: grpo_reference(rewards) + 1.0)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_a_loss_of_ones_own_that_is_reduced_already_is_refused(make_worker, reader, model, own_loss):
    own_loss(lambda logprobs, advantages: -(advantages * logprobs).mean())
    with pytest.raises(ValueError, match=r"'test_own' returned loss_terms of the shape \[\] for tokens \[8, 5\]"):
        gradient_after(make_worker, reader, actor_settings(model, policy_loss="test_own"), scored_groups())


@pytest.mark.parametrize("oversampling", [1.0, 1.5])
def test_dynamic_sampling_leaves_groups_without_a_signal_out_of_the_totals(make_worker, reader, model, oversampling):
    """Group 5 has none. With oversampling only the first 4 groups that have one train."""
    limit = NUM_GROUPS if oversampling == 1.0 else 4
    settings = actor_settings(model, dynamic_sampling=True, oversampling=oversampling, num_prompts=limit)
    gradient, _ = gradient_after(make_worker, reader, settings, scored_groups())
    chosen_groups = [group for group in scored_groups() if group.samples.index != 5][:limit]
    expected = expected_gradient(make_worker, settings, chosen_groups)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_a_step_without_any_signal_changes_nothing_at_first(make_worker, reader, model):
    groups = [dataclasses.replace(group, rewards=torch.ones(GROUP_SIZE)) for group in scored_groups()]
    gradient, actor = gradient_after(make_worker, reader, actor_settings(model, "dapo"), groups)
    assert not gradient.any()
    assert actor.policy_version == 2


def test_ppo_moves_the_critic_towards_the_returns(make_worker, reader, model):
    groups = scored_groups()
    actor = make_worker(Actor, actor_settings(model, "ppo", num_epochs=10, value_clip=None), num_items=len(groups))
    losses = []
    for _ in range(3):
        actor.train(reader([groups]))
        losses.append(merge([actor._host.metrics.drain()])["critic/loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert actor.policy_version == 60


def test_ppo_starts_from_values_of_zero_which_make_it_reinforce_plus_plus(make_worker, reader, model):
    groups = scored_groups()
    gradient, _ = gradient_after(make_worker, reader, actor_settings(model, "ppo", num_minibatches=1), groups)
    plain = actor_settings(model, "reinforce_plus_plus", num_minibatches=1)
    expected, _ = gradient_after(make_worker, reader, plain, groups)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "cispo", "dapo", "reinforce_plus_plus_baseline"])
def test_shards_change_only_the_rounding_of_any_algorithm(make_worker, reader, model, name):
    gradients = [
        gradient_after(
            make_worker,
            reader,
            actor_settings(model, name, num_minibatches=1, num_shards=num_shards),
            scored_groups(),
        )[0]
        for num_shards in (1, 2, 4)
    ]
    assert gradients[0].any()
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_chunks_do_not_change_a_bit(make_worker, reader, model, chunk):
    gradient, _ = gradient_after(make_worker, reader, actor_settings(model), scored_groups(), chunk=chunk)
    expected, _ = gradient_after(make_worker, reader, actor_settings(model), scored_groups(), chunk=3)
    assert_bitwise_equal(gradient, expected)


def test_micro_batches_and_shards_change_only_the_rounding(make_worker, reader, model):
    expected, _ = gradient_after(make_worker, reader, actor_settings(model), scored_groups())
    for changes in ({"micro_batch_groups": 8, "num_shards": 1}, {"micro_batch_groups": 1, "num_shards": 4}):
        gradient, _ = gradient_after(make_worker, reader, actor_settings(model, "grpo", **changes), scored_groups())
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


CHOICES = [
    {"top_entropy_fraction": 0.3},
    {"policy_loss": "kl_cov", "options": {"cov_fraction": 0.2}, "num_minibatches": 2},
    {"policy_loss": "clip_cov", "options": {"cov_fraction": 0.2, "cov_low": -1.0, "cov_high": 1.0}},
]


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_tokens_are_chosen_over_the_step_whatever_its_micro_batches(make_worker, reader, model, changes):
    """Padded or packed, a group or a part of one at a time, in any shards: the same tokens are chosen."""
    groups = scored_groups()
    settings = actor_settings(model, num_shards=1, micro_batch_groups=NUM_GROUPS, **changes)
    expected, actor = gradient_after(make_worker, reader, settings, groups)
    whole = merge([actor._host.metrics.drain()])
    plain = {name: value for name, value in changes.items() if name == "num_minibatches"}
    unchosen, _ = gradient_after(make_worker, reader, actor_settings(model, **plain), groups)
    assert not torch.allclose(expected, unchosen, rtol=1e-3)
    for cut in (
        {"micro_batch_groups": 1, "num_shards": 4},
        {"micro_batch_groups": 3},
        {"max_tokens_per_micro_batch": 12},
    ):
        budget = cut.pop("max_tokens_per_micro_batch", None)
        settings = actor_settings(model, **cut, **changes)
        settings = dataclasses.replace(settings, max_tokens_per_micro_batch=budget)
        gradient, actor = gradient_after(make_worker, reader, settings, groups, chunk=2)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        metrics = merge([actor._host.metrics.drain()])
        assert metrics["actor/clip_fraction"] == pytest.approx(whole["actor/clip_fraction"], abs=1e-6)


def test_several_minibatches_make_several_steps_anchored_at_the_first_policy(make_worker, reader, model):
    groups = scored_groups()
    _, actor = gradient_after(make_worker, reader, actor_settings(model, num_minibatches=2), groups)
    assert actor.policy_version == 2
    metrics = merge([actor._host.metrics.drain()])
    assert metrics["actor/clip_fraction"] > 0, "after a step of 1e-2 the ratio leaves the clip range somewhere"
    _, single = gradient_after(make_worker, reader, actor_settings(model), groups)
    assert merge([single._host.metrics.drain()])["actor/clip_fraction"] == 0.0, "on-policy, the ratio is 1"


def test_a_number_of_groups_that_does_not_divide_leaves_no_minibatch_empty(make_worker, reader, model):
    """5 groups in 4 minibatches: an empty one would be a step of AdamW's momentum alone."""
    settings = actor_settings(model, dynamic_sampling=True, oversampling=1.6, num_prompts=5, num_minibatches=4)
    last, actor = gradient_after(make_worker, reader, settings, scored_groups())
    assert actor.policy_version == 4
    assert last.any()


def test_groups_without_advantage_count_but_do_not_train(make_worker, reader, model):
    groups = [dataclasses.replace(group, rewards=torch.ones(GROUP_SIZE)) for group in scored_groups()]
    gradient, actor = gradient_after(make_worker, reader, actor_settings(model), groups)
    assert not gradient.any()
    metrics = merge([actor._host.metrics.drain()])
    assert metrics["actor/groups_without_advantage"] == 1.0
    assert metrics["actor/trained_token_fraction"] == 0.0


def examples(num_shards=2):
    ids = torch.randint(2, 13, (8, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(8, 6)
    mask[:, 3:] = 1
    return [
        ExampleBatch(shard=s, token_ids=ids[s::num_shards], loss_mask=mask[s::num_shards]) for s in range(num_shards)
    ]


def test_imitation_lowers_the_loss(make_worker, reader, model):
    actor = make_worker(Actor, actor_settings(model))
    actor.imitate(reader([examples() * 1]))
    first = merge([actor._host.metrics.drain()])["sft_warm_up/loss"]
    actor.imitate(reader([examples() * 20]))
    actor._host.metrics.drain()
    actor.imitate(reader([examples()]))
    assert merge([actor._host.metrics.drain()])["sft_warm_up/loss"] < 0.7 * first
    assert actor.policy_version == 22


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {}),
        ("ppo", {}),
        ("rloo", {"kl_coef": 1.0, "kl_target": 0.01, "kl_horizon": 40}),
        ("grpo", {"entropy_target": 5.0, "entropy_coef_step": 0.5}),
    ],
)
def test_a_checkpoint_restores_the_actor_to_the_bit(make_worker, reader, model, tmp_path, name, changes):
    groups = scored_groups()
    settings = actor_settings(model, name, num_minibatches=1, critic=OptimizerSettings(learning_rate=1e-2), **changes)
    _, actor = gradient_after(make_worker, reader, settings, groups)
    actor.save_checkpoint(str(tmp_path))
    restored = make_worker(Actor, settings, num_items=len(groups))
    restored.load_checkpoint(str(tmp_path))
    assert restored.policy_version == 1
    for worker in (actor, restored):
        worker.train(reader([groups]))
    for one, other in zip(actor.weights().values(), restored.weights().values(), strict=True):
        assert_bitwise_equal(one.detach(), other.detach())


def test_a_saved_model_loads_with_transformers(make_worker, model, tmp_path):
    from transformers import AutoModelForCausalLM

    actor = make_worker(Actor, actor_settings(model))
    actor.save_model(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[2, 3, 4]])
    with torch.no_grad():
        assert_bitwise_equal(loaded(ids).logits, actor._backend._model(ids).logits)


def noisy(make_worker, model, groups):
    """The groups with an engine that is off by a little at every token, by much at one; and the distances."""
    generator = torch.Generator().manual_seed(5)
    logprobs = logprobs_of(make_worker(Actor, actor_settings(model)), groups)
    noisy_groups, gaps = [], {}
    for group in groups:
        index, mask = group.samples.index, group.samples.loss_mask
        noise = torch.randn(mask.shape, generator=generator) * 1e-2 * mask
        if index == 2:
            noise[1, 0] = -1.5
        gaps[index] = noise[mask != 0].double()
        samples = dataclasses.replace(group.samples, rollout_logprobs=(logprobs[index] + noise) * mask)
        noisy_groups.append(dataclasses.replace(group, samples=samples))
    return noisy_groups, gaps


@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batch_groups": 3, "num_shards": 1}, {"num_minibatches": 2}, {"num_minibatches": 2, "num_epochs": 3}],
    ids=str,
)
def test_the_gap_to_the_engine_is_that_before_the_first_update(make_worker, reader, model, changes):
    """Group 5 teaches nothing, so nobody asks the model about it."""
    groups, gaps = noisy(make_worker, model, scored_groups())
    _, actor = gradient_after(make_worker, reader, actor_settings(model, **changes), groups)
    metrics, (row,) = merge([actor._host.metrics.drain()]), actor._host.shown_rows
    drift = -torch.cat([gap for index, gap in gaps.items() if index != 5])
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(float(drift.abs().mean()), rel=1e-4)
    assert metrics["rollout/logprob_gap_kl"] == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-4)
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(1.5, rel=1e-5)
    assert metrics["rollout/logprob_gap_p999"] == pytest.approx(1.5, rel=0.022)  # of less than 1,000 tokens the largest
    completion = groups[2].samples.completion_ids[1]
    letters = ["<pad>", "<end>", *"0123456789="]
    assert (row["prompt_index"], row["position"]) == (2, 0)
    assert row["worst_token"] == letters[completion[0]]
    assert row["actor_logprob"] - row["rollout_logprob"] == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize("budget", [None, 16])
def test_what_a_check_compares_is_what_the_actor_thinks_before_its_step(make_worker, reader, writer, model, budget):
    samples = [group.samples for group in scored_groups()]
    settings = dataclasses.replace(actor_settings(model), max_tokens_per_micro_batch=budget)
    actor = make_worker(Actor, settings, num_items=NUM_GROUPS)
    expected = logprobs_of(make_worker(Actor, actor_settings(model)), scored_groups())
    before = [parameter.detach().clone() for parameter in actor._backend._model.parameters()]
    actor.compare(reader([samples[:3], samples[3:]]), writer)
    assert [one.samples.index for one in writer.items] == list(range(NUM_GROUPS))
    for one in writer.items:
        mask = one.samples.loss_mask
        torch.testing.assert_close(one.actor_logprobs, expected[one.samples.index] * mask, rtol=1e-5, atol=1e-5)
        assert one.policy_version == 0
    assert actor.policy_version == 1
    after = list(actor._backend._model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    moved = logprobs_of(actor, scored_groups())
    drift = torch.cat(
        [(moved[g.index] - expected[g.index])[:, : g.loss_mask.shape[1]][g.loss_mask != 0].double() for g in samples]
    )
    moved_kl = merge([actor._host.metrics.drain()])["check/moved_kl"]
    assert moved_kl == pytest.approx(float((drift.expm1() - drift).mean()), rel=1e-2)
    assert moved_kl > 0


def test_truncated_importance_sampling_is_the_formula_in_float64(make_worker, reader, model):
    """-sum of min(exp(actor - engine), cap) * advantage * log-probability, over the tokens of the step, with an engine
    that is off differently at every token, some beyond the cap."""
    generator = torch.Generator().manual_seed(7)
    groups = []
    for group in scored_groups():
        mask = group.samples.loss_mask
        engine = (-2.5 + torch.randn(mask.shape, generator=generator)) * mask
        groups.append(dataclasses.replace(group, samples=dataclasses.replace(group.samples, rollout_logprobs=engine)))
    settings = actor_settings(model, correction="truncated", correction_high=1.5)
    network = make_worker(Actor, settings)._backend._model.double()
    total, num_tokens, weights = torch.zeros((), dtype=torch.float64), 0, []
    for group in groups:
        advantages, prompt = grpo_reference(group.rewards.double()), group.samples.prompt.token_ids
        for g in range(GROUP_SIZE):
            length = int(group.samples.loss_mask[g].sum())
            completion = group.samples.completion_ids[g, :length]
            logits = network(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            actor = logits.log_softmax(-1)[range(length), completion]
            weight = (actor.detach() - group.samples.rollout_logprobs[g, :length].double()).exp().clamp(max=1.5)
            total = total - (weight * advantages[g] * actor).sum()
            num_tokens += length
            weights.append(weight)
    assert 0.1 < float((torch.cat(weights) == 1.5).double().mean()) < 0.9, "both sides of the cap"
    (total / num_tokens).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    gradient, _ = gradient_after(make_worker, reader, settings, groups)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-4, atol=2e-7)


def test_without_a_correction_the_engines_numbers_change_no_bit(make_worker, reader, model):
    groups = scored_groups()
    noise, _ = noisy(make_worker, model, groups)
    (plain, _), (noisy_gradient, _) = (
        gradient_after(make_worker, reader, actor_settings(model), one) for one in (groups, noise)
    )
    assert_bitwise_equal(noisy_gradient, plain)


def test_the_staleness_of_each_token_is_recorded_and_bounded(make_worker, reader, model):
    """Half of the groups are from before the first step, the others from after it."""
    actor = make_worker(Actor, actor_settings(model, max_staleness=1), num_items=NUM_GROUPS)
    groups = scored_groups()
    actor.train(reader([groups]))
    actor._host.metrics.drain()
    new = [
        dataclasses.replace(group, samples=dataclasses.replace(group.samples, policy_version=index % 2))
        for index, group in enumerate(groups)
    ]
    actor.train(reader([new]))
    metrics = merge([actor._host.metrics.drain()])
    tokens = [float(group.samples.loss_mask.sum()) for group in groups]
    assert metrics["rollout/staleness_mean"] == pytest.approx(sum(tokens[::2]) / sum(tokens))
    assert metrics["rollout/staleness_max"] == 1.0
    with pytest.raises(AssertionError, match="tokens of policy version 0; with max_staleness=1"):
        actor.train(reader([groups]))
