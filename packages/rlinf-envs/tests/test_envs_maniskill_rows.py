"""A batch of ManiSkill as rows: with ManiSkill's own physics for one row, and for several over a task without a scene.

GPU physics is not needed: what a batch has to do at a reset, a step and a chunk is the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("mani_skill")

import gymnasium
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.observations import parse_obs_mode_to_struct
from mani_skill.utils.registration import REGISTERED_ENVS, register

from rlinf_envs import EnvCrashedError, EnvError, EnvSpec, episode_seed, make_env, tensor_field
from rlinf_envs.adapters.maniskill import without_vulkan
from rlinf_envs.adapters.maniskill.env import NO_GPU_FOUND, make_maniskill
from rlinf_envs.adapters.maniskill.rows import NOT_TO_THE_BIT, OWN_OBJECTS, ManiSkillRows
from rlinf_envs.adapters.maniskill.simulation import ManiSkillSimulation
from rlinf_envs.core.episodes import Moment
from rlinf_envs.core.lockstep import LockstepVector
from rlinf_envs.testing import check_env

pytestmark = pytest.mark.maniskill

LIMIT = 8


class Arm:
    """An agent whose controller aims at a target of its own, as ManiSkill's target controllers do."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.controller = self
        self.target = torch.zeros(env.num_envs, 2)

    def reset(self) -> None:
        """As agent and as controller, of the rows that the scene names."""
        mask = self._env.scene._reset_mask
        self.target[mask] = self._env.point[mask]

    def get_proprioception(self) -> dict[str, Any]:
        return {"qpos": self._env.point, "controller": self.get_controller_state()}

    def get_controller_state(self) -> dict[str, Any]:
        return {"arm": {"target": self.target}}

    def set_controller_state(self, state: Mapping[str, Any]) -> None:
        self.target = state["arm"]["target"]


class Points(BaseEnv):
    """ManiSkill's own reset, step, seeds and observations over points in a plane in place of a scene, in any number of
    rows: a point drives to a goal, and fails outside of the plane."""

    def __init__(self, *, num_envs: int, obs_mode: str, reward_mode: str, **unused: object) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.reconfiguration_freq = self._reconfig_counter = 0
        self._obs_mode, self.obs_mode_struct = obs_mode, parse_obs_mode_to_struct(obs_mode)
        self._reward_mode = reward_mode
        self._elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        mask = torch.ones(num_envs, dtype=torch.bool)
        self.scene: Any = SimpleNamespace(_reset_mask=mask, actors={}, articulations={}, gpu_sim_enabled=False)
        self.point, self.goal = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self.agent: Any = Arm(self)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._sensors: Any = {"eye": None}
        self.num_drawn = 0
        self.told: list[dict[str, Any]] = []
        self.reset(seed=[2022 + row for row in range(num_envs)])

    def _initialize_episode(self, env_idx: Tensor, options: dict) -> None:
        mask = self.scene._reset_mask
        self.told.append(options)
        self.point[mask] = 1.6 * torch.rand(len(env_idx), 2) - 0.8
        goal = self._episode_rng.uniform(-0.8, 0.8, (len(env_idx), 2))
        self.goal[mask] = torch.from_numpy(goal).float()

    def _step_action(self, action: Any) -> Any:
        self.agent.target = self.agent.target + 0.3 * torch.as_tensor(action)
        self.point = self.point + 0.5 * (self.agent.target - self.point)
        return action

    def _square_distance(self) -> Tensor:
        """[N]; one sum of two squares a row, so that no number depends on how many rows there are."""
        return ((self.goal - self.point) ** 2).sum(dim=1)

    def evaluate(self) -> dict[str, Tensor]:
        return {"success": self._square_distance() < 0.04, "fail": (self.point.abs() > 1.3).any(dim=1)}

    def _get_obs_extra(self, info: dict) -> dict[str, Tensor]:
        return {"goal": self.goal}

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: dict) -> Tensor:
        return 1 - self._square_distance() / 8

    def get_sensor_params(self) -> dict:
        return {}

    def _get_obs_sensor_data(self, apply_texture_transforms: bool = True) -> dict:
        self.num_drawn += 1
        shade = (100 + 50 * self.point[:, :1]).clamp(0, 255).to(torch.uint8)
        return {"eye": {"rgb": shade[:, :, None, None].expand(-1, 4, 4, 3)}}

    def render(self) -> Tensor:
        return Points._get_obs_sensor_data(self)["eye"]["rgb"]

    def close(self) -> None:
        pass


class Settling(Points):
    def _settle(self) -> None:
        """ManiSkill's name for simulating while a reset is under way."""


