"""ManiSkill: what a reset promises, what is told to the user. Small numbers of steps: a push is 40."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("mani_skill")

from rlinf_envs import (
    BatchedEnv,
    EnvError,
    EnvSpec,
    RenderingUnavailableError,
    StepResult,
    episode_seed,
    make_env,
    tensor_field,
)
from rlinf_envs.adapters.maniskill.tasks import INSTRUCTIONS, SUITES, registered_tasks
from rlinf_envs.adapters.maniskill.without_vulkan import has_vulkan_device
from rlinf_envs.testing import check_env

pytestmark = pytest.mark.maniskill

NUM_PUSH_STEPS = 40
TCP, CUBE = slice(18, 21), slice(28, 31)  # positions in PushCube's state: 9 qpos, 9 qvel, tcp pose, goal, cube pose


def push_cube(num_envs: int, *, max_steps: int | None = None, **options: bool | str | int) -> BatchedEnv:
    return make_env(
        EnvSpec(
            kind="maniskill",
            id="PushCube-v1",
            num_envs=num_envs,
            options={"control_mode": "pd_ee_delta_pos", **options},
            max_episode_steps=max_steps,
            ignore_terminations=True,
        )
    )


def state_of(result: StepResult) -> Tensor:
    return tensor_field(result.observation, "state")


def push_actions(seed: int) -> Tensor:
    """[NUM_PUSH_STEPS, 4]: actions that drive the gripper behind the cube and through it. Contact is what makes PhysX
    remember; without it, an inexact reset goes unnoticed."""
    env = push_cube(1)
    noise = torch.Generator().manual_seed(seed)
    state = tensor_field(env.reset([seed]), "state")
    actions = []
    start = state[0, CUBE].clone()
    for step in range(NUM_PUSH_STEPS):
        tcp, cube = state[0, TCP], state[0, CUBE]
        if step < 12:
            way = cube + torch.tensor([-0.06, 0.0, 0.0]) - tcp
        else:
            way = torch.tensor([0.05, 0.0, 0.0]) + (cube - tcp) * torch.tensor([0.0, 1.0, 1.0])
        move = (30 * way + 0.1 * torch.randn(3, generator=noise)).clamp(-1, 1)
        actions.append(torch.cat([move, torch.tensor([-1.0])]))
        state = state_of(env.step(actions[-1][None]))
    moved_m = float((state[0, CUBE] - start).norm())
    env.close()
    assert moved_m > 0.02, f"the script of seed {seed} did not touch the cube (moved {moved_m:.3f} m)"
    return torch.stack(actions)


def digests(env: BatchedEnv, seeds: Sequence[int], actions: Tensor) -> list[str]:
    """One digest per row over all observations and rewards, bit for bit."""
    hashes = [hashlib.sha256() for _ in seeds]
    state = tensor_field(env.reset(seeds), "state")
    for index, row_hash in enumerate(hashes):
        row_hash.update(state[index].numpy().tobytes())
    for step in range(actions.shape[1]):
        result = env.step(actions[:, step])
        for index, row_hash in enumerate(hashes):
            row_hash.update(state_of(result)[index].numpy().tobytes())
            row_hash.update(result.rewards[index].numpy().tobytes())
    return [row_hash.hexdigest() for row_hash in hashes]


def _digests_in_new_process(connection, seeds: list[int], actions: Tensor) -> None:
    connection.send([digests(push_cube(1), [seed], actions[i : i + 1])[0] for i, seed in enumerate(seeds)])


@pytest.mark.slow
def test_episode_is_a_function_of_seed_and_actions() -> None:
    """A new environment in a new process, and three in one process that have lived, give the same bits."""
    seeds = [4, 7, 9, 10, 11, 12]  # of 0..15, those whose push differs after a plain ManiSkill reset
    actions = torch.stack([push_actions(seed) for seed in seeds])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_digests_in_new_process, args=(there, seeds, actions))
    child.start()
    env = push_cube(3)
    digests(env, seeds[3:], actions[:3])  # a past: other seeds' pushes in other rows
    aged = digests(env, seeds[:3], actions[:3]) + digests(env, seeds[3:], actions[3:])
    again = digests(env, seeds[2::-1], actions[:3].flip(0))  # and in other rows
    assert here.poll(120), "the child process did not answer"
    fresh = here.recv()
    child.join()
    assert aged == fresh
    assert again == fresh[2::-1]


def test_a_reset_in_mid_episode_forgets_how_long_a_body_lay_still():
    """Found by runs whose workers were killed: the segment that was made again differed by 1e-7."""
    options = {"control_mode": "pd_joint_delta_pos", "reward_mode": "normalized_dense"}
    spec = EnvSpec(
        kind="maniskill",
        id="PushCube-v1",
        num_envs=2,
        max_episode_steps=20,
        ignore_terminations=True,
        options=options,
    )

    def moved(env, seeds, num_steps, seed):
        chance = torch.Generator().manual_seed(seed)
        states = [env.reset(seeds)["state"].clone()]
        for _ in range(num_steps):
            result = env.step_chunk(torch.randn(2, 1, 8, generator=chance).clamp(-1, 1))
            states.append(result.observation["state"].clone())
        return torch.stack(states)

    new, lived = make_env(spec), make_env(spec)
    moved(lived, [112, 212], 18, 12)
    assert torch.equal(moved(lived, [11, 12], 20, 1), moved(new, [11, 12], 20, 1))


def test_reset_without_exactness_is_told() -> None:
    env = push_cube(1, exact_reset=False)
    assert any("exact_reset=False" in note for note in env.notes)


@pytest.mark.parametrize(
    ("task", "reward_mode"),
    [
        ("MS-HopperHop-v1", "normalized_dense"),  # no fixed base: every step is contact
        ("PegInsertionSide-v1", "normalized_dense"),  # rebuilds its scene for every seed
        ("Empty-v1", "none"),  # its own reset leaves the robot where it is
    ],
)
def test_other_tasks_replay_exactly(task: str, reward_mode: str) -> None:
    env = make_env(
        EnvSpec(
            kind="maniskill",
            id=task,
            num_envs=1,
            max_episode_steps=50,
            ignore_terminations=True,
            options={"reward_mode": reward_mode},
        )
    )
    (size,) = env.action_spec.shape
    actions = torch.rand((1, 15, size), generator=torch.Generator().manual_seed(1)) * 2 - 1
    first = digests(env, [5], actions)
    digests(env, [6], actions)
    assert digests(env, [5], actions) == first


def test_conformance() -> None:
    spec = EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=2, max_episode_steps=8)
    check_env(lambda: make_env(spec), num_steps=20)


def test_next_episode_has_the_documented_seed() -> None:
    env = make_env(EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=1, max_episode_steps=3))
    env.reset([21])
    action = torch.zeros(1, 8)
    for _ in range(2):
        assert env.step(action).episodes == ()
    result = env.step(action)
    (end,) = result.episodes
    assert (end.seed, end.episode_index, end.length, end.success_once, end.success_at_end) == (21, 0, 3, False, False)
    assert result.truncated.tolist() == [True]
    assert result.terminated.tolist() == [False]
    other = make_env(EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=1))
    assert torch.equal(state_of(result), tensor_field(other.reset([episode_seed(21, 1)]), "state"))


def test_success_ends_an_episode_unless_ignored() -> None:
    actions = push_actions(9)
    spec = {"kind": "maniskill", "id": "PushCube-v1", "num_envs": 1, "options": {"control_mode": "pd_ee_delta_pos"}}
    env, patient = make_env(EnvSpec(**spec)), make_env(EnvSpec(**spec, ignore_terminations=True, max_episode_steps=40))
    env.reset([9])
    patient.reset([9])
    results = [env.step(action[None]) for action in actions]
    patient_results = [patient.step(action[None]) for action in actions]
    (end, *_) = [end for result in results for end in result.episodes]
    assert end.success_once
    assert end.success_at_end
    assert end.length < NUM_PUSH_STEPS
    assert bool(results[end.length - 1].terminated)
    (patient_end,) = [end for result in patient_results for end in result.episodes]
    assert patient_end.success_once
    assert patient_end.length == 40
    assert not any(bool(result.terminated) for result in patient_results)


def test_unknown_task_names_close_ones() -> None:
    with pytest.raises(EnvError, match=r"no task 'PushCub-v1'; did you mean PushCube-v1"):
        make_env(EnvSpec(kind="maniskill", id="PushCub-v1", num_envs=1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"control_mode": "pd_wishful"}, "pd_joint_delta_pos"),
        ({"reward_mode": "lavish"}, "normalized_dense, dense, sparse, none"),
        ({"obs_mode": "smell"}, 'use "state", "rgb" or'),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_option_names_the_right_ones(options: dict[str, str], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        make_env(EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=1, options=options))


def test_missing_assets_are_an_error_not_a_question(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from mani_skill.utils.assets import DATA_SOURCES

    monkeypatch.delenv("MS_SKIP_ASSET_DOWNLOAD_PROMPT", raising=False)
    monkeypatch.setattr(DATA_SOURCES["ycb"], "output_dir", tmp_path)
    with pytest.raises(EnvError, match=r"needs assets .*ycb.*download_asset PickSingleYCB-v1"):
        make_env(EnvSpec(kind="maniskill", id="PickSingleYCB-v1", num_envs=1))


def test_a_robot_without_its_assets_is_an_error_not_a_question(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from mani_skill.agents.robots.anymal.anymal_c import ANYmalC

    monkeypatch.delenv("MS_SKIP_ASSET_DOWNLOAD_PROMPT", raising=False)
    monkeypatch.setattr(ANYmalC, "urdf_path", str(tmp_path / "anymal.urdf"))
    with pytest.raises(
        EnvError, match=r"anymal_c has assets available for download; set MS_SKIP_ASSET_DOWNLOAD_PROMPT"
    ):
        make_env(EnvSpec(kind="maniskill", id="AnymalC-Reach-v1", num_envs=1))


@pytest.mark.skipif(has_vulkan_device(), reason="this machine can draw")
def test_a_task_that_reads_its_visuals_says_what_to_install() -> None:
    with pytest.raises(EnvError, match=r"PushT-v1 could not be built .* needs its visuals: install a Vulkan driver"):
        make_env(EnvSpec(kind="maniskill", id="PushT-v1", num_envs=1))


@pytest.mark.skipif(has_vulkan_device(), reason="this machine can draw")
def test_without_a_driver_states_work_and_are_noted_and_images_say_what_to_install() -> None:
    assert any("no Vulkan driver" in note for note in push_cube(1).notes)
    with pytest.raises(RenderingUnavailableError, match="mesa-vulkan-drivers"):
        push_cube(1, obs_mode="rgb")
    with pytest.raises(RenderingUnavailableError, match="render=True"):
        push_cube(1, render=True)
    env = push_cube(1)
    env.reset([0])
    with pytest.raises(RenderingUnavailableError, match="render=True"):
        env.render()


def test_no_inference_tensor_leaves() -> None:
    """Such a tensor could not be part of a computation that is differentiated."""
    env = push_cube(1)
    observation = env.reset([0])
    result = env.step(torch.zeros(1, 4))
    handed_out = [env.action_spec.low, env.action_spec.high, result.rewards, state_of(result)]
    assert not any(tensor.is_inference() for tensor in [*handed_out, tensor_field(observation, "state")])


def test_the_robots_own_numbers_come_first_in_a_state() -> None:
    """What the reader of trajectories takes for granted; here with a controller that adds its target."""
    states = []
    for state in ("full", "robot"):
        env = push_cube(1, control_mode="pd_joint_target_delta_pos", state=state)
        env.reset([3])
        states.append(state_of(env.step(torch.full((1, 8), 0.3))))
    whole, robot = states
    assert 18 < robot.shape[1] < whole.shape[1] and torch.equal(whole[:, : robot.shape[1]], robot)


def test_instruction_is_an_observation() -> None:
    env = push_cube(2, instruction="push the cube to the target")
    assert env.reset([0, 1])["instruction"] == ["push the cube to the target"] * 2
    assert env.observation_spec["instruction"].texts == ("push the cube to the target",)


@pytest.mark.skipif(not has_vulkan_device(), reason="this machine cannot draw")
def test_images_are_the_same_after_an_exact_reset() -> None:
    """The render system moves to the new scene with its cameras and lights."""
    plain = push_cube(1, obs_mode="rgb+state", image_size=48, render=True, exact_reset=False)
    exact = push_cube(1, obs_mode="rgb+state", image_size=48, render=True)
    for seed in (1, 2):
        expected, got = plain.reset([seed]), exact.reset([seed])
        image = tensor_field(got, "image.base_camera")
        assert image.shape == (1, 48, 48, 3)
        assert image.float().std() > 10  # a scene, not a blank
        assert torch.equal(image, tensor_field(expected, "image.base_camera"))
        assert torch.equal(tensor_field(got, "state"), tensor_field(expected, "state"))
        assert torch.equal(exact.render(), plain.render())
    robot_only = push_cube(1, obs_mode="rgb", image_size=48)
    assert robot_only.observation_spec["state"].shape == (25,)
    check_env(lambda: push_cube(1, obs_mode="rgb", image_size=48, max_steps=5), num_steps=8)


def test_suites_are_made_of_tasks_that_exist_and_say_what_to_do() -> None:
    for tasks in SUITES.values():
        assert set(tasks) <= set(registered_tasks())
        assert set(tasks) <= set(INSTRUCTIONS)
    assert set(INSTRUCTIONS) <= set(registered_tasks())
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS)


def suite(num_envs: int, **options: object) -> BatchedEnv:
    tasks = ("PickCube-v1", "StackCube-v1")
    chosen = {"tasks": tasks, "state": "robot"} | options
    return make_env(
        EnvSpec(kind="maniskill", id="pick_and_place", num_envs=num_envs, max_episode_steps=4, options=chosen)  # type: ignore[arg-type]
    )


@pytest.mark.slow
def test_a_suite_conforms() -> None:
    check_env(lambda: suite(2), num_steps=9)


def test_the_seed_chooses_the_task_of_a_suite() -> None:
    env = suite(2)
    observation = env.reset([6, 7])
    assert observation["instruction"] == [INSTRUCTIONS["PickCube-v1"], INSTRUCTIONS["StackCube-v1"]]
    assert env.observation_spec["instruction"].texts == tuple(observation["instruction"])
    assert tensor_field(observation, "state").shape == (2, 18)
    ends = env.step_chunk(torch.zeros(2, 4, 8)).episodes
    assert [end.task for end in ends] == ["PickCube-v1", "StackCube-v1"]


@pytest.mark.parametrize(
    ("env_id", "options", "text"),
    [
        ("pick_and_place", {"state": "full"}, "use options.state=robot"),
        ("pick_and_place", {"tasks": ("PickCub-v1",), "state": "robot"}, "has no task 'PickCub-v1'; did you mean"),
        ("tabletop", {"tasks": ("PushCube-v1", "PushCube-v1"), "state": "robot"}, "each once"),
        ("no-such-thing", {}, "the suites tabletop, pick_and_place"),
        ("PushCube-v1", {"quality": "best"}, "options.quality='best'; allowed: fast, full"),
        ("PushCube-v1", {"state": "half"}, "options.state='half'; allowed: full, robot"),
    ],
)
def test_wrong_tasks_and_options_are_named(env_id: str, options: dict, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        make_env(EnvSpec(kind="maniskill", id=env_id, num_envs=1, options=options))


@pytest.mark.parametrize(
    ("env_id", "options", "text"),
    [
        (
            "tabletop",
            {"robot_init_qpos_noise": 0.1},
            "^PegInsertionSide-v1 takes no option robot_init_qpos_noise; choose",
        ),
        ("pick_and_place_ycb", {}, "='normalized_dense': PickClutterYCB-v1 has none, sparse; choose"),
    ],
)
def test_a_suite_looks_at_its_later_tasks_before_an_episode_needs_them(
    monkeypatch: pytest.MonkeyPatch, env_id: str, options: dict, text: str
) -> None:
    monkeypatch.setattr("rlinf_envs.adapters.maniskill.suite.require_assets", lambda *_: None)
    with pytest.raises(EnvError, match=text):
        make_env(EnvSpec(kind="maniskill", id=env_id, num_envs=1, options={"state": "robot"} | options))


def test_all_tasks_of_a_suite_take_what_the_check_lets_through() -> None:
    """An option of the simulation, of the row, and of each task's constructor."""
    shared = {"sim_freq": 100, "exact_reset": True, "robot_init_qpos_noise": 0.1}
    assert suite(1, **shared).observation_spec["state"].shape == (18,)


