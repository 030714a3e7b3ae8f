"""Rollout, replay buffers and actor of off-policy flows: what is recorded, what is trained, what a checkpoint keeps."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_algos import off_policy_preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError, PolicySettings
from rlinf_workers.policies.soft import CriticSettings
from rlinf_workers.policies.soft_actor.critics import CriticEnsemble, ParallelLayers
from rlinf_workers.policies.soft_actor.policy import SoftActor
from rlinf_workers.roles.embodied.off_policy_actor import OffPolicyActor, OffPolicyActorSettings
from rlinf_workers.roles.embodied.off_policy_rollout import OffPolicyRollout, OffPolicyRolloutSettings
from rlinf_workers.roles.embodied.replay_buffer import ReplayBuffer, transition_bytes
from rlinf_workers.roles.records.embodied import GroupObservation, Transitions
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

POLICY = PolicySettings(
    name="soft_actor",
    fields={"state": FieldSpec(shape=(5,), dtype="float32")},
    actions=ActionSpec(kind="continuous", shape=(2,), low=torch.tensor([-2.0, 0.0]), high=torch.tensor([2.0, 1.0])),
    options={"hidden_size": 8},
)
PIXELS = replace(POLICY, fields=POLICY.fields | {"image.top": FieldSpec(shape=(36, 36, 3), dtype="uint8")})
NUM_STEPS, NUM_ENVS = 4, 3


def settings(num_shards=1, num_updates=3, micro_batch_size=None, name="sac", policy=POLICY, **changes):
    return OffPolicyActorSettings(
        policy=policy,
        algorithm=off_policy_preset(name, **({"batch_size": 16, "buffer_size": 64} | changes)),
        backend=BackendSettings(num_shards=num_shards),
        optimizer=OptimizerSettings(learning_rate=1e-3, betas=(0.9, 0.999), max_grad_norm=1e9),
        critic_optimizer=OptimizerSettings(learning_rate=2e-3, betas=(0.9, 0.999), max_grad_norm=1e9),
        num_updates=num_updates,
        micro_batch_size=micro_batch_size,
    )


def transitions(group=0, seed=0, num_steps=NUM_STEPS, policy=POLICY):
    """With pictures, all follow each other but those of the second environment."""
    generator = torch.Generator().manual_seed(100 * seed + group)
    shape = (num_steps, NUM_ENVS)
    fields, next_fields = ({"state": torch.randn(*shape, 5, generator=generator)} for _ in range(2))
    if "image.top" in policy.fields:
        drawn = torch.randint(256, (num_steps + 1, NUM_ENVS, 36, 36, 3), generator=generator, dtype=torch.uint8)
        fields["image.top"], next_fields["image.top"] = drawn[:-1], drawn[1:].clone()
        next_fields["image.top"][:, 1] += 1
    return Transitions(
        group=group,
        fields=fields,
        next_fields=next_fields,
        actions=torch.rand(*shape, 1, 2, generator=generator),
        rewards=torch.randn(*shape, generator=generator),
        terminated=torch.rand(*shape, generator=generator) < 0.3,
        policy_version=0,
    )


def weights_of(actor: OffPolicyActor) -> dict[str, torch.Tensor]:
    both = {name: backend.model_tensors() for name, backend in actor._backends.items()}
    return {f"{name}/{key}": tensor for name, tensors in both.items() for key, tensor in tensors.items()}


def trained(actor: OffPolicyActor, reader, steps=range(1), num_groups=2) -> dict[str, torch.Tensor]:
    for step in steps:
        actor._host.step = replace(actor.step, step=step)
        policy = actor._settings.policy
        actor.train(reader([[transitions(group, step, policy=policy)] for group in range(num_groups)]))
    return weights_of(actor)


# -- the rollout -------------------------------------------------------------------------------------------------------


def observation(time, *, ended=None, is_last=False):
    """`ended`: row -> "terminated" or "truncated"."""
    rows = torch.arange(NUM_ENVS)
    state = torch.full((NUM_ENVS, 5), float(time)) + rows[:, None] / 10
    ended = ended or {}
    final = state.clone()
    for row in ended:
        final[row] += 100.0
    return GroupObservation(
        group=1,
        time=time,
        fields={"state": state},
        final_fields={"state": final} if ended else None,
        rewards=torch.full((NUM_ENVS, 1), float(time)),
        num_executed=torch.ones(NUM_ENVS, dtype=torch.int64),
        terminated=torch.tensor([ended.get(row) == "terminated" for row in range(NUM_ENVS)]),
        truncated=torch.tensor([ended.get(row) == "truncated" for row in range(NUM_ENVS)]),
        is_last=is_last,
    )


def recorded(make_worker, *, step=9, phase="train", num_random_steps=0):
    settings = OffPolicyRolloutSettings(policy=POLICY, num_random_steps=num_random_steps)
    rollout = make_worker(OffPolicyRollout, settings, step=step, phase=phase)
    stream = [
        observation(0),
        observation(1, ended={0: "terminated", 2: "truncated"}),
        observation(2, is_last=True),
    ]
    answers = [rollout.act_on(item) for item in stream]
    return [action for action, _ in answers], answers[-1][1]


def test_transitions_lead_to_the_final_observation_and_a_time_limit_is_no_end(make_worker):
    actions, (segment,) = recorded(make_worker)
    assert segment.terminated.tolist() == [[True, False, False], [False, False, False]]
    reached = segment.next_fields["state"][..., 0]
    torch.testing.assert_close(reached, torch.tensor([[101.0, 1.1, 101.2], [2.0, 2.1, 2.2]]))
    torch.testing.assert_close(segment.fields["state"][..., 0], torch.tensor([[0.0, 0.1, 0.2], [1.0, 1.1, 1.2]]))
    assert segment.rewards.tolist() == [[1.0] * 3, [2.0] * 3]
    assert_bitwise_equal(segment.actions, torch.stack([action.actions for action in actions[:2]]))
    assert actions[-1] is None


def test_an_evaluation_records_nothing_and_acts_without_noise(make_worker):
    actions, segments = recorded(make_worker, phase="evaluate")
    assert not segments
    policy = SoftActor(POLICY.fields, POLICY.actions, seed=0, **POLICY.options)
    with torch.no_grad():
        assert_bitwise_equal(actions[0].actions, policy.act(observation(0).fields, None).actions)


def test_the_first_steps_act_at_random_over_the_whole_range(make_worker):
    drawn, policys, again = (recorded(make_worker, step=step, num_random_steps=2)[0][0].actions for step in (1, 2, 1))
    assert_bitwise_equal(drawn, again)
    rollout = make_worker(OffPolicyRollout, OffPolicyRolloutSettings(policy=POLICY, num_random_steps=1), step=0)
    many = rollout._random_actions(np.random.default_rng(0), 4000)[:, 0]
    torch.testing.assert_close(many.mean(0), torch.tensor([0.0, 0.5]), atol=0.05, rtol=0)
    torch.testing.assert_close(many.amin(0), torch.tensor([-2.0, 0.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(many.amax(0), torch.tensor([2.0, 1.0]), atol=0.01, rtol=0)
    assert not torch.equal(drawn, policys)


# -- the buffer --------------------------------------------------------------------------------------------------------


def rows_of(first: int, count: int, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"rewards": torch.arange(first, first + count), **columns}


def test_a_full_buffer_overwrites_the_oldest_transitions():
    buffer = ReplayBuffer(5)
    for first in (0, 3, 6):
        buffer.add(rows_of(first, 3))
    assert len(buffer) == 5
    assert sorted(buffer[torch.arange(5)]["rewards"].tolist()) == [4, 5, 6, 7, 8]
    buffer.add(rows_of(100, 12))  # more than it holds
    assert sorted(buffer[torch.arange(5)]["rewards"].tolist()) == [107, 108, 109, 110, 111]


def picture_rows(first: int, num_steps: int, num_envs: int) -> dict[str, torch.Tensor]:
    """Pictures with the number of the transition before it, and 100 more after it where an episode was cut."""
    number = torch.arange(first, first + num_steps * num_envs, dtype=torch.uint8)
    here, after = (value[:, None, None, None].expand(-1, 2, 2, 3).clone() for value in (number, number + num_envs))
    after[number % 4 == 3] += 100
    terminated = number % 7 == 0
    pictures = {"fields/image.a": here, "next_fields/image.a": after}
    return rows_of(first, len(number), terminated=terminated, **pictures)


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_pictures_stored_once_are_those_that_were_added(num_envs):
    buffer, reference = ReplayBuffer(11), {}
    for part in range(6):
        rows = picture_rows(part * 6 * num_envs, 6, num_envs)
        buffer.add(rows, num_envs)
        for row, number in enumerate(rows["rewards"].tolist()):
            reference[number] = {name: values[row] for name, values in rows.items()}
        loaded = ReplayBuffer(11)
        loaded.load(copy.deepcopy(buffer.tensors()))
        for one in (buffer, loaded):
            stored = one[torch.arange(len(one))]
            newest = sorted(reference)[-len(one) :]
            assert sorted(stored["rewards"].tolist()) == newest
            for row, number in enumerate(stored["rewards"].tolist()):
                expected = reference[number]
                after = "fields/image.a" if expected["terminated"] else "next_fields/image.a"
                assert torch.equal(stored["fields/image.a"][row], expected["fields/image.a"])
                assert torch.equal(stored["next_fields/image.a"][row], expected[after])


def test_the_bytes_of_a_transition_are_those_that_are_stored():
    fields = {"state": FieldSpec(shape=(3,), dtype="float32"), "image.a": FieldSpec(shape=(2, 2, 3), dtype="uint8")}
    buffer = ReplayBuffer(80)
    rows = picture_rows(0, 20, 4) | {"terminated": torch.zeros(80, dtype=torch.bool)}
    rows["rewards"] = rows["rewards"].float()
    states = {"fields/state": torch.zeros(80, 3), "next_fields/state": torch.zeros(80, 3)}
    buffer.add(rows | states | {"actions": torch.zeros(80, 2, 5)}, num_envs=4)
    stored = sum(one.nbytes for name, one in buffer.tensors().items() if name not in ("position", "ends/rows"))
    num_ends = 20 + 3  # one of four environments is cut all the time, and the others at the end
    assert 80 * transition_bytes(fields, 10, ends_share=num_ends / 80) == pytest.approx(stored, rel=0.02)
    assert transition_bytes({"state": fields["state"]}, 10, ends_share=1.0) == 2 * 12 + 40 + 5


def test_a_loaded_buffer_goes_on_as_the_saved_one():
    one, other = ReplayBuffer(5), ReplayBuffer(5)
    one.add(rows_of(0, 7, actions=torch.randn(7, 2)))
    other.load(copy.deepcopy(one.tensors()))
    for buffer in (one, other):
        buffer.add(rows_of(50, 2, actions=torch.ones(2, 2)))
    for name, column in one[torch.arange(5)].items():
        assert_bitwise_equal(other[torch.arange(5)][name], column)


# -- the actor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "of"), [("sac", POLICY), ("rlpd", POLICY), ("rlpd", PIXELS)])
def test_updates_are_those_of_plain_autograd_and_adam(make_worker, reader, name, of):
    """One loss for each network, the whole graph, torch's Adam: the textbook, written without the backend."""
    changes: dict[str, Any] = {"policy_delay": 2, "demonstration_fraction": 0.0} if name == "rlpd" else {}
    actor = make_worker(OffPolicyActor, settings(name=name, num_updates=4, policy=of, **changes))
    algorithm = actor._algorithm
    policy, critics = (copy.deepcopy(backend.on_model(lambda model: model)) for backend in actor._backends.values())
    actual = trained(actor, reader)

    def values(layers, inputs, fields, actions):
        scaled = ((actions - critics.action_center) / critics.action_half_range).flatten(1)
        pictures = [inputs.projection(critics.encoder(fields))] if of is PIXELS else []
        return layers(torch.cat([*pictures, fields["state"], scaled], 1))

    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.0)
        for model, rate in ((policy, 1e-3), (critics, 2e-3))
    ]
    for update in range(4):
        (batch,) = actor._drawn(update, 0)
        subset = actor._subset(update)
        with torch.no_grad():
            actions, logprobs = policy.sample(batch.following.fields, batch.following.noise)
            following = values(critics.target, critics.target_inputs, batch.following.fields, actions)
            following = following if subset is None else following[:, subset]
            soft = following.min(1).values - policy.log_temperature.exp() * logprobs
            targets = batch.rewards + algorithm.gamma * (~batch.terminated) * soft
        of_each = values(critics.online, critics.inputs, batch.here.fields, batch.actions)
        loss = 0.5 * ((of_each - targets[:, None]) ** 2).mean(0).sum()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        with torch.no_grad():
            for targets, sources in ((critics.target, critics.online), (critics.target_inputs, critics.inputs)):
                for target, source in zip(targets.parameters(), sources.parameters(), strict=True):
                    target += algorithm.target_rate * (source - target)
        if of is PIXELS:
            policy.encoder.load_state_dict(critics.encoder.state_dict())
        if (update + 1) % algorithm.policy_delay:
            continue
        actions, logprobs = policy.sample(batch.here.fields, batch.here.noise)
        of_each = values(critics.online, critics.inputs, batch.here.fields, actions)
        value = of_each.min(1).values if algorithm.policy_value == "min" else of_each.mean(1)
        alpha = policy.log_temperature.exp().detach()
        loss = (alpha * logprobs - value).mean()
        loss = loss - (policy.log_temperature * (logprobs.detach() + 2 * algorithm.target_entropy)).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    for prefix, model in (("/", policy), ("critics/", critics)):
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(actual[f"{prefix}{key}"], tensor, rtol=1e-4, atol=1e-6)


