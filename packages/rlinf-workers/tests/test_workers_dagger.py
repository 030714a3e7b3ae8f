"""Questions, rollout, environment and actor of DAgger: who is asked when, what is recorded, what is trained."""

import copy
from dataclasses import replace

import pytest
import torch

from rlinf_algos import DaggerAlgorithm
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.metrics import merge
from rlinf_workers.policies.base import PolicySettings, make_policy
from rlinf_workers.roles.embodied.dagger_actor import DaggerActor, DaggerActorSettings
from rlinf_workers.roles.embodied.dagger_rollout import DaggerRollout
from rlinf_workers.roles.embodied.expert_queries import ExpertQueries
from rlinf_workers.roles.embodied.native_actions import native_actions, policy_actions
from rlinf_workers.roles.records.embodied import DemonstratedBatch, ExpertAnswer, GroupObservation, LabelledSegment
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

POLICY = PolicySettings(
    name="actor_critic",
    fields={"state": FieldSpec(shape=(3,), dtype="float32")},
    actions=ActionSpec(kind="continuous", shape=(2,), low=-torch.ones(2), high=torch.ones(2)),
    options={"hidden_sizes": (8,), "initial_log_std": -0.5, "normalize_observations": True, "chunk_size": 2},
)
NUM_ENVS, CHUNK = 3, 2

# -- questions ---------------------------------------------------------------------------------------------------------


def queries(num_groups=2, num_envs=4, num_answers=5, chunk_size=CHUNK, **changes):
    return ExpertQueries(
        algorithm=DaggerAlgorithm(**changes),
        num_groups=num_groups,
        num_envs=num_envs,
        num_answers=num_answers,
        chunk_size=chunk_size,
    )


def test_a_share_of_the_observations_is_asked_about_and_others_in_each_step_and_group():
    of = queries(query_rate=0.3)
    labels = {key: of.of_group(0, *key).labels for key in ((0, 0), (0, 1), (1, 0))}
    assert all(one.sum() == 6 and one.shape == (5, 4) for one in labels.values())
    assert len({tuple(one.flatten().tolist()) for one in labels.values()}) == 3
    assert torch.equal(of.of_group(0, 1, 0).labels, labels[1, 0])


def test_the_expert_acts_for_whole_segments_and_is_asked_all_along():
    one = queries(expert_share=0.5, query_rate=0.2).of_group(0, 0, 0)
    assert sorted(one.acts.sum(0).tolist()) == [0, 0, 5, 5]
    assert one.labels[one.acts].all() and one.labels.sum() == 10 + 2


def test_an_expert_that_takes_over_acts_to_the_end_of_the_segment():
    one = queries(expert_share=1.0, takes_over=True, query_rate=0.0).of_group(0, 0, 0)
    assert torch.equal(one.acts, one.labels)
    assert sorted(one.acts.sum(0).tolist()) == [1, 2, 4, 5]
    assert (one.acts.int().diff(dim=0) >= 0).all()