def test_a_suite_without_its_assets_says_what_to_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from mani_skill.utils.assets import DATA_SOURCES

    monkeypatch.delenv("MS_SKIP_ASSET_DOWNLOAD_PROMPT", raising=False)
    monkeypatch.setattr(DATA_SOURCES["bridge_v2_real2sim"], "output_dir", tmp_path)
    with pytest.raises(EnvError, match=r"needs assets .*bridge_v2_real2sim.*download_asset PutCarrotOnPlateInScene-v1"):
        make_env(EnvSpec(kind="maniskill", id="bridge", num_envs=1, options={"state": "robot"}))


@pytest.mark.skipif(not has_vulkan_device(), reason="this machine cannot draw")
def test_pictures_of_chosen_cameras_beside_the_state() -> None:
    plain, seen = push_cube(1), push_cube(1, cameras="base_camera", image_size=32)
    states = [tensor_field(env.reset([3]), "state") for env in (plain, seen)]
    assert torch.equal(*states)
    assert seen.observation_spec["image.base_camera"].shape == (32, 32, 3)
    with pytest.raises(EnvError, match="has no camera 'front'; it has base_camera"):
        push_cube(1, cameras="front")


@pytest.mark.skipif(not has_vulkan_device(), reason="this machine cannot draw")
def test_a_lite_robot_looks_other_and_moves_the_same() -> None:
    results = []
    for lite_robot in (False, True):
        env = push_cube(1, cameras="base_camera", image_size=64, lite_robot=lite_robot)
        env.reset([3])
        results.append(env.step_chunk(push_actions(3)[None, :8]))
    assert torch.equal(state_of(results[0]), state_of(results[1]))
    assert torch.equal(results[0].rewards, results[1].rewards)
    pictures = [tensor_field(result.observation, "image.base_camera").float() for result in results]
    assert not torch.equal(*pictures)
    assert (pictures[0] - pictures[1]).abs().mean() < 20  # the same scene


@pytest.mark.skipif(not has_vulkan_device(), reason="this machine cannot draw")
def test_a_chunk_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.envs.sapien_env import BaseEnv

    drawn: list[int] = []
    original = BaseEnv.capture_sensor_data
    monkeypatch.setattr(BaseEnv, "capture_sensor_data", lambda env: (drawn.append(1), original(env))[1])
    env = push_cube(1, cameras="base_camera", image_size=16)
    env.reset([0])
    drawn.clear()
    env.step_chunk(torch.zeros(1, 4, 4))
    assert len(drawn) == 1