def test_random_numbers_depend_on_the_step_and_not_on_what_was_drawn_before(make_worker, reader):
    one, other = (make_worker(OffPolicyActor, settings()) for _ in range(2))
    for actor in (one, other):
        actor.begin_step([transitions()])
    one._drawn(0, 0)
    for batch in (one._drawn(1, 0)[0], other._drawn(1, 0)[0]):
        assert_bitwise_equal(batch.rewards, one._drawn(1, 0)[0].rewards)
    assert not torch.equal(one._drawn(2, 0)[0].rewards, one._drawn(1, 0)[0].rewards)


def test_pictures_of_a_batch_are_shifted_and_by_the_same_random_numbers_again(make_worker):
    actor, still = (make_worker(OffPolicyActor, settings(policy=PIXELS, picture_shift=pixels)) for pixels in (4, 0))
    for one in (actor, still):
        one.begin_step([transitions(policy=PIXELS)])
    (batch,), (again,), (observed,) = actor._drawn(1, 0), actor._drawn(1, 0), still._drawn(1, 0)
    num_moved = 0
    for one, same, unshifted in (
        (batch.here, again.here, observed.here),
        (batch.following, again.following, observed.following),
    ):
        pictures, originals = one.fields["image.top"], unshifted.fields["image.top"]
        assert_bitwise_equal(pictures, same.fields["image.top"])
        assert_bitwise_equal(one.fields["state"], unshifted.fields["state"])
        for picture, original in zip(pictures, originals, strict=True):
            windows = torch.nn.functional.pad(original.movedim(-1, 0).float(), (4, 4, 4, 4), mode="replicate")
            windows = windows.unfold(1, 36, 1).unfold(2, 36, 1)  # [3, 9, 9, 36, 36]
            is_window = (windows == picture.movedim(-1, 0)[:, None, None]).flatten(3).all(-1).all(0)
            assert is_window.any()
            num_moved += not is_window[4, 4]
    assert num_moved > len(batch)


