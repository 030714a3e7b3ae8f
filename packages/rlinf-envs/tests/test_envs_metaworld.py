"""Meta-World: tasks by seed, pictures as MuJoCo's own, experts, and what is told to the user."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_envs import (
    BatchedEnv,
    EnvError,
    EnvSpec,
    RenderingUnavailableError,
    episode_seed,
    has_expert,
    make_env,
    tensor_field,
)
from rlinf_envs.adapters.metaworld.experts import record_demonstrations
from rlinf_envs.adapters.metaworld.tasks import INSTRUCTIONS, classes, tasks_of
from rlinf_envs.core.vector import InProcessVector
from rlinf_envs.testing import check_env
from rlinf_envs.workarounds.mujoco_drawing import Painter

try:
    classes()
except EnvError as missing:
    pytest.skip(str(missing), allow_module_level=True)

THREE = ("reach-v3", "drawer-close-v3", "window-open-v3")


def metaworld(env_id: str = "reach-v3", num_envs: int = 2, *, steps: int | None = 12, **options: Any) -> BatchedEnv:
    spec = EnvSpec(kind="metaworld", id=env_id, num_envs=num_envs, max_episode_steps=steps, options=options)
    try:
        return make_env(spec)
    except RenderingUnavailableError as error:
        pytest.skip(str(error))


def bare(task: str, seed: int) -> Any:
    """Meta-World's own environment of a task, reset with a seed, goal shown."""
    env = classes()[task]()
    env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
    env._partially_observable = False
    del env.sawyer_observation_space
    env.seed(seed)
    return env


@pytest.mark.slow
def test_conforms_with_pictures() -> None:
    check_env(lambda: metaworld(steps=4, cameras=("corner2",), image_size=16), num_steps=9)


FEW = ("faucet-open-v3", "door-lock-v3", "sweep-v3")
"""The last two keep views into live data in their attributes."""


@pytest.mark.parametrize(
    "task", [*FEW, *(pytest.param(t, marks=pytest.mark.slow) for t in INSTRUCTIONS if t not in FEW)]
)
def test_asking_an_expert_changes_nothing_and_its_answer_is_what_it_would_do(task: str) -> None:
    options = {"action_repeat": 5, "reward_mode": "progress"}
    with_expert, left_alone = (metaworld(task, 1, steps=40, **options) for _ in range(2))
    assert has_expert(with_expert)
    for env in (with_expert, left_alone):
        env.reset([5])
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 1, 4)).astype(np.float32)
    for action in torch.from_numpy(actions):
        with_expert.expert_actions([0], 4)
        one, other = with_expert.step(action), left_alone.step(action)
        assert torch.equal(tensor_field(one.observation, "state"), tensor_field(other.observation, "state"))
        assert torch.equal(one.rewards, other.rewards)

    with_expert.reset([7])
    (answer,) = with_expert.expert_actions([0], 5)
    for action in answer:
        assert torch.equal(with_expert.expert_actions([0], 1)[0, 0], action)
        if with_expert.step(action[None]).episodes:
            break


def test_an_answer_repeats_its_last_action_once_the_task_is_solved() -> None:
    (demonstration,) = record_demonstrations("faucet-open-v3", 1, seed=3, max_episode_steps=40, action_repeat=5)
    env = metaworld("faucet-open-v3", 1, steps=40, action_repeat=5)
    assert has_expert(env)
    env.reset([3])
    length = len(demonstration.actions)
    (answer,) = env.expert_actions([0], length + 3)
    assert torch.equal(answer[:length], demonstration.actions)
    assert torch.equal(answer[length:], demonstration.actions[-1:].expand(3, -1))


def test_a_chunk_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = metaworld(num_envs=1, steps=6, cameras=("corner2",), image_size=16)
    drawn: list[str] = []
    original = Painter.picture

    def counted(self: Painter, data: Any, camera: str) -> np.ndarray:
        drawn.append(camera)
        return original(self, data, camera)

    monkeypatch.setattr(Painter, "picture", counted)
    env.reset([0])
    env.step_chunk(torch.zeros(1, 4, 4))
    assert len(drawn) == 2
    env.step_chunk(torch.zeros(1, 4, 4))  # the end of the episode is shown, and the next one's beginning
    assert len(drawn) == 4