@pytest.mark.parametrize("budget", [1, 15, 41, 10_000])
def test_the_groups_spend_the_budget_together(budget):
    of = queries(query_rate=0.35, expert_share=0.5, max_expert_actions=budget)
    counts = [[int(of.of_group(3, step, group).labels.sum()) for group in range(2)] for step in range(9)]
    free = [2 * of.algorithm.num_asked(step, 4, 5) for step in range(9)]
    spent = 0
    for step, count in enumerate(counts):
        assert sum(count) == min(free[step], budget // CHUNK - spent) and abs(count[0] - count[1]) <= 1
        spent += sum(count)
    late = of.of_group(3, 8, 1)
    assert not (late.acts & ~late.labels).any()


# -- environment and rollout -------------------------------------------------------------------------------------------


def test_actions_of_an_expert_are_numbered_as_those_of_the_policy():
    discrete = ActionSpec(kind="discrete", shape=(), low=torch.tensor(3), high=torch.tensor(9))
    native = torch.tensor([[3, 4], [9, 5]])
    assert policy_actions(native, discrete).tolist() == [[[0], [1]], [[6], [2]]]
    assert torch.equal(native_actions(policy_actions(native, discrete), discrete), native)
    square = ActionSpec(kind="continuous", shape=(2, 2), low=-torch.ones(2, 2), high=torch.ones(2, 2))
    assert policy_actions(torch.zeros(5, 3, 2, 2), square).shape == (5, 3, 4)


def observation(time, *, expert=None, is_last=False):
    zeros = torch.zeros(NUM_ENVS, dtype=torch.int64)
    return GroupObservation(
        group=1,
        time=time,
        fields={"state": torch.full((NUM_ENVS, 3), float(time)) + torch.arange(NUM_ENVS)[:, None] / 10},
        final_fields=None,
        rewards=torch.zeros(NUM_ENVS, CHUNK),
        num_executed=zeros,
        terminated=zeros.bool(),
        truncated=zeros.bool(),
        is_last=is_last,
        expert=expert,
    )


def answer(rows, acts):
    actions = torch.arange(len(rows), dtype=torch.float32)[:, None, None].expand(-1, CHUNK, 2) + 50
    return ExpertAnswer(rows=torch.tensor(rows), actions=actions, acts=torch.tensor(acts))


def test_labelled_rows_are_recorded_and_the_expert_acts_where_it_drives(make_worker):
    rollout = make_worker(DaggerRollout, POLICY)
    stream = [
        observation(0, expert=answer([0, 2], [False, True])),
        observation(1),
        observation(2, expert=answer([1], [False])),
        observation(3, is_last=True),
    ]
    policy = make_policy(POLICY, torch.device("cpu"))
    expected = [policy.act(item.fields, None).actions for item in stream[:3]]
    answers = [rollout.act_on(item) for item in stream]
    expected[0][2] = 51.0
    for (action, segments), actions in zip(answers, expected, strict=False):
        assert action is not None and not segments
        assert_bitwise_equal(action.actions, actions)
    action, (segment,) = answers[-1]
    assert action is None
    torch.testing.assert_close(segment.fields["state"][:, 0], torch.tensor([0.0, 0.2, 2.1]))
    assert segment.actions[:, 0, 0].tolist() == [50, 51, 50]


def test_a_segment_may_have_no_labels_and_an_evaluation_records_none(make_worker):
    rollout = make_worker(DaggerRollout, POLICY)
    rollout.act_on(observation(0))
    _, (segment,) = rollout.act_on(observation(1, is_last=True))
    assert segment.actions.shape == (0, CHUNK, 2) and segment.fields["state"].shape == (0, 3)
    judged = make_worker(DaggerRollout, POLICY, phase="evaluate")
    judged.act_on(observation(0))
    assert judged.act_on(observation(1, is_last=True)) == (None, [])


# -- the actor ---------------------------------------------------------------------------------------------------------


def settings(num_shards=1, micro_batch_size=None, batch_size=8, buffer_size=100):
    return DaggerActorSettings(
        policy=POLICY,
        algorithm=DaggerAlgorithm(batch_size=batch_size, buffer_size=buffer_size, num_updates=3),
        backend=BackendSettings(num_shards=num_shards),
        optimizer=OptimizerSettings(learning_rate=1e-2, betas=(0.9, 0.999), max_grad_norm=1e9),
        micro_batch_size=micro_batch_size,
        chunk_size=CHUNK,
    )


def segment(group=0, step=0, count=4):
    generator = torch.Generator().manual_seed(100 * step + group)
    return LabelledSegment(
        group=group,
        fields={"state": torch.randn(count, 3, generator=generator)},
        actions=torch.rand(count, CHUNK, 2, generator=generator),
        policy_version=0,
    )


def demonstrated(shard, count=5):
    return DemonstratedBatch(
        step=0, shard=shard, fields={"state": torch.full((count, 3), 9.0)}, actions=torch.full((count, CHUNK, 2), 0.9)
    )


def trained(actor, reader, steps=range(1), count=4):
    for step in steps:
        actor._host.step = replace(actor.step, step=step)
        actor.train(reader([[segment(group, step, count)] for group in range(2)]))
    return actor._backend.model_tensors()


def test_updates_are_those_of_plain_autograd_and_adam(make_worker, reader):
    actor = make_worker(DaggerActor, settings())
    policy = copy.deepcopy(actor._backend.on_model(lambda model: model))
    actual = trained(actor, reader)
    policy.absorb(policy.observation_sums({"state": torch.cat([segment(g).fields["state"] for g in range(2)])}))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2, weight_decay=0.0)
    for update in range(3):
        rows = actor._drawn(update, 0)
        optimizer.zero_grad()
        (-policy.evaluate(rows.fields, rows.actions, {}).logprobs.reshape(8, -1).sum(1)).mean().backward()
        optimizer.step()
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_demonstrations_stay_among_what_is_imitated_and_every_row_is_as_likely(make_worker, reader):
    actor = make_worker(DaggerActor, settings(batch_size=4000, buffer_size=3))
    actor.remember(reader([[demonstrated(0)]]))
    actor.begin_step([segment(0, count=6), segment(1, count=4)])
    rows = actor._drawn(0, 0)
    is_demonstrated = rows.fields["state"][:, 0] == 9.0
    assert abs(is_demonstrated.float().mean() - 5 / 8) < 0.03
    assert len({tuple(one) for one in rows.fields["state"][~is_demonstrated].tolist()}) == 3  # the newest


def test_what_the_expert_named_is_counted(make_worker, reader):
    actor = make_worker(DaggerActor, settings(num_shards=2, buffer_size=4))
    actor.remember(reader([[demonstrated(0)], [demonstrated(1)]]))
    for step in range(2):
        actor._host.metrics.drain()
        trained(actor, reader, range(step, step + 1))
    metrics = merge([actor._host.metrics.drain()])
    assert metrics["actor/expert_actions"] == 10 + CHUNK * 16
    assert metrics["actor/replay_size"] == 10 + 4


def test_a_step_without_labels_trains_on(make_worker, reader):
    actor = make_worker(DaggerActor, settings())
    before = {name: tensor.clone() for name, tensor in trained(actor, reader).items()}
    after = trained(actor, reader, range(1, 2), count=0)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert_bitwise_equal(after["observation_mean"], before["observation_mean"])
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_micro_batches_add_up_to_the_batch(make_worker, reader):
    whole, parts = (
        trained(make_worker(DaggerActor, settings(num_shards=2, micro_batch_size=size)), reader) for size in (None, 3)
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_a_resumed_actor_continues_to_the_bit(make_worker, reader, tmp_path):
    straight = make_worker(DaggerActor, settings(num_shards=2, buffer_size=12))  # it wraps
    straight.remember(reader([[demonstrated(0)], [demonstrated(1)]]))
    trained(straight, reader, range(2))
    straight.save_checkpoint(str(tmp_path))
    resumed = make_worker(DaggerActor, settings(num_shards=2, buffer_size=12))
    resumed.load_checkpoint(str(tmp_path))
    expected, actual = (trained(actor, reader, range(2, 4)) for actor in (straight, resumed))
    assert straight.policy_version == resumed.policy_version == 12
    for name, tensor in expected.items():
        assert_bitwise_equal(actual[name], tensor)
