"""LIBERO itself: its numbers and pictures, its thirty tasks whose scenes are there, and its predicates.

Needs hf-libero and its scenes: RLINF_LIBERO_ASSETS, or a folder `shared/libero_assets` beside the checkout. Of
libero_10 and libero_90 only names and states are looked at.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_envs import BatchedEnv, EnvError, EnvSpec, RenderingUnavailableError, make_env, tensor_field
from rlinf_envs.adapters.libero.assets import VARIABLE, assets_folder
from rlinf_envs.adapters.libero.env import LiberoEnv
from rlinf_envs.adapters.libero.importing import libero_module
from rlinf_envs.adapters.libero.scene import LiberoScene
from rlinf_envs.adapters.libero.tasks import MAX_EPISODE_STEPS, init_states, package, tasks_of
from rlinf_envs.core.vector import InProcessVector
from rlinf_envs.testing import check_env

BESIDE = Path(__file__).parents[4] / "shared" / "libero_assets"
if BESIDE.is_dir():
    os.environ.setdefault(VARIABLE, str(BESIDE))
try:
    package()
    ASSETS = assets_folder()
except EnvError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SUITES = ("libero_spatial", "libero_object", "libero_goal")
TASKS = [(suite, number) for suite in SUITES for number in range(10)]


def libero(env_id: str, num_envs: int = 1, *, steps: int = 4, **options: Any) -> InProcessVector:
    spec = EnvSpec(kind="libero", id=env_id, num_envs=num_envs, max_episode_steps=steps, options=options)
    try:
        env = make_env(spec)
    except RenderingUnavailableError as error:
        pytest.skip(str(error))
    assert isinstance(env, InProcessVector)
    return env


def scene_of(env: InProcessVector) -> LiberoScene:
    row = env._envs[0]
    assert isinstance(row, LiberoEnv)
    return row.scene


def test_tasks_and_instructions_are_liberos() -> None:
    libero_module()
    benchmark: Any = importlib.import_module("libero.libero.benchmark")
    assert sum(len(tasks_of(suite)) for suite in MAX_EPISODE_STEPS) == 130
    for suite in MAX_EPISODE_STEPS:
        theirs = benchmark.task_maps[suite].values()
        assert [(t.name, t.instruction) for t in tasks_of(suite)] == [(t.name, t.language) for t in theirs]


def test_all_tasks_ship_states_and_goals() -> None:
    for suite in MAX_EPISODE_STEPS:
        for task in tasks_of(suite):
            assert task.goal_file.is_file()
            assert len(init_states(task)) == 50


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), TASKS)
def test_task_conforms(suite: str, number: int) -> None:
    """Built, begun in shipped states, stepped, replayed in new and used objects, seen."""
    check_env(
        lambda: libero(suite, 1, steps=4, tasks=number, cameras="agentview", image_size=32, num_wait_steps=1),
        num_steps=6,
    )


@pytest.mark.slow
def test_rows_of_several_tasks_conform() -> None:
    options = {"tasks": (0, 3), "cameras": ("agentview", "wrist"), "image_size": 32, "num_wait_steps": 2}
    check_env(lambda: libero("libero_goal", 2, steps=5, **options), num_steps=12)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), [("libero_spatial", 0), ("libero_object", 6), ("libero_goal", 7)])
def test_reset_forgets_what_ran(suite: str, number: int) -> None:
    """Sixty actions in a new environment, and in one whose gripper has closed and whose goal has been reached."""
    generator = torch.Generator().manual_seed(0)
    actions = (torch.rand(60, 1, 7, generator=generator) * 2 - 1).sign()
    options = {"tasks": number, "cameras": "agentview", "image_size": 32, "quality": "full"}
    new, used = (libero(suite, 1, steps=100, **options) for _ in range(2))
    used.reset([4])
    used.step_chunk(actions.flip(0).transpose(0, 1))
    Arranged(scene_of(used)).reach()
    used.step_chunk(torch.ones(1, 5, 7))
    observation, again = new.reset([123]), used.reset([123])
    for action in actions:
        for name in ("state", "image.agentview"):
            assert torch.equal(tensor_field(observation, name), tensor_field(again, name))
        observation, again = new.step(action).observation, used.step(action).observation


@pytest.mark.slow
def test_processes_change_no_number() -> None:
    options = {"tasks": (1, 7), "cameras": ("wrist",), "image_size": 32}
    one = libero("libero_goal", 2, steps=3, **options)
    spread = EnvSpec(kind="libero", id="libero_goal", num_envs=2, max_episode_steps=3, num_processes=2, options=options)
    two = make_env(spread)
    try:
        require_same(one, two, torch.linspace(-1, 1, 70).reshape(5, 2, 7))
    finally:
        two.close()


def require_same(one: BatchedEnv, two: BatchedEnv, actions: torch.Tensor) -> None:
    seen = [(one.reset([1, 2]), two.reset([1, 2]))]
    seen += [(one.step(action).observation, two.step(action).observation) for action in actions]
    for observation, other in seen:
        assert observation["instruction"] == other["instruction"]
        for name in ("state", "image.wrist"):
            assert torch.equal(tensor_field(observation, name), tensor_field(other, name))


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), [("libero_spatial", 4), ("libero_object", 2), ("libero_goal", 7)])
def test_numbers_and_pictures_are_liberos(suite: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against LIBERO's own environment as published evaluations use it: built anew for an episode, with robosuite's
    renderer, ten waiting steps; fixtures are put where the episode's seed puts them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # robosuite's renderer cannot read an empty one
    env = libero(suite, 1, steps=30, tasks=number, cameras=("agentview", "wrist"), image_size=64, quality="full")
    observation = env.reset([33])
    scene = scene_of(env)
    stock = Stock(scene, init_states(scene.task)[33], seed=33)
    require_shown(observation, stock.shown)
    generator = torch.Generator().manual_seed(0)
    for action in torch.rand(20, 1, 7, generator=generator) * 2 - 1:
        result = env.step(action)
        assert stock.step(action[0].numpy().astype(np.float64)) == bool(result.terminated[0])
        require_shown(result.observation, stock.shown)
    stock.close()


class Stock:
    """LIBERO's own environment in an episode."""

    def __init__(self, scene: LiberoScene, state: np.ndarray, seed: int) -> None:
        wrapper: Any = sys.modules["libero.libero.envs.env_wrapper"]
        self.env = wrapper.OffScreenRenderEnv(
            bddl_file_name=str(scene.task.goal_file), camera_heights=64, camera_widths=64
        )
        np.random.seed(seed)
        self.env.reset()
        model = self.env.sim.model._model
        model.body_pos[:], model.body_quat[:] = scene._model.body_pos, scene._model.body_quat
        self._draw_here()
        self.shown = self.env.set_init_state(state)
        for _ in range(10):
            self.step([0, 0, 0, 0, 0, 0, -1])

    def step(self, action: Any) -> bool:
        self._draw_here()
        self.shown, _, done, _ = self.env.step(action)
        return bool(done)

    def close(self) -> None:
        self._draw_here()
        self.env.close()
        gc.collect()

    def _draw_here(self) -> None:
        """robosuite draws, and frees, in whichever drawing context is the thread's."""
        self.env.sim._render_context_offscreen.gl_ctx.make_current()


def require_shown(got: Any, stock: Any) -> None:
    turn: Any = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle
    state = [stock["robot0_eef_pos"], turn(stock["robot0_eef_quat"]), stock["robot0_gripper_qpos"]]
    assert np.array_equal(got["state"][0].numpy(), np.concatenate(state).astype(np.float32))
    for name, theirs in (("agentview", "agentview_image"), ("wrist", "robot0_eye_in_hand_image")):
        assert np.array_equal(got[f"image.{name}"][0].numpy(), stock[theirs][::-1, ::-1])


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "number"), TASKS)
def test_goal_is_recognised(suite: str, number: int) -> None:
    """What the goal speaks of is put where it belongs; the simulation then goes on by itself."""
    env = libero(suite, 1, steps=60, tasks=number)
    env.reset([0])
    assert not env.step(torch.tensor([[0, 0, 0, 0, 0, 0, -1.0]])).terminated.any()
    Arranged(scene_of(env)).reach()
    results = []
    while not results or (len(results) < 40 and not results[-1].terminated.any()):
        results.append(env.step(torch.tensor([[0, 0, 0, 0, 0, 0, -1.0]])))
    assert results[-1].terminated.all(), f"{scene_of(env)._env.parsed_problem['goal_state']} after {len(results)} steps"
    assert [(end.success_at_end, end.return_) for end in results[-1].episodes] == [(True, 1.0)]


