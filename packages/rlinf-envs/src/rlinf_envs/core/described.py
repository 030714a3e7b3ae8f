"""Base class with the descriptive fields of batched environments."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_envs.core.protocol import ActionSpec, FieldSpec


class Described:
    """The descriptive half of BatchedEnv. A subclass sets the fields in its constructor."""

    _num_envs: int
    _action_spec: ActionSpec
    _observation_spec: Mapping[str, FieldSpec]
    _max_episode_steps: int | None
    _notes: tuple[str, ...]

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def action_spec(self) -> ActionSpec:
        return self._action_spec

    @property
    def observation_spec(self) -> Mapping[str, FieldSpec]:
        return self._observation_spec

    @property
    def max_episode_steps(self) -> int | None:
        return self._max_episode_steps

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes
