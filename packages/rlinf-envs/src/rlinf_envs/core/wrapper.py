"""Base class of environment wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlinf_envs.core.protocol import ActionSpec, BatchedEnv, FieldSpec, SupportsBegin, begins_rows, has_expert
from rlinf_envs.errors import EnvError


class EnvWrapper:
    """Base of wrappers of a `BatchedEnv`: forwards everything to `env` but `reset`, `step` and `step_chunk`."""

    def __init__(self, env: BatchedEnv) -> None:
        self._env = env

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def action_spec(self) -> ActionSpec:
        return self._env.action_spec

    @property
    def observation_spec(self) -> Mapping[str, FieldSpec]:
        return self._env.observation_spec

    @property
    def max_episode_steps(self) -> int | None:
        return self._env.max_episode_steps

    @property
    def notes(self) -> tuple[str, ...]:
        return self._env.notes

    @property
    def begins_rows(self) -> bool:
        """Whether `begin` of a wrapper that has one works."""
        return begins_rows(self._env)

    @property
    def _beginning(self) -> SupportsBegin:
        if not begins_rows(self._env):
            raise EnvError(f"rows of a {type(self._env).__name__} cannot begin episodes one by one")
        return self._env

    @property
    def has_expert(self) -> bool:
        """Whether `expert_actions` works."""
        return has_expert(self._env)

    def expert_actions(self, rows: Sequence[int], num_actions: int) -> Tensor:
        if not has_expert(self._env):
            raise EnvError(f"a {type(self._env).__name__} has no expert (rlinf_envs.SupportsExpert)")
        return self._env.expert_actions(rows, num_actions)

    def render(self) -> Tensor:
        return self._env.render()

    def close(self) -> None:
        self._env.close()
