"""The policy for pictures keeps the promises of all policies and learns from pixels."""

import pytest
import torch

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.cnn.policy import CnnActorCritic
from rlinf_workers.testing.policies import check_policy

FIELDS = {
    "image.wrist": FieldSpec(shape=(36, 36, 3), dtype="uint8"),
    "image.front": FieldSpec(shape=(40, 48, 3), dtype="uint8"),
    "state": FieldSpec(shape=(5,), dtype="float32"),
}
CONTINUOUS = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.ones(3))
DISCRETE = ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(1))


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        (CONTINUOUS, {}),
        (CONTINUOUS, {"reads_state": True, "cameras": "wrist", "chunk_size": 2}),
        (DISCRETE, {"cameras": "front"}),
    ],
)
def test_it_conforms(actions, options):
    check_policy(CnnActorCritic, FIELDS, actions, hidden_size=16, **options)


def test_it_reads_what_it_is_told():
    assert CnnActorCritic.needs(FIELDS, CONTINUOUS).reads == ("image.front", "image.wrist")
    chosen = CnnActorCritic.needs(FIELDS, CONTINUOUS, cameras="wrist, front", reads_state=True)
    assert chosen.reads == ("image.wrist", "image.front", "state")


@pytest.mark.parametrize("reads_state", [False, True])
def test_every_field_it_reads_changes_its_values(reads_state):
    policy = CnnActorCritic(FIELDS, CONTINUOUS, reads_state=reads_state)
    fields = {name: torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in FIELDS.items()}
    for name in CnnActorCritic.needs(FIELDS, CONTINUOUS, reads_state=reads_state).reads:
        changed = fields | {name: fields[name] + 9}
        assert not torch.equal(policy.act(changed, None).values, policy.act(fields, None).values), name


@pytest.mark.parametrize(
    ("fields", "options", "says"),
    [
        ({"state": FIELDS["state"]}, {}, "the environment provides state"),
        (FIELDS, {"cameras": "side"}, "no camera side; the environment has front, wrist"),
        ({"image.a": FieldSpec(shape=(32, 64, 3), dtype="uint8")}, {}, "36 pixels per side, but 'image.a' has 32 x 64"),
        (
            {"image.a": FieldSpec(shape=(3, 64, 64), dtype="uint8")},
            {},
            r"\[3, 64, 64\], channels first; .*channels last",
        ),
        ({"image.a": FieldSpec(shape=(64, 64), dtype="uint8")}, {}, r"but 'image.a' is uint8 of shape \[64, 64\]"),
    ],
)
def test_what_it_cannot_use_is_refused(fields, options, says):
    with pytest.raises(PolicyError, match=says):
        CnnActorCritic.needs(fields, CONTINUOUS, **options)


def test_it_learns_from_pixels():
    """A bright square is on the left or on the right, and the action that names the side earns 1."""
    generator = torch.Generator().manual_seed(0)
    policy = CnnActorCritic({"image.a": FIELDS["image.wrist"]}, DISCRETE, hidden_size=32, seed=3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def fields_of(sides: torch.Tensor) -> dict[str, torch.Tensor]:
        pictures = torch.randint(80, (len(sides), 36, 36, 3), generator=generator, dtype=torch.uint8)
        for picture, side in zip(pictures, sides.tolist(), strict=True):
            row, column = torch.randint(12, (2,), generator=generator).tolist()
            picture[row : row + 6, column + 18 * side : column + 18 * side + 6] = 255
        return {"image.a": pictures}

    for _ in range(70):
        sides = torch.randint(2, (32,), generator=generator)
        fields = fields_of(sides)
        with torch.no_grad():
            answer = policy.act(fields, torch.randn(32, policy.noise_size, generator=generator))
        rewards = (answer.actions[:, 0, 0] == sides).float()
        outputs = policy.evaluate(fields, answer.actions, answer.extras)
        advantages = rewards - rewards.mean()
        logprobs, entropies = outputs.logprobs.sum((1, 2)), outputs.entropies.sum((1, 2))
        loss = -(logprobs * advantages + 0.02 * entropies).mean()
        loss = loss + 0.5 * (outputs.values - rewards).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sides = torch.arange(200) % 2
    assert (policy.act(fields_of(sides), None).actions[:, 0, 0] == sides).float().mean() > 0.95