@pytest.mark.parametrize("camera", ["corner2", "topview"])
def test_pictures_are_views_of_what_mujoco_drew(camera: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned or not: the only copy is the one into the batch, whose memory the caller may say."""
    env = metaworld(steps=4, cameras=(camera,), image_size=16)
    assert isinstance(env, InProcessVector)
    mujoco: Any = importlib.import_module("mujoco")
    drawn: list[np.ndarray] = []
    rows: list[Any] = []
    read, observe = mujoco.mjr_readPixels, env._envs[0].observe

    def watched_read(buffer: np.ndarray, *arguments: Any) -> None:
        drawn.append(buffer)
        read(buffer, *arguments)

    def watched_observe() -> Any:
        rows.append(observe())
        return rows[-1]

    monkeypatch.setattr(mujoco, "mjr_readPixels", watched_read)
    monkeypatch.setattr(env._envs[0], "observe", watched_observe)
    place = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    env.show_in(lambda part, name: place if (part, name) == ("observation", f"image.{camera}") else None)
    pictures = tensor_field(env.reset([3, 4]), f"image.{camera}")
    assert pictures is place
    assert np.shares_memory(rows[0][f"image.{camera}"], drawn[0])
    upright = drawn[0][:, ::-1] if camera == "corner2" else drawn[0][::-1]
    assert np.array_equal(place[0].numpy(), upright)


def test_conforms_with_several_tasks() -> None:
    check_env(lambda: metaworld("MT10", tasks=THREE, render=True), num_steps=30)


def test_every_task_has_an_instruction() -> None:
    assert set(INSTRUCTIONS) == set(classes())
    assert len(set(INSTRUCTIONS.values())) == 50


def test_suites_are_metaworlds() -> None:
    assert [len(tasks_of(suite)) for suite in ("MT10", "MT25", "MT50")] == [10, 25, 50]
    assert set(tasks_of("MT10")) < set(tasks_of("MT50"))


def test_numbers_are_metaworlds() -> None:
    """Reset and steps of a seed against Meta-World itself."""
    env = metaworld("push-v3", 1, reward_mode="dense")
    own = bare("push-v3", 5)
    observation, _ = own.reset()
    states = tensor_field(env.reset([5]), "state")
    assert torch.equal(states[0], torch.from_numpy(observation.astype(np.float32)))
    actions = torch.linspace(-1, 1, 40).reshape(10, 4)
    for action in actions:
        observation, reward, *_ = own.step(action.numpy())
        result = env.step(action[None])
        assert torch.equal(tensor_field(result.observation, "state")[0], torch.from_numpy(observation).float())
        assert result.rewards[0] == np.float32(reward)


@pytest.mark.parametrize(("camera", "is_upside_down"), [("corner2", True), ("topview", False)])
def test_fast_pictures_are_mujocos_without_effects(camera: str, is_upside_down: bool) -> None:
    mujoco: Any = importlib.import_module("mujoco")
    env = metaworld("reach-v3", 1, cameras=[camera], image_size=48)
    got = tensor_field(env.reset([3]), f"image.{camera}")[0].numpy()
    own = bare("reach-v3", 3)
    own.reset()
    own.model.vis.quality.offsamples = 0
    with mujoco.Renderer(own.model, 48, 48) as renderer:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        renderer.update_scene(own.data, camera=camera)
        expected = renderer.render()
    upright = expected[::-1, ::-1] if is_upside_down else expected
    distances = [np.abs(got.astype(int) - other).mean() for other in (upright, upright[::-1], upright[:, ::-1])]
    assert distances[0] < 2, "but for the triangles that are too small to see"
    assert min(distances[1:]) > 10


def test_full_quality_draws_more() -> None:
    fast, full = (
        tensor_field(metaworld(num_envs=1, cameras="corner", quality=quality).reset([0]), "image.corner")
        for quality in ("fast", "full")
    )
    assert not torch.equal(fast, full)


def test_seeds_sweep_the_tasks_and_ends_name_them() -> None:
    env = metaworld("MT10", 4, steps=1, tasks=THREE)
    observation = env.reset([3, 4, 5, 6])
    assert observation["instruction"] == [INSTRUCTIONS[THREE[seed % 3]] for seed in (3, 4, 5, 6)]
    result = env.step(torch.zeros(4, 4))
    assert [end.task for end in result.episodes] == [THREE[0], THREE[1], THREE[2], THREE[0]]
    assert result.observation["instruction"] == [INSTRUCTIONS[THREE[episode_seed(s, 1) % 3]] for s in (3, 4, 5, 6)]


def test_one_task_is_not_named() -> None:
    env = metaworld(steps=1)
    env.reset([0, 1])
    assert [end.task for end in env.step(torch.zeros(2, 4)).episodes] == [None, None]


@pytest.mark.slow
def test_processes_change_no_number() -> None:
    options = {"tasks": THREE, "cameras": ("corner3",), "image_size": 16}
    spec = EnvSpec(kind="metaworld", id="MT10", num_envs=2, max_episode_steps=2, options=options)
    spread = EnvSpec(kind="metaworld", id="MT10", num_envs=2, max_episode_steps=2, num_processes=2, options=options)
    one = metaworld("MT10", 2, steps=2, **options)
    assert spec.num_processes == 0
    two = make_env(spread)
    try:
        for observation, other in [(one.reset([1, 2]), two.reset([1, 2]))] + [
            (one.step(actions).observation, two.step(actions).observation) for actions in torch.ones(3, 2, 4)
        ]:
            assert observation["instruction"] == other["instruction"]
            for name in ("state", "image.corner3"):
                assert torch.equal(tensor_field(observation, name), tensor_field(other, name))
    finally:
        two.close()


@pytest.mark.parametrize(("state", "size"), [("full", 39), ("no_goal", 36), ("robot", 4)])
def test_state_is_the_first_numbers(state: str, size: int) -> None:
    whole = tensor_field(metaworld(num_envs=1).reset([2]), "state")
    assert torch.equal(tensor_field(metaworld(num_envs=1, state=state).reset([2]), "state"), whole[:, :size])


def test_expert_solves_and_its_actions_replay() -> None:
    demonstrations = record_demonstrations("MT10", 3, seed=6, tasks=THREE, max_episode_steps=150, state="robot")
    assert [(d.task, d.seed, d.success) for d in demonstrations] == [(t, 6 + i, True) for i, t in enumerate(THREE)]
    env = metaworld("MT10", 1, steps=150, tasks=THREE, state="robot")
    for seed, episode in enumerate(demonstrations, start=6):
        assert torch.equal(tensor_field(env.reset([seed]), "state")[0], tensor_field(episode.observations, "state")[0])
        assert episode.observations["instruction"] == [INSTRUCTIONS[episode.task]] * len(episode.actions)
        result = env.step_chunk(episode.actions[None])
        assert torch.equal(result.rewards[0], episode.rewards)
        assert result.terminated.all() and result.num_steps[0] == len(episode.actions)
        assert [(end.task, end.success_at_end) for end in result.episodes] == [(episode.task, True)]


def test_an_action_may_last_several_steps() -> None:
    long, short = metaworld(num_envs=1, action_repeat=3), metaworld(num_envs=1)
    first = (long.reset([4]), short.reset([4]))
    assert torch.equal(*(tensor_field(observation, "state") for observation in first))
    for action in torch.rand(3, 1, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1:
        once, thrice = long.step(action), [short.step(action) for _ in range(3)]
        expected = thrice[-1].observation
        assert torch.equal(tensor_field(once.observation, "state"), tensor_field(expected, "state"))
        torch.testing.assert_close(once.rewards, torch.stack([result.rewards for result in thrice]).mean(0))


def test_random_rewards_follow_from_the_seed_alone() -> None:
    env = metaworld(num_envs=1, steps=200, reward_mode="random", action_repeat=2)
    rewards = []
    for action in (0.0, 0.5):
        env.reset([4])
        rewards.append(env.step_chunk(torch.full((1, 150, 4), action)).rewards)
    assert torch.equal(*rewards)
    assert set(rewards[0].unique().tolist()) <= {0.0, 0.5, 1.0} and 0.02 < rewards[0].mean() < 0.3


def test_progress_is_what_an_action_adds_to_the_reward() -> None:
    dense, progress = (metaworld(num_envs=1, steps=40, reward_mode=mode) for mode in ("dense", "progress"))
    dense.reset([5])
    progress.reset([5])
    actions = torch.rand(12, 1, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rewards = torch.cat([dense.step(action).rewards for action in actions]).double()
    gains = torch.cat([progress.step(action).rewards for action in actions]).double()
    assert gains[0] == 0.0, "nothing is known before the first step"
    torch.testing.assert_close(gains[1:], rewards.diff() / 10, rtol=0, atol=1e-6)
    progress.reset([5])
    assert progress.step(actions[0]).rewards[0] == 0.0, "a new episode begins anew"


def test_sparse_reward_is_success() -> None:
    (demonstration,) = record_demonstrations("reach-v3", 1, reward_mode="sparse", max_episode_steps=150)
    assert demonstration.success
    assert demonstration.rewards.tolist() == [0.0] * (len(demonstration.rewards) - 1) + [1.0]


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("reach-v2", {}, "no task 'reach-v2'; did you mean reach-v3"),
        ("MT11", {}, "did you mean MT10"),
        ("MT10", {"tasks": ["rech-v3"]}, "MT10 has no task 'rech-v3'; did you mean reach-v3"),
        ("MT10", {"tasks": []}, "give one or more tasks of MT10"),
        ("MT10", {"tasks": ["reach-v3", "reach-v3"]}, "each once"),
        ("reach-v3", {"cameras": ["cornr"]}, "there is no camera 'cornr'; there are topview, corner, corner2"),
        ("reach-v3", {"camera": "corner"}, "no option camera; it has tasks, cameras"),
        ("reach-v3", {"quality": "best"}, "options.quality='best'; allowed: fast, full"),
        ("reach-v3", {"image_size": 0}, "options.image_size=0; it must be at least 1"),
    ],
)
def test_mistakes_say_what_is_allowed(env_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError) as raised:
        metaworld(env_id, **options)
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(INSTRUCTIONS))
def test_reset_forgets_what_ran(task: str) -> None:
    """An expert's episode in a used environment and in a new one: contacts would tell."""
    (episode,) = record_demonstrations(task, 1, seed=7, max_episode_steps=200)
    env = metaworld(task, 1, steps=200)
    generator = torch.Generator().manual_seed(0)
    env.reset([8])
    env.step_chunk(torch.rand(1, 60, 4, generator=generator) * 2 - 1)
    assert torch.equal(tensor_field(env.reset([7]), "state")[0], tensor_field(episode.observations, "state")[0])
    for action, reward in zip(episode.actions, episode.rewards, strict=True):
        assert env.step(action[None]).rewards[0] == reward


@pytest.mark.parametrize("name", ["metaworld.py", "demonstrations.py"])
def test_the_documented_lines_run(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    match = re.search(rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)```", page, re.DOTALL)
    assert match
    scope: dict[str, Any] = {}
    try:
        exec(match[1], scope)
    except RenderingUnavailableError as error:
        pytest.skip(str(error))
    if "env" in scope:
        assert set(scope["env"].reset([0, 1, 2, 3])) == {"state", "image.corner2", "image.gripperPOV", "instruction"}
    else:
        assert len(scope["solved"]) == 20