class Built(Points):
    """Is built anew in every reset where there is one row, as ManiSkill's tasks with objects of a seed's own are."""

    def __init__(self, *, num_envs: int, reconfiguration_freq: int | None = None, **options: Any) -> None:
        super().__init__(num_envs=num_envs, **options)
        self.reconfiguration_freq = int(num_envs == 1) if reconfiguration_freq is None else reconfiguration_freq


class Twin(Points):
    """Offers what ManiSkill's digital twins do."""

    SUPPORTED_OBS_MODES = ("rgb+segmentation",)
    SUPPORTED_REWARD_MODES = ("none",)

    def __init__(self, *, obs_mode: str, reward_mode: str, **options: Any) -> None:
        if obs_mode not in self.SUPPORTED_OBS_MODES or reward_mode not in self.SUPPORTED_REWARD_MODES:
            raise NotImplementedError(f"obs_mode={obs_mode}, reward_mode={reward_mode}")
        super().__init__(obs_mode=obs_mode, reward_mode=reward_mode, **options)


class Exploding(Points):
    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: dict) -> Tensor:
        reward = super().compute_normalized_dense_reward(obs, action, info)
        reward[-1] = float("nan")
        return reward


@pytest.fixture(autouse=True, scope="module")
def _registered():
    tasks = (Points, Settling, Built, Twin, Exploding)
    for task in tasks:
        register(f"{task.__name__}-v1", task, max_episode_steps=LIMIT)
    yield
    for task in tasks:
        del REGISTERED_ENVS[f"{task.__name__}-v1"]


def rows_of(task: str, num_envs: int, *, limit: int = LIMIT, **options: Any) -> LockstepVector:
    return LockstepVector(ManiSkillRows(f"{task}-v1", num_envs, **options), max_episode_steps=limit)


def random_actions(num_steps: int, num_envs: int, size: int = 2) -> Tensor:
    """[num_steps, num_envs, size]"""
    return torch.rand((num_steps, num_envs, size), generator=torch.Generator().manual_seed(7)) * 2 - 1


def shape_of(value: object) -> object:
    """What a program can rely on: types, dtypes and the leading dimension."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[0]
    if isinstance(value, Mapping):
        return {name: shape_of(part) for name, part in value.items()}
    return type(value)


@torch.inference_mode()
def test_points_answer_as_a_task_of_maniskill_does() -> None:
    """The stand-in for several rows against ManiSkill's own physics for one, call by call."""
    answers = []
    for task in ("PushCube-v1", "Points-v1"):
        env = ManiSkillSimulation(task, control_mode="pd_joint_target_delta_pos").env
        (size,) = env.single_action_space.shape
        calls = {"reset": env.reset(seed=[3], options={"env_idx": torch.tensor([0])})}
        calls["step"] = env.step(np.zeros((1, size), np.float32))
        calls["again"] = env.reset(seed=[3], options={"env_idx": torch.tensor([0])})
        assert torch.equal(calls["again"][0], calls["reset"][0])
        shapes = {name: [shape_of(part) for part in answer[:-1]] for name, answer in calls.items()}
        info = {name: calls["step"][-1][name] for name in ("success", "elapsed_steps")}
        inside = [shape_of(env.scene._reset_mask), env._episode_seed.tolist(), type(env._batched_episode_rng[0])]
        targets = [shape_of(target) for part in env.agent.get_controller_state().values() for target in part.values()]
        answers.append((shapes, shape_of(info), inside, targets))
    assert answers[0] == answers[1]


def test_one_row_of_maniskill_conforms() -> None:
    check_env(lambda: rows_of("PushCube", 1, on_gpu=False), num_steps=20)


def test_one_row_has_the_numbers_of_maniskill_alone() -> None:
    """A batch of one and the environments that are stepped one after the other, over resets and chunks."""
    batch = rows_of("PushCube", 1, limit=5, on_gpu=False)
    alone = make_env(EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=1, max_episode_steps=5))
    actions = random_actions(12, 1, 8)
    assert torch.equal(tensor_field(batch.reset([4]), "state"), tensor_field(alone.reset([4]), "state"))
    for chunk in actions.transpose(0, 1).split(3, dim=1):
        got, expected = batch.step_chunk(chunk), alone.step_chunk(chunk)
        assert torch.equal(got.rewards, expected.rewards)
        assert torch.equal(tensor_field(got.observation, "state"), tensor_field(expected.observation, "state"))
        last = tensor_field(got.final_observation, "state")
        assert torch.equal(last, tensor_field(expected.final_observation, "state"))
        assert got.episodes == expected.episodes
        assert got.observation["instruction"] == expected.observation["instruction"]


def test_several_rows_conform() -> None:
    check_env(lambda: rows_of("Points", 3), num_steps=30)


