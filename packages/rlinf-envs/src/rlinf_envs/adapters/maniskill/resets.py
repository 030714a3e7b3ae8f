"""How rows of ManiSkill begin an episode: on the CPU as in a new environment, in a batch each by its own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ExactReset:
    """Has an environment of one row on the CPU forget what ran before.

    PhysX keeps contacts, friction anchors and the order of its pairs from before a reset, so that the same seed and
    actions give slightly other numbers in an environment that has lived than in a new one, as soon as something
    touches. Rebuilding everything (`reconfigure`) cures that for about 100 ms a reset; here the bodies are moved into a
    new, empty physics scene instead, with the same effect for 0.3 ms.

    Made when the environment is new.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._first_state = _cloned(env.get_state_dict())

    def prepare(self) -> dict[str, bool]:
        """Just before a reset. Returns: what the reset's options have to say."""
        if self._env.reconfiguration_freq:
            return {"reconfigure": True}  # else the objects would be those of an earlier seed
        _move_to_new_physics_scene(self._env)
        self._env.set_state_dict(self._first_state)  # some tasks leave parts as they find them (Empty: the robot)
        return {}


def _move_to_new_physics_scene(env: Any) -> None:
    """Leave PhysX's memory of the past behind: take every body out of its scene and add it to a new, empty one.

    Added in their first order, so that PhysX numbers and pairs them as in a newly built environment. Poses, velocities
    and targets are set by the reset that follows. A render system, where there is one, moves along.
    """
    import sapien
    from sapien import physx

    env._set_scene_config()  # a physics scene takes process-wide settings, which another task may have changed
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
            body.wake_up()  # else one that lay still remembers for how long


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _cloned(part) if isinstance(part, Mapping) else part.clone() for name, part in state.items()}


def begin_each_row_by_its_seed(env: Any) -> None:
    """Have every later reset of a batch put each row where its own seed says.

    ManiSkill draws for all rows of a reset together, with generators that the first row's seed sets: where a row begins
    would depend on which others begin with it. Here the task begins one row after the other, each as if it alone were
    reset, with generators that its own seed sets; the physics is told once, for all of them.
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
    """What the controllers of rows that go on were aiming at: a partial reset of ManiSkill resets those of all rows.

    Made before the reset.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._before = _cloned(env.agent.get_controller_state())

    def restore(self, reset_rows: Sequence[int]) -> bool:
        """After the reset of `reset_rows`. Returns: whether there was anything to keep; there is not where controllers
        aim from where the robot is."""
        if self._before:
            after = self._env.agent.get_controller_state()
            self._env.agent.set_controller_state(_with_rows(self._before, after, list(reset_rows)))
        return bool(self._before)


def _with_rows(state: Mapping[str, Any], other: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Nested tensors [N, ...]: `state`, but for `rows`, which are those of `other`."""
    changed = {}
    for name, part in state.items():
        if isinstance(part, Mapping):
            changed[name] = _with_rows(part, other[name], rows)
        else:
            changed[name] = part.clone()
            changed[name][rows] = other[name][rows]
    return changed
