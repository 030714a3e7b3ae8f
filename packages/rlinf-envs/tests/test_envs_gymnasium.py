from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlinf_envs import EnvError, EnvSpec, EpisodeRecorder, RenderingUnavailableError, make_env, tensor_field
from rlinf_envs.adapters.gymnasium.env import GymnasiumEnv, vector_of_callable
from rlinf_envs.testing import check_env


class Spaces(gymnasium.Env):
    """Any spaces; observes the first sample of its own seed, remembers the actions it got."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.got.append(action)
        info = {
            "is_success": len(self.got) == 2,
            "reward_reach": np.float32(0.25 * len(self.got)),
            "reward_of": "reach",
        }
        return self.observation_space.sample(), 0.0, False, False, info


BOX = spaces.Box(-1.0, 1.0, (2,), np.float64)


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("CartPole-v1", {"num_envs": 3}),
        ("Pendulum-v1", {"num_envs": 2, "max_episode_steps": 20}),
        ("FrozenLake-v1", {"num_envs": 2}),
    ],
)
def test_conformance(env_id: str, options: dict[str, int]) -> None:
    check_env(lambda: make_env(EnvSpec(kind="gymnasium", id=env_id, **options)))  # type: ignore[arg-type]


def test_same_numbers_as_gymnasium_itself() -> None:
    ours = make_env(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1))
    theirs = gymnasium.make("CartPole-v1")
    observation = ours.reset([3])
    expected, _ = theirs.reset(seed=3)
    for action in (0, 1, 1, 0):
        assert tensor_field(observation, "state")[0].tolist() == expected.tolist()
        observation = ours.step(torch.tensor([action])).observation
        expected, *_ = theirs.step(action)


def test_registered_limit_is_the_default_and_can_be_raised() -> None:
    assert make_env(EnvSpec(kind="gymnasium", id="Pendulum-v1", num_envs=1)).max_episode_steps == 200
    env = make_env(EnvSpec(kind="gymnasium", id="Pendulum-v1", num_envs=1, max_episode_steps=210))
    env.reset([0])
    ends = [end for _ in range(210) for end in env.step(torch.zeros(1, 1)).episodes]
    assert [end.length for end in ends] == [210]


def test_dict_observations_become_fields() -> None:
    space = spaces.Dict(
        {
            "arm": BOX,
            "front": spaces.Box(0, 255, (4, 6, 3), np.uint8),
            "mode": spaces.Discrete(3),
            "task": spaces.Text(5, min_length=5),
            "wrist": spaces.Dict({"camera": spaces.Box(0, 255, (2, 2, 1), np.uint8)}),
        }
    )
    env = GymnasiumEnv(Spaces(space, BOX))
    spec = {name: (field.shape, field.dtype) for name, field in env.observation_spec.items()}
    assert spec == {
        "state": ((5,), "float32"),
        "image.front": ((4, 6, 3), "uint8"),
        "image.wrist.camera": ((2, 2, 1), "uint8"),
        "instruction": ((), "text"),
    }
    env.reset(4)
    row = env.observe()
    space.seed(4)
    sample: Any = space.sample()
    one_hot = np.eye(3)[sample["mode"]]
    np.testing.assert_array_equal(row["state"], np.concatenate([sample["arm"], one_hot]).astype(np.float32))
    np.testing.assert_array_equal(row["image.front"], sample["front"])
    assert row["instruction"] == sample["task"]


def test_a_picture_alone_is_the_main_image() -> None:
    env = GymnasiumEnv(Spaces(spaces.Box(0, 255, (4, 6, 3), np.uint8), BOX))
    assert list(env.observation_spec) == ["image.main"]


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Sequence(BOX), "of no fixed size"),
        (spaces.Dict({"a": spaces.Text(3), "b": spaces.Text(3)}), r"a second Text .*\(b\)"),
    ],
)
def test_observations_that_cannot_be_read(space: spaces.Space, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        GymnasiumEnv(Spaces(space, BOX))


@pytest.mark.parametrize(
    ("space", "low", "high", "action", "native"),
    [
        (spaces.Discrete(3, start=2), 2, 4, 3, 3),
        (spaces.MultiDiscrete([2, 3]), [0, 0], [1, 2], [1, 2], [1, 2]),
        (spaces.MultiBinary(2), [0, 0], [1, 1], [1, 0], [1, 0]),
    ],
)
def test_discrete_actions(space: spaces.Space, low: object, high: object, action: object, native: object) -> None:
    raw = Spaces(BOX, space)
    env = vector_of_callable(lambda: raw, 1)
    assert env.action_spec.kind == "discrete"
    assert env.action_spec.low.tolist() == low
    assert env.action_spec.high.tolist() == high
    env.reset([0])
    env.step(torch.tensor([action]))
    assert np.asarray(raw.got[0]).tolist() == native
    assert space.contains(raw.got[0])


def test_continuous_actions_arrive_in_the_dtype_of_the_space() -> None:
    raw = Spaces(BOX, BOX)
    env = vector_of_callable(lambda: raw, 1)
    env.reset([0])
    env.step(torch.tensor([[0.5, 7.0]]))
    assert raw.got[0].dtype == np.float64
    assert raw.got[0].tolist() == [0.5, 1.0]


def test_unusable_action_space() -> None:
    with pytest.raises(EnvError, match="the action space is Text"):
        GymnasiumEnv(Spaces(BOX, spaces.Text(3)))


def test_success_and_the_components_of_the_reward_are_read_from_info() -> None:
    env = EpisodeRecorder(vector_of_callable(lambda: Spaces(BOX, BOX), 1, max_episode_steps=3))
    env.want([0])
    env.reset([0])
    (end,) = [end for _ in range(3) for end in env.step(torch.zeros(1, 2)).episodes]
    assert end.success_once is True
    assert end.success_at_end is False
    (episode,) = env.take()
    assert {name: of.tolist() for name, of in episode.reward_components.items()} == {"reach": [0.25, 0.5, 0.75]}


def test_unknown_id_names_close_ones() -> None:
    with pytest.raises(EnvError, match=r"no environment 'CartPol-v1'.*did you mean CartPole-v1"):
        make_env(EnvSpec(kind="gymnasium", id="CartPol-v1", num_envs=1))


def test_unknown_option_is_told() -> None:
    with pytest.raises(EnvError, match="colour"):
        make_env(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1, options={"colour": "red"}))


def test_render_must_be_asked_for() -> None:
    env = make_env(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1))
    env.reset([0])
    with pytest.raises(RenderingUnavailableError, match="render=True"):
        env.render()


def test_something_else_is_no_environment() -> None:
    with pytest.raises(EnvError, match=r"a gymnasium.Env was expected, got str"):
        vector_of_callable(lambda: "env", 1)  # type: ignore[arg-type, return-value]


class OldGym(Spaces):
    """As environments of the old Gym were written."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, {}