def test_a_row_is_the_same_alone_and_among_rows_that_begin_anew() -> None:
    """Where it begins, how it goes on while others are reset, and the records of its episodes."""
    seeds, actions = [11, 12, 13, 14], 0.7 + 0.3 * random_actions(40, 4)  # soon over the edge
    batch = rows_of("Points", 4)
    states = [tensor_field(batch.reset(seeds), "state")]
    results = [batch.step(step) for step in actions]
    assert len({end.length for result in results for end in result.episodes}) > 2  # rows end at different times
    for row, seed in enumerate(seeds):
        alone = rows_of("Points", 1)
        assert torch.equal(tensor_field(alone.reset([seed]), "state")[0], states[0][row])
        for step, expected in enumerate(results):
            got = alone.step(actions[step, row : row + 1])
            for mine, theirs in (
                (got.observation, expected.observation),
                (got.final_observation, expected.final_observation),
            ):
                assert torch.equal(tensor_field(mine, "state")[0], tensor_field(theirs, "state")[row])
            mine = [end.return_ for end in got.episodes]
            assert mine == [end.return_ for end in expected.episodes if end.env_index == row]


def test_rows_that_end_inside_a_chunk_begin_together_after_it() -> None:
    batch = rows_of("Points", 3, limit=4)
    first = tensor_field(batch.reset([0, 1, 2]), "state")
    result = batch.step_chunk(torch.zeros(3, 6, 2))
    assert result.num_steps.tolist() == [1, 4, 4]  # seed 0 begins at its goal
    assert (result.terminated.tolist(), result.truncated.tolist()) == ([True, False, False], [False, True, True])
    assert (result.rewards != 0).sum(dim=1).tolist() == [1, 4, 4] and not result.rewards[:, 4:].any()
    assert [(end.env_index, end.seed, end.length) for end in result.episodes] == [(0, 0, 1), (1, 1, 4), (2, 2, 4)]
    assert torch.equal(tensor_field(result.final_observation, "state"), first)  # nobody moved
    fresh = tensor_field(rows_of("Points", 3).reset([episode_seed(seed, 1) for seed in range(3)]), "state")
    assert torch.equal(tensor_field(result.observation, "state"), fresh)


def test_success_ends_an_episode_unless_ignored() -> None:
    ends = []
    for ignored in (False, True):
        batch = LockstepVector(ManiSkillRows("Points-v1", 2), max_episode_steps=15, ignore_terminations=ignored)
        state = tensor_field(batch.reset([5, 6]), "state")
        episodes = []
        for _ in range(15):
            target, goal = state[:, 2:4], state[:, 4:]
            result = batch.step((goal - target) / 0.3)
            assert not (ignored and result.terminated.any())
            episodes += result.episodes
            state = tensor_field(result.observation, "state")
        ends.append(episodes)
    assert len(ends[0]) >= 2 and all(end.success_once and end.success_at_end and end.length < 15 for end in ends[0])
    assert [end.length for end in ends[1]] == [15, 15] and all(end.success_at_end for end in ends[1])


def test_pictures_are_drawn_for_what_is_shown_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_vulkan, "has_vulkan_device", lambda: True)
    rows = ManiSkillRows("Points-v1", 2, cameras="eye", render=True)
    batch, task = LockstepVector(rows, max_episode_steps=5), rows._simulation.env
    first = batch.reset([1, 2])
    assert tensor_field(first, "image.eye").shape == (2, 4, 4, 3)
    task.num_drawn = 0
    batch.step_chunk(torch.zeros(2, 3, 2))
    assert task.num_drawn == 1
    result = batch.step_chunk(torch.zeros(2, 3, 2))
    assert (
        result.num_steps.tolist() == [2, 2] and task.num_drawn == 3
    )  # the last of the episodes, the first of the next
    last, current = tensor_field(result.final_observation, "image.eye"), tensor_field(result.observation, "image.eye")
    assert torch.equal(last, tensor_field(first, "image.eye")) and not torch.equal(last, current)
    assert not last.is_inference()
    check_env(lambda: rows_of("Points", 2, cameras="eye", render=True), num_steps=20)


