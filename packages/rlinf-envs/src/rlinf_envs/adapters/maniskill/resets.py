"""Resets of ManiSkill rows: on the CPU exactly as in a new environment, in a batch each row by its own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ExactReset:
    """Makes resets of a one-row CPU environment independent of earlier episodes.

    PhysX keeps contacts, friction anchors and the order of its pairs over a reset, so after any contact the same seed
    and actions give slightly different numbers in a used environment than in a new one. Rebuilding everything
    (`reconfigure`) takes about 100 ms per reset; here the bodies are moved into a new, empty physics scene, with the
    same effect in 0.3 ms.

    Must be created while the environment is new.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._first_state = _cloned(env.get_state_dict())

    def prepare(self) -> dict[str, bool]:
        """Call just before a reset. Returns the options to pass to the reset."""
        if self._env.reconfiguration_freq:
            return {"reconfigure": True}  # otherwise the objects would be those of an earlier seed
        _move_to_new_physics_scene(self._env)
        self._env.set_state_dict(self._first_state)  # some tasks do not reset all parts (Empty: the robot)
        return {}


def _move_to_new_physics_scene(env: Any) -> None:
    """Discards PhysX's internal state: moves every body from its scene to a new, empty one.

    Bodies are added in their original order, so that PhysX numbers and pairs them as in a newly built environment. The
    following reset sets poses, velocities and targets. A render system, if any, is moved too.
    """
    import sapien
    from sapien import physx

    env._set_scene_config()  # physics scenes use process-wide settings, which another task may have changed
    wrapper = env.scene
    old = wrapper.sub_scenes[0]
    system = physx.PhysxCpuSystem()
    system.timestep = wrapper.px.timestep
    systems: list[Any] = [system]
    if wrapper.can_render():
        systems.append(old.render_system)
    entities = list(old.entities)
    for entity in reversed(entities):
        old.remove_entity(entity)
    new = sapien.Scene(systems)
    for entity in entities:
        new.add_entity(entity)
    wrapper.sub_scenes[0] = new
    wrapper.px = system
    for body in (part for entity in entities for part in entity.components):
        if isinstance(body, physx.PhysxRigidDynamicComponent):
            body.wake_up()  # otherwise a sleeping body keeps its timer


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _cloned(part) if isinstance(part, Mapping) else part.clone() for name, part in state.items()}


def begin_each_row_by_its_seed(env: Any) -> None:
    """Makes every later reset of a batch place each row by its own seed.

    ManiSkill draws for all rows of a reset together, with generators seeded by the first row, so a row's start would
    depend on the rows reset with it. Here the rows are initialized one after the other, as if each were reset alone
    with its own seed; the physics is updated once for all of them.
    """
    begin_all = env._initialize_episode

    def begin_each(env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        mask = env.scene._reset_mask
        for row in env_idx.tolist():
            torch.manual_seed(int(env._episode_seed[row]))
            env._episode_rng = env._batched_episode_rng[row]
            env.scene._reset_mask = torch.zeros_like(mask)
            env.scene._reset_mask[row] = True
            begin_all(env_idx.new_tensor([row]), options)
        env.scene._reset_mask = mask

    env._initialize_episode = begin_each


class KeptTargets:
    """Saves the controller targets of continuing rows, because ManiSkill's partial reset resets those of all rows.

    Must be created before the reset.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._before = _cloned(env.agent.get_controller_state())

    def restore(self, reset_rows: Sequence[int]) -> bool:
        """Call after the reset of `reset_rows`. Returns whether there were targets to keep; controllers that start from
        the robot's current pose have none."""
        if self._before:
            after = self._env.agent.get_controller_state()
            self._env.agent.set_controller_state(_with_rows(self._before, after, list(reset_rows)))
        return bool(self._before)


def _with_rows(state: Mapping[str, Any], other: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Returns nested tensors [N, ...]: `state` with `rows` taken from `other`."""
    changed = {}
    for name, part in state.items():
        if isinstance(part, Mapping):
            changed[name] = _with_rows(part, other[name], rows)
        else:
            changed[name] = part.clone()
            changed[name][rows] = other[name][rows]
    return changed
