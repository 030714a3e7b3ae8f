"""Scenes of Meta-World that are other than its own: what is changed, and that nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlinf_envs import EnvError, EnvSpec, RenderingUnavailableError, make_env, tensor_field
from rlinf_envs.adapters.metaworld.tasks import classes

try:
    classes()
except EnvError as missing:
    pytest.skip(str(missing), allow_module_level=True)


def seen(seed: int = 3, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """State and picture after one action of an episode."""
    options = {"cameras": ["corner2"], "image_size": 48} | options
    try:
        env = make_env(EnvSpec(kind="metaworld", id="reach-v3", num_envs=1, max_episode_steps=5, options=options))
    except RenderingUnavailableError as error:
        pytest.skip(str(error))
    env.reset([seed])
    observed = env.step(torch.zeros(1, 4)).observation
    env.close()
    return tensor_field(observed, "state")[0].numpy(), tensor_field(observed, "image.corner2")[0].numpy().astype(int)


def test_changes_of_looks_change_looks_alone() -> None:
    state, picture = seen()
    changes: list[dict[str, Any]] = [{"table_color": "#2060ff"}, {"floor_color": "#00ff00"}, {"camera_shift": 0.1}]
    for options in changes:
        other_state, other = seen(**options)
        assert np.array_equal(state, other_state)
        assert (np.abs(picture - other).max(axis=2) > 20).mean() > 0.05
    blue = seen(table_color="#2060ff")[1]
    table = np.abs(blue - picture).max(axis=2) > 40
    assert (blue[table][:, 2] > blue[table][:, 0]).mean() > 0.9, "where it has changed it is blue"
    assert np.array_equal(seen()[1], picture), "other scenes of the process stay as they are"


def test_a_direction_belongs_to_the_seed() -> None:
    one, again, other = (seen(seed, camera_shift=0.1)[1] for seed in (3, 3, 4))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_the_gripper_begins_elsewhere() -> None:
    plain, shifted = seen()[0], seen(hand_shift=0.08)[0]
    assert np.linalg.norm(plain[:3] - shifted[:3]) == pytest.approx(0.08, abs=0.02)
    assert np.array_equal(plain[-3:], shifted[-3:]), "the goal stays"


def test_goals_come_from_a_wider_box() -> None:
    goals = {scale: np.array([seen(seed, start_range=scale)[0][-3:] for seed in (1, 2)]) for scale in (1.0, 1.5)}
    middle = np.array([0.0, 0.85, 0.175])  # of Meta-World's box for reach-v3
    assert np.allclose(goals[1.5] - middle, 1.5 * (goals[1.0] - middle), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"table_color": "blue"}, "options.table_color='blue'; a colour is #rrggbb"),
        ({"hand_shift": -1.0}, r"options.hand_shift=-1.0; it must be a number in 0..10"),
        ({"hand_shfit": 1.0}, "Meta-World has no option hand_shfit"),
    ],
)
def test_what_is_no_change_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(EnvError, match=expected):
        seen(**options)