def test_a_watcher_sees_every_moment_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_vulkan, "has_vulkan_device", lambda: True)
    rows = ManiSkillRows("Points-v1", 2, render=True)
    batch, task = LockstepVector(rows, max_episode_steps=2), rows._simulation.env
    seen: list[tuple[Moment, int]] = []
    task.num_drawn = 0
    batch.watch(lambda moment: seen.append((moment, int(batch.render_row(moment.env_index)[0, 0, 0]))))
    batch.reset([3, 4])
    batch.step_chunk(torch.ones(2, 3, 2))
    batch.watch(None)
    moments = [moment for moment, _ in seen]
    assert [(m.env_index, m.episode_index, m.num_actions) for m in moments if m.env_index == 1] == [
        (1, 0, 0),
        (1, 0, 1),
        (1, 0, 2),
        (1, 1, 0),
    ]
    assert {m.seed for m in moments if m.episode_index == 1} == {episode_seed(3, 1), episode_seed(4, 1)}
    assert task.num_drawn == 4  # one drawing for both rows of a moment
    shades = [shade for moment, shade in seen if moment.env_index == 1]
    assert shades[0] < shades[1] < shades[2]


def test_a_task_with_modes_of_its_own_shows_its_cameras_and_rewards_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_vulkan, "has_vulkan_device", lambda: True)
    rows = ManiSkillRows("Twin-v1", 2, cameras="eye", reward_mode="sparse")
    assert rows.observation_spec["state"].shape == (6,) and rows.observation_spec["image.eye"].shape == (4, 4, 3)
    rows.reset([0, 1], [1, 2])
    task = rows._simulation.env
    with torch.inference_mode():
        task.goal[0] = task.point[0]
        task.point[1] = task.agent.target[1] = 1.4
    step = rows.step(np.zeros((2, 2), np.float32))
    assert step.rewards.tolist() == [1, -1] and step.terminated.tolist() == [True, True]
    with pytest.raises(EnvError, match=r"reward_mode=dense; reward modes: none; obs modes: rgb\+segmentation"):
        ManiSkillRows("Twin-v1", 2, cameras="eye", reward_mode="dense")


def test_tasks_that_settle_begin_all_rows_together() -> None:
    with pytest.raises(EnvError, match=r"Settling-v1: .* set ignore_terminations=True"):
        ManiSkillRows("Settling-v1", 1)
    rows = ManiSkillRows("Settling-v1", 2, rows_end_together=True)
    rows.reset([0, 1], [8, 2**32 - 1])
    assert rows._simulation.env.told[-1]["episode_id"].tolist() == [8, 2**32 - 1]


def test_objects_of_a_row_are_told() -> None:
    for num_envs in (1, 2):  # one row is asked before a run for what many will be
        assert OWN_OBJECTS in ManiSkillRows("Built-v1", num_envs).notes
        assert OWN_OBJECTS not in ManiSkillRows("Points-v1", num_envs).notes
    with pytest.raises(EnvError, match=r"options\.reconfiguration_freq=1: the rows of a GPU simulation are built once"):
        ManiSkillRows("Built-v1", 2, reconfiguration_freq=1)


def test_a_reward_that_is_no_number_names_its_row() -> None:
    batch = rows_of("Exploding", 3)
    batch.reset([0, 1, 2])
    with pytest.raises(EnvCrashedError, match="env 2: step 0 of its episode failed: EnvError: the reward is nan"):
        batch.step(torch.zeros(3, 2))
    with pytest.raises(EnvError, match="call reset"):
        batch.step(torch.zeros(3, 2))


def spec(task: str = "Points-v1", num_envs: int = 3, **options: Any) -> EnvSpec:
    return EnvSpec(kind="maniskill", id=task, num_envs=num_envs, options=options)


def test_the_gpu_simulates_a_batch_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("gpu", "auto"):
        env = make_env(spec(sim_backend=backend))
        assert isinstance(env, LockstepVector)
        assert (env.num_envs, env.max_episode_steps) == (3, LIMIT)
        assert NOT_TO_THE_BIT in env.notes
    alone = make_env(spec("PushCube-v1", 1, sim_backend="cpu"))
    assert not isinstance(alone, LockstepVector)
    suite = make_maniskill(
        "pick_and_place", 1, sim_backend="auto", state="robot", tasks=("PickCube-v1", "StackCube-v1")
    )
    assert not isinstance(suite, LockstepVector)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_said_where_to_simulate() -> None:
    with pytest.raises(EnvError, match=r"options.sim_backend=gpu: no CUDA device was found .* use sim_backend=cpu"):
        make_env(spec(sim_backend="gpu"))
    assert NO_GPU_FOUND in make_env(spec("PushCube-v1", 1, sim_backend="auto")).notes


@pytest.mark.parametrize(
    ("task", "options", "text"),
    [
        ("PushCube-v1", {"sim_backend": "tpu"}, "options.sim_backend='tpu'; allowed: auto, cpu, gpu"),
        ("pick_and_place", {"sim_backend": "gpu"}, r"one GPU simulation has one task, and these are 4 \(PickCube-v1, "),
    ],
)
def test_wrong_backends_are_named(task: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        make_env(spec(task, state="robot", **options))