def test_micro_batches_add_up_to_the_batch(make_worker, reader):
    whole, parts = (
        trained(make_worker(OffPolicyActor, settings(num_shards=2, micro_batch_size=size)), reader)
        for size in (None, 3)
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("of", [POLICY, PIXELS])
def test_a_resumed_actor_continues_to_the_bit(make_worker, reader, tmp_path, of):
    changes = {"num_shards": 2, "buffer_size": 20, "policy": of}  # it wraps
    straight = make_worker(OffPolicyActor, settings(**changes))
    trained(straight, reader, range(2))
    straight.save_checkpoint(str(tmp_path))
    resumed = make_worker(OffPolicyActor, settings(**changes))
    trained(resumed, reader, range(5, 6))  # what it did before does not matter
    resumed.load_checkpoint(str(tmp_path))
    expected, actual = (trained(actor, reader, range(2, 4)) for actor in (straight, resumed))
    assert straight.policy_version == resumed.policy_version == 12
    for name, tensor in expected.items():
        assert_bitwise_equal(actual[name], tensor)


def test_a_checkpoint_that_is_being_written_keeps_the_buffers_as_they_were(make_worker, reader, tmp_path):
    actor = make_worker(OffPolicyActor, settings(buffer_size=8))
    trained(actor, reader)
    before = {name: tensor.clone() for name, tensor in actor._buffers[0].tensors().items()}
    actor.begin_checkpoint(str(tmp_path))
    trained(actor, reader, range(1, 2))
    actor.end_checkpoint()
    again = make_worker(OffPolicyActor, settings(buffer_size=8))
    again.load_checkpoint(str(tmp_path))
    for name, tensor in again._buffers[0].tensors().items():
        assert_bitwise_equal(tensor, before[name])


def demonstrated(group: int) -> Transitions:
    return replace(transitions(group, seed=50), rewards=torch.full((NUM_STEPS, NUM_ENVS), 1000.0 + group))


def test_a_share_of_every_batch_is_demonstrated_and_a_checkpoint_keeps_the_demonstrations(
    make_worker, reader, tmp_path
):
    changes = {"num_shards": 2, "demonstration_fraction": 0.25}
    actor, resumed = (make_worker(OffPolicyActor, settings(**changes)) for _ in range(2))
    actor.remember(reader([[demonstrated(0)], [demonstrated(1)]]))
    trained(actor, reader)
    for shard in (0, 1):
        (batch,) = actor._drawn(0, shard)
        assert (batch.rewards == 1000.0 + shard).sum().item() == 2  # a quarter of the shard's 8
        assert (batch.rewards < 100).sum().item() == 6
    actor.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    expected, actual = (trained(one, reader, range(1, 3)) for one in (actor, resumed))
    for name, tensor in expected.items():
        assert_bitwise_equal(actual[name], tensor)


def test_a_fixed_temperature_stays(make_worker, reader):
    actor = make_worker(OffPolicyActor, settings(target_entropy=None, initial_temperature=0.2))
    assert trained(actor, reader)["/log_temperature"].exp().item() == pytest.approx(0.2)


# -- the policy and its critics ----------------------------------------------------------------------------------------


def test_samples_are_the_actions_of_act_within_the_bounds():
    policy = SoftActor(POLICY.fields, POLICY.actions, seed=0, hidden_size=8, chunk_size=3)
    fields, noise = {"state": 10 * torch.randn(50, 5)}, 3 * torch.randn(50, policy.noise_size)
    answer, (actions, logprobs) = policy.act(fields, noise), policy.sample(fields, noise)
    assert answer.actions.shape == (50, 3, 2)
    torch.testing.assert_close(answer.actions, actions)
    torch.testing.assert_close(answer.logprobs.sum((1, 2)), logprobs)
    assert (actions >= POLICY.actions.low).all()
    assert (actions <= POLICY.actions.high).all()


def test_pictures_that_critics_have_encoded_are_pictures_to_the_policy():
    policy = SoftActor(PIXELS.fields, PIXELS.actions, seed=0, hidden_size=8)
    critics = SoftActor.critics(
        PIXELS.fields, PIXELS.actions, CriticSettings(num_critics=2, layer_norm=True), hidden_size=8
    )
    fields = {"state": torch.randn(4, 5), "image.top": torch.randint(256, (4, 36, 36, 3), dtype=torch.uint8)}
    actions, noise = torch.rand(4, 1, 2), torch.randn(4, 2)
    policy.share(critics)
    encoded = critics.encoded(fields)
    assert "image.top" not in encoded
    assert_bitwise_equal(critics(fields, actions), critics(encoded, actions))
    assert_bitwise_equal(policy.sample(fields, noise)[0], policy.sample(encoded, noise)[0])
    assert (
        not policy.sample(fields, noise)[0]
        .isclose(policy.sample({**fields, "image.top": 255 - fields["image.top"]}, noise)[0])
        .all()
    )


@pytest.mark.parametrize(
    ("fields", "options", "reads"),
    [
        (PIXELS.fields, {}, ("image.top", "state")),
        (PIXELS.fields, {"reads_state": False}, ("image.top",)),
        (PIXELS.fields, {"cameras": ""}, ("state",)),
        ({"image.top": PIXELS.fields["image.top"]}, {}, ("image.top",)),
        (POLICY.fields, {"reads_state": False}, ("state",)),
    ],
)
def test_what_it_reads(fields, options, reads):
    assert SoftActor.needs(fields, POLICY.actions, **options).reads == reads


@pytest.mark.parametrize("layer_norm", [False, True])
def test_parallel_networks_are_separate_networks(layer_norm):
    torch.manual_seed(0)
    layers = ParallelLayers([4, 8, 8, 1], 3, layer_norm=layer_norm)
    inputs = torch.randn(6, 4)
    for network in range(3):
        values = inputs
        for depth in range(3):
            values = values @ layers.weights[depth][network] + layers.biases[depth][network]
            if depth < 2:
                values = torch.relu(torch.nn.functional.layer_norm(values, (8,)) if layer_norm else values)
        torch.testing.assert_close(layers(inputs)[:, network], values[:, 0])
    subset = torch.tensor([2, 0])
    torch.testing.assert_close(layers(inputs, subset), layers(inputs)[:, subset])


def test_critics_of_a_policy_are_the_same_in_every_process_and_differ_from_each_other():
    one, other = (
        SoftActor.critics(POLICY.fields, POLICY.actions, CriticSettings(num_critics=2, layer_norm=True), seed=3)
        for _ in range(2)
    )
    for name, tensor in one.state_dict().items():
        assert_bitwise_equal(other.state_dict()[name], tensor)
    assert isinstance(one, CriticEnsemble)
    assert not torch.equal(one.online.weights[0][0], one.online.weights[0][1])
    assert torch.equal(one.online.weights[0], one.target.weights[0])


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(1)), "are choices"),
        (replace(POLICY.actions, high=torch.tensor([torch.inf, 1.0])), "have none"),
    ],
)
def test_environments_that_it_cannot_act_in(actions, says):
    with pytest.raises(PolicyError, match=says):
        SoftActor.needs(POLICY.fields, actions)
