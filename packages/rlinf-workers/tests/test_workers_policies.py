"""The shipped policy passes the suite of all policies, and the suite finds what is wrong with others."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlinf_envs import ActionSpec, EnvSpec, FieldSpec, make_env
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.actor_critic.policy import ActorCritic
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.roles.embodied.interface import interface_of
from rlinf_workers.testing.policies import check_policy

FIELDS = {"state": FieldSpec(shape=(6,), dtype="float32"), "image.front": FieldSpec(shape=(4, 4, 3), dtype="uint8")}
ACTIONS = {
    "continuous": ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.ones(3)),
    "discrete": ActionSpec(kind="discrete", shape=(), low=torch.tensor(1), high=torch.tensor(4)),
    "several": ActionSpec(kind="discrete", shape=(2,), low=torch.tensor([0, -1]), high=torch.tensor([1, 1])),
}


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("kind", ACTIONS)
def test_the_actor_critic_conforms(kind, chunk_size):
    check_policy(ActorCritic, FIELDS, ACTIONS[kind], hidden_sizes=(16,), chunk_size=chunk_size)


class SumsTheBatch(ActorCritic):
    def act(self, fields, noise):
        return super().act({"state": fields["state"] + fields["state"].sum()}, noise)


class ForgetsTheValue(ActorCritic):
    def evaluate(self, fields, actions, extras):
        evaluation = super().evaluate(fields, actions, extras)
        return replace(evaluation, values=evaluation.values.detach())


class ShiftsLogprobs(ActorCritic):
    def evaluate(self, fields, actions, extras):
        evaluation = super().evaluate(fields, actions, extras)
        return replace(evaluation, logprobs=evaluation.logprobs + 0.01)


class HidesStatistics(ActorCritic):
    def state_dict(self, *args, **kwargs):
        return {name: t for name, t in super().state_dict(*args, **kwargs).items() if "observation" not in name}


class OneFlatChunk(ActorCritic):
    def act(self, fields, noise):
        answer = super().act(fields, noise)
        return replace(answer, actions=answer.actions.flatten(1))


class DrawsByItself(ActorCritic):
    def act(self, fields, noise):
        return super().act(fields, None if noise is None else torch.randn_like(noise))


class KeepsNoiseOfItsOwn(ActorCritic):
    def act(self, fields, noise):
        return replace(super().act(fields, noise), extras={"noise": torch.randn(len(fields["state"]))})


class KeepsOneRow(ActorCritic):
    def act(self, fields, noise):
        return replace(super().act(fields, noise), extras={"noise": torch.zeros(1)})


class ImitatesItsNeighbours(ActorCritic):
    def imitate(self, fields, actions, noise):
        losses = super().imitate(fields, actions, noise)
        return losses + losses.mean()


class UnlearnsWhatItIsShown(ActorCritic):
    def imitate(self, fields, actions, noise):
        losses = super().imitate(fields, actions, noise)
        return 2 * losses.detach() - losses


class HasOneLoss(ActorCritic):
    def imitate(self, fields, actions, noise):
        return super().imitate(fields, actions, noise).mean()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (ImitatesItsNeighbours, r"imitate\(\) of rows slice\(1, 3, None\) in a batch of their own"),
        (UnlearnsWhatItIsShown, r"steps down its gradient took the mean of imitate\(\) from"),
        (HasOneLoss, r"imitate\(\) has shape \[\]; one loss for each of 6 rows"),
        (SumsTheBatch, "in a batch of their own gave other actions"),
        (ForgetsTheValue, "gives no gradient to value.0.weight"),
        (ShiftsLogprobs, "gave other logprobs"),
        (HidesStatistics, "copied into another policy, gave other actions"),
        (OneFlatChunk, r"actions have shape \[6, 3\]; \[n, K, A\] is \[6, 1, 3\]"),
        (KeepsNoiseOfItsOwn, r"the same fields and noise gave other extras\['noise'\]"),
        (KeepsOneRow, r"extras\['noise'\] has shape \[1\]; the first of 6 rows"),
        (DrawsByItself, "the same fields and noise gave other actions"),
    ],
)
def test_the_suite_finds(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_policy(broken, FIELDS, ACTIONS["continuous"], hidden_sizes=(8,))


def test_too_many_choices_are_refused():
    many = ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(99_999))
    with pytest.raises(PolicyError, match="an action has 100000 choices in one dimension"):
        ActorCritic.needs(FIELDS, many)


@pytest.mark.parametrize(("name", "options"), [("openvla", {}), ("openvla_oft", {}), ("pi0", {"max_prompt_tokens": 8})])
def test_instructions_that_are_too_long_are_refused_before_any_process_starts(name, options):
    def needs(*texts: str) -> None:
        picture, instruction = (
            FieldSpec(shape=(28, 28, 3), dtype="uint8"),
            FieldSpec(shape=(), dtype="text", texts=texts),
        )
        fields = {"image.front": picture, "instruction": instruction, "state": FIELDS["state"]}
        POLICIES.get(name).needs(fields, ACTIONS["continuous"], **options)

    needs("reach", "push")
    with pytest.raises(PolicyError, match=r"the instruction 'aaa.*\.\.\. has 513 bytes; the maximum is 512"):
        needs("reach", "a" * 513)
    if options:
        with pytest.raises(
            PolicyError, match="the instruction 'push the cube' makes a prompt of 14 tokens, and max_prompt"
        ):
            needs("reach", "push the cube")


class Says(gym.Env):
    """Gives one instruction."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(
        {"words": gym.spaces.Text(20), "numbers": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        return {"words": "push", "numbers": np.zeros(2, np.float32)}, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def test_an_instruction_that_is_seen_is_known():
    spec = EnvSpec(kind="import", id=f"{__name__}:Says", num_envs=1, max_episode_steps=1)
    assert interface_of(make_env(spec), spec).fields["instruction"].texts == ("push",)
