"""The SFT warm-up's stage of the embodied actor: one step a batch, and a policy that does as the expert does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_algos import preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.metrics import merge
from rlinf_workers.policies.actor_critic.policy import ActorCritic
from rlinf_workers.policies.base import PolicySettings, make_policy
from rlinf_workers.roles.embodied.actor import EmbodiedActor, EmbodiedActorSettings
from rlinf_workers.roles.records.embodied import DemonstratedBatch
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

POLICY = PolicySettings(
    name="actor_critic",
    fields={"state": FieldSpec(shape=(4,), dtype="float32")},
    actions=ActionSpec(kind="continuous", shape=(2,), low=-torch.ones(2), high=torch.ones(2)),
    options={"hidden_sizes": (32,), "chunk_size": 2},
)
EXPERT = torch.tensor([[0.5, -0.2, 0.1, 0.0], [0.0, 0.3, -0.4, 0.2]])
WARM_START = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9)


def settings(policy=POLICY, **changes):
    actor_settings = EmbodiedActorSettings(
        policy=policy,
        algorithm=preset("ppo", samples="episodes"),
        backend=BackendSettings(num_shards=2),
        optimizer=OptimizerSettings(learning_rate=1e-4),
        sft_warm_up=WARM_START,
    )
    return replace(actor_settings, **changes)


def demonstrations(step, rows=16):
    """A batch in two shards: states, and twice what the expert does there."""
    states = 3.0 + torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
    actions = (states @ EXPERT.T)[:, None].expand(-1, 2, -1)
    return [
        DemonstratedBatch(step=step, shard=s, fields={"state": states[s::2]}, actions=actions[s::2]) for s in range(2)
    ]


def test_the_policy_does_as_the_expert_does(make_worker, reader):
    actor = make_worker(EmbodiedActor, settings())
    unseen = torch.cat([batch.fields["state"] for batch in demonstrations(1000)])
    expected = (unseen @ EXPERT.T)[:, None].expand(-1, 2, -1)

    def error():
        actions = actor._backend.on_model(lambda policy: policy.act({"state": unseen}, None).actions)
        return float((actions - expected).abs().mean())

    before = error()
    actor.imitate(reader([[batch] for step in range(80) for batch in demonstrations(step)]))
    assert actor.policy_version == 80
    assert error() < before / 5


def test_statistics_are_those_of_the_first_run(make_worker, reader):
    actor = make_worker(EmbodiedActor, settings())
    batches = [batch for step in range(3) for batch in demonstrations(step)]
    actor.imitate(reader([batches]))
    states = torch.cat([batch.fields["state"] for batch in batches]).double()
    mean = actor._backend.on_model(lambda policy: policy.observation_mean.clone())
    torch.testing.assert_close(mean, states.mean(0))
    actor.imitate(reader([[replace(batch, step=9) for batch in demonstrations(7)]]))
    assert_bitwise_equal(actor._backend.on_model(lambda policy: policy.observation_mean.clone()), mean)


class Draws(ActorCritic):
    """Its losses are the noise that it gets, and something to learn."""

    def imitate(self, fields, actions, noise):
        return noise[:, 0] + 0.0 * self.policy(fields["state"]).sum(-1)


def test_micro_batches_add_up(make_worker, reader):
    losses = []
    for size in (None, 3):
        actor = make_worker(EmbodiedActor, settings(micro_batch_size=size))
        actor.imitate(reader([demonstrations(0)]))
        losses.append(merge([actor._host.metrics.drain()])["sft_warm_up/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_noise_follows_from_seed_step_and_shard(make_worker, reader):
    actor = make_worker(EmbodiedActor, settings(replace(POLICY, name=f"{__name__}:Draws")))
    actor.imitate(reader([[batch] for batch in demonstrations(5)]))
    loss = merge([actor._host.metrics.drain()])["sft_warm_up/loss"]
    drawn = [np.random.Generator(np.random.Philox(key=[0, (5 << 20) | s])).standard_normal((8, 4)) for s in range(2)]
    expected = np.float32(np.concatenate(drawn)[:, 0]).mean()
    assert abs(loss - expected) < 1e-6


def test_training_begins_with_an_optimizer_of_its_own(make_worker, reader, tmp_path):
    actor = make_worker(EmbodiedActor, settings())
    actor.imitate(reader([demonstrations(0)]))
    assert actor._backend.num_steps == 1
    actor.save_checkpoint(str(tmp_path))
    assert actor._backend.num_steps == 0
    policy = make_policy(POLICY, torch.device("cpu"))
    assert not torch.equal(policy.policy[0].weight, actor._backend.weights()["policy.0.weight"])  # type: ignore[reportIndexIssue]