class OldStep(OldGym):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed), {}


class NoSeed(Spaces):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NoSpace(Spaces):
    def __init__(self) -> None:
        self.action_space = BOX


class Says(Spaces):
    """Returns what it is told from a step."""

    def __init__(self, *, reward: Any = 0.0, terminated: Any = False, info: Any = {}) -> None:  # noqa: B006
        super().__init__(BOX, BOX)
        self.said = reward, terminated, False, info

    def step(self, action: Any) -> Any:
        return (self.observation_space.sample(), *self.said)


class OtherKeys(Spaces):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"arm": np.zeros(2)}, {}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: OldGym(BOX, BOX),
            r"reset\(\) returned ndarray; allowed: observation, info \(a dict\).* the old Gym's interface",
        ),
        (
            lambda: OldStep(BOX, BOX),
            r"step\(\) returned 4 values, .*the old Gym's .* `done` .* terminated .* truncated",
        ),
        (lambda: NoSeed(BOX, BOX), r"NoSeed.reset\(\) takes no seed.* def reset\(self, \*, seed=None, options=None\)"),
        (lambda: Says(reward=None), r"step\(\) returned reward as NoneType; allowed: one number"),
        (lambda: Says(reward=np.zeros(2)), r"returned reward as an array of shape \[2\]"),
        (lambda: Says(terminated="no"), r"returned terminated as str; allowed: one number, or True or False"),
        (lambda: Says(info={"success": np.ones(3, bool)}), r"info\['success'\] as an array of shape \[3\]"),
        (lambda: Says(info=None), r"step\(\) returned 5 values, the last one of type NoneType; .* info \(a dict\)"),
        (NoSpace, r"NoSpace has no observation_space; set it"),
        (
            lambda: OtherKeys(spaces.Dict({"leg": BOX}), BOX),
            r"observation_space declares 'leg', and the observation has arm",
        ),
    ],
)
def test_what_is_not_gymnasiums_interface_is_named(make: Any, text: str) -> None:
    def begin() -> None:
        env = vector_of_callable(make, 1)
        env.reset([0])
        env.step(torch.zeros(1, 2))

    with pytest.raises(EnvError, match=text):
        begin()


@pytest.mark.parametrize("rendered", [np.zeros((4, 4, 3)), np.zeros((3, 4, 4), np.uint8), [1], None])
def test_a_rendering_that_is_no_picture_is_named(rendered: Any) -> None:
    raw = Spaces(BOX, BOX)
    raw.render_mode = "rgb_array"
    raw.render = lambda: rendered  # type: ignore[method-assign]
    env = vector_of_callable(lambda: raw, 1)
    env.reset([0])
    with pytest.raises(RenderingUnavailableError, match=r"its render\(\) gave .*; a picture is uint8 \[H, W, 3\]"):
        env.render()


def test_a_first_observation_out_of_bounds_is_a_note() -> None:
    raw = Spaces(spaces.Dict({"arm": BOX, "mode": spaces.Discrete(3)}), BOX)
    env = vector_of_callable(lambda: raw, 1)
    env.reset([0])
    assert env.notes == ()
    raw = Spaces(spaces.Dict({"arm": BOX, "mode": spaces.Discrete(3)}), BOX)
    raw.reset = lambda **_: ({"arm": np.array([0.5, 7.0]), "mode": 1}, {})  # type: ignore[method-assign, reportAttributeAccessIssue]
    env = vector_of_callable(lambda: raw, 1)
    env.reset([0])
    env.step(torch.zeros(1, 2))
    (note,) = env.notes
    assert note.startswith("the first observation['arm'] holds 7, and its observation_space says -1 to 1;")


@pytest.mark.parametrize("place", ["robots.py:Arm", "./envs/robots.py:Arm", "envs/robots:Arm"])
def test_a_file_is_no_module(place: str) -> None:
    with pytest.raises(EnvError, match=r"names a file; write the module, robots:Arm, and start in the folder"):
        make_env(EnvSpec(kind="import", id=place, num_envs=1))