class Arranged:
    """Sets the positions of a scene's simulation so that its goal will hold."""

    def __init__(self, scene: LiberoScene) -> None:
        self.env = scene._env
        self.sim = scene._env.sim

    def reach(self) -> None:
        for goal in self.env.parsed_problem["goal_state"]:
            getattr(self, goal[0])(*goal[1:])
        self.sim.forward()

    def open(self, region: str) -> None:
        """A drawer: to the middle of the range that counts as open."""
        drawer = self.env.object_states_dict[region]
        articulation = self.env.get_object(drawer.parent_name).object_properties["articulation"]
        drawer.set_joint(float(np.mean(articulation["default_open_ranges"])))

    def turnon(self, name: str) -> None:
        articulation = self.env.get_object(name).object_properties["articulation"]
        self.env.object_states_dict[name].set_joint(float(np.mean(articulation["default_turnon_ranges"])))

    def on(self, name: str, other: str) -> None:
        if other in self.env.object_sites_dict:
            self._put(name, self.sim.data.get_site_xpos(other), above=0.03)
        else:
            self._put(name, self.sim.data.body_xpos[self.env.obj_body_id[other]], above=0.03)

    def into(self, name: str, region: str) -> None:
        parent = self.env.object_states_dict[region].parent_name
        if "cabinet" in parent:
            self.open(region)
            self.sim.forward()
        self._put(name, self.sim.data.get_site_xpos(region), above=0.02)

    def _put(self, name: str, place: np.ndarray, *, above: float) -> None:
        joint = self.env.get_object(name).joints[-1]
        pose = np.array(self.sim.data.get_joint_qpos(joint))
        pose[:3] = place + np.array([0, 0, above])
        self.sim.data.set_joint_qpos(joint, pose)
        self.sim.data.set_joint_qvel(joint, np.zeros(6))


setattr(Arranged, "in", Arranged.into)


@pytest.mark.slow
def test_scenes_that_lack_files_say_which(tmp_path: Path) -> None:
    for part in ASSETS.iterdir():
        (tmp_path / part.name).symlink_to(part)
    with pytest.raises(EnvError, match=r"libero_10: LIVING_ROOM_SCENE2.* cannot be built from the scenes in"):
        libero("libero_10", 1, tasks=0, assets=str(tmp_path))


@pytest.mark.slow
def test_the_documented_lines_run() -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    match = re.search(r"<!-- example: libero.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert match
    scope: dict[str, Any] = {}
    try:
        exec(match[1], scope)
    except RenderingUnavailableError as error:
        pytest.skip(str(error))
    assert set(scope["env"].reset(range(4))) == {"state", "image.agentview", "image.wrist", "instruction"}
    scope["env"].close()


@pytest.fixture(autouse=True)
def forget_scenes() -> Iterator[None]:
    """Scenes and what draws them are large; a test leaves none behind."""
    yield
    from rlinf_envs.adapters.libero import env as libero_env

    libero_env._spare.clear()
