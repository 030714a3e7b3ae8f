"""DSRL: a soft actor chooses the noise that a frozen flow policy denoises, and that policy stays as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from workers_openpi_files import published_tensors, write_checkpoint

from rlinf_algos import off_policy_preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.models.weight_writer import write_tensors
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.base import PolicyError, PolicySettings
from rlinf_workers.policies.flow.policy import FlowPolicy
from rlinf_workers.policies.soft_noise.policy import SoftNoise
from rlinf_workers.roles.embodied.off_policy_actor import OffPolicyActor, OffPolicyActorSettings
from rlinf_workers.roles.embodied.off_policy_rollout import OffPolicyRollout, OffPolicyRolloutSettings
from rlinf_workers.roles.records.embodied import GroupObservation
from rlinf_workers.testing.policies import random_fields
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings

pytest.importorskip("transformers", minversion="5.17")

FIELDS = {
    "state": FieldSpec(shape=(4,), dtype="float32"),
    "image.front": FieldSpec(shape=(28, 28, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
ACTIONS = ActionSpec(
    kind="continuous", shape=(3,), low=torch.tensor([-1.0, -1.0, 0.0]), high=torch.tensor([1.0, 3.0, 1.0])
)
SMALL: dict[str, Any] = {"chunk_size": 2, "width": 32, "value_width": 8, "num_denoising_steps": 2}
NUM_ROWS, WIDTH = 3, 32


@pytest.fixture(params=["pi0", "pi05", "smolvla"])
def name(request) -> str:
    return request.param


@pytest.fixture
def flow(name) -> FlowPolicy:
    return POLICIES.get(name)(FIELDS, ACTIONS, seed=3, **SMALL)


@pytest.fixture
def options(name, flow, tmp_path) -> dict[str, Any]:
    """Of a soft actor over the noise of `flow`, from the files that training writes."""
    write_tensors(tmp_path / "model.safetensors", dict(flow.state_dict()))
    return SMALL | {"flow": name, "flow_folder": str(tmp_path), "hidden_size": 8, "noise_bound": 2.0}


def test_actions_are_those_that_the_frozen_policy_denoises_from_the_chosen_noise(flow, options):
    policy = SoftNoise(FIELDS, ACTIONS, seed=0, **options, noise_rows=2)
    fields = random_fields(FIELDS, NUM_ROWS)
    with torch.no_grad():
        observed = policy.observe(fields)
        learned, _ = policy.sample(observed, torch.randn(NUM_ROWS, policy.noise_size))
        actions = policy.execute(fields, learned)
        # Euler's method, with the policy's velocities.
        denoiser, chunk = (
            flow.denoiser(fields),
            torch.zeros(NUM_ROWS, flow.sizes().num_actions, flow.sizes().action_size),
        )
        chunk[:, :, :3] = learned[:, [0] + [1] * (chunk.shape[1] - 1)]
        for time in (1.0, 0.5):
            chunk = chunk - 0.5 * denoiser.velocities(chunk, torch.full((NUM_ROWS,), time)).velocities
    assert observed["state"].shape == (NUM_ROWS, 4 + flow.sizes().prefix_width)
    torch.testing.assert_close(actions, flow.normalize_actions.inverse(chunk[:, :2, :3]))
    assert learned.shape == (NUM_ROWS, 2, 3)
    assert learned.abs().max() <= 2.0
    assert_bitwise_equal(policy.act(fields, None).actions, policy.act(dict(fields), None).actions)


def test_one_row_of_noise_is_that_of_all_predicted_actions(flow):
    fields, noise = random_fields(FIELDS, NUM_ROWS), torch.randn(NUM_ROWS, 1, 3)
    with torch.no_grad():
        denoiser = flow.denoiser(fields)
        assert_bitwise_equal(
            flow.denoise(denoiser, fields, noise), flow.denoise(denoiser, fields, noise.expand(-1, 2, -1))
        )
    with pytest.raises(PolicyError, match="and noise is given for 99"):
        flow.denoise(denoiser, fields, noise.expand(-1, 99, -1))


def test_numbers_that_only_a_published_model_has_start_from_0(tmp_path):
    write_checkpoint(tmp_path, published_tensors("pi0"), {"action_horizon": 3})
    published = {"folder": str(tmp_path), "dataset": "lab", "num_denoising_steps": 2, "chunk_size": 2}
    policy = SoftNoise(FIELDS, ACTIONS, seed=0, flow="pi0", hidden_size=8, **published)
    flow = POLICIES.get("pi0")(FIELDS, ACTIONS, **published)
    assert flow.sizes().action_size > 3
    fields = random_fields(FIELDS | {"instruction": FieldSpec(shape=(), dtype="text")}, NUM_ROWS)
    with torch.no_grad():
        observed = policy.observe(fields)
        learned, _ = policy.sample(observed, torch.randn(NUM_ROWS, policy.noise_size))
        denoiser, chunk = flow.denoiser(fields), torch.zeros(NUM_ROWS, 3, flow.sizes().action_size)
        chunk[:, :, :3] = learned
        for time in (1.0, 0.5):
            chunk = chunk - 0.5 * denoiser.velocities(chunk, torch.full((NUM_ROWS,), time)).velocities
        actions = policy.execute(fields, learned)
    torch.testing.assert_close(actions, flow.normalize_actions.inverse(chunk[:, :2, :3]))


def observation(time: int, *, ended: bool = False, is_last: bool = False) -> GroupObservation:
    fields = random_fields(FIELDS, NUM_ROWS, seed=time)
    return GroupObservation(
        group=0,
        time=time,
        fields=fields,
        final_fields=random_fields(FIELDS, NUM_ROWS, seed=50) if ended else None,
        rewards=torch.ones(NUM_ROWS, 2),
        num_executed=torch.full((NUM_ROWS,), 2),
        terminated=torch.zeros(NUM_ROWS, dtype=torch.bool),
        truncated=torch.full((NUM_ROWS,), ended),
        is_last=is_last,
    )


def test_transitions_have_features_and_noise_and_training_leaves_the_frozen_policy_alone(
    make_worker, reader, flow, options, tmp_path
):
    settings = PolicySettings(name="soft_noise", fields=FIELDS, actions=ACTIONS, options=options)
    rollout = make_worker(OffPolicyRollout, OffPolicyRolloutSettings(policy=settings, num_random_steps=1), step=5)
    stream = [observation(0), observation(1, ended=True), observation(2, is_last=True)]
    answers = [rollout.act_on(one) for one in stream]
    (segment,) = answers[-1][1]
    with torch.no_grad():
        expected = [flow.denoiser(one.fields).features for one in stream]
        reached = flow.denoiser(random_fields(FIELDS, NUM_ROWS, seed=50)).features
    torch.testing.assert_close(segment.fields["state"][..., 4:], torch.stack(expected[:2]))
    torch.testing.assert_close(segment.next_fields["state"][..., 4:], torch.stack([reached, expected[2]]))
    assert segment.actions.shape == (2, NUM_ROWS, 1, 3)
    assert answers[0][0] is not None
    assert answers[0][0].actions.shape == (NUM_ROWS, 2, 3)

    optimizer = OptimizerSettings(learning_rate=1e-2, betas=(0.9, 0.999), max_grad_norm=1e9)
    actor = make_worker(
        OffPolicyActor,
        OffPolicyActorSettings(
            policy=settings,
            algorithm=off_policy_preset("sac", batch_size=8, buffer_size=16),
            backend=BackendSettings(num_shards=1),
            optimizer=optimizer,
            critic_optimizer=optimizer,
            num_updates=3,
        ),
    )
    before = {key: value.clone() for key, value in actor._backend.model_tensors().items()}
    assert not any(key in flow.state_dict() for key in before)
    actor.train(reader([[segment]]))
    assert not torch.equal(actor._backend.model_tensors()["policy.0.weight"], before["policy.0.weight"])
    (held,) = rollout._soft._held
    files = WeightFiles(tmp_path)
    for key, value in held.state_dict().items():
        assert_bitwise_equal(value, files.read(key))
        assert not value.requires_grad


def test_critics_and_random_noise_are_within_the_bound(make_worker, options):
    settings = PolicySettings(name="soft_noise", fields=FIELDS, actions=ACTIONS, options=options)
    rollout = make_worker(OffPolicyRollout, OffPolicyRolloutSettings(policy=settings, num_random_steps=9), step=5)
    for one in (observation(0), observation(1, is_last=True)):
        _, segments = rollout.act_on(one)
    assert segments[0].actions.abs().max() <= 2.0
    assert segments[0].actions.abs().max() > 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"flow": "cnn"}, "options.flow is 'cnn', which has no noise that actions are denoised from; use pi0"),
        ({"flow": ""}, "options.flow is '', which has no noise"),
        ({"flow_folder": None}, "must have learned already: give options.flow_folder"),
        ({"noise_bound": 0.0}, "noise_bound is 0.0; use a number above 0"),
        ({"widht": 3}, "there is no option 'widht'; did you mean width?"),
    ],
)
def test_what_it_refuses(changes, says):
    options = SMALL | {"flow": "pi0", "flow_folder": "somewhere"} | changes
    with pytest.raises(PolicyError) as caught:
        SoftNoise.needs(FIELDS, ACTIONS, **options)
    assert says in str(caught.value)


def test_its_environment_may_have_no_bounds():
    unbounded = replace(ACTIONS, high=torch.full((3,), torch.inf))
    options = SMALL | {"flow": "pi0", "flow_folder": "somewhere"}
    assert SoftNoise.needs(FIELDS, unbounded, **options).reads == ("state", "image.front", "instruction")
    assert SoftNoise.learned_spaces(FIELDS, unbounded, **options).actions.high.tolist() == [[1.5] * 3]
