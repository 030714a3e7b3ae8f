"""What a row of an environment shows and takes; seen by making one, in this process or in a worker of its role's own
Python environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlinf_comm import record
from rlinf_envs import (
    ActionSpec,
    BatchedEnv,
    Disturbance,
    EnvError,
    EnvSpec,
    FieldSpec,
    Replayable,
    kind_spec,
    make_env,
    observation_problem,
)
from rlinf_workers.worker import Worker

record(EnvSpec)
record(Disturbance)
record(FieldSpec)
record(ActionSpec)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInterface:
    """What one row of an environment shows and takes."""

    fields: dict[str, FieldSpec]
    actions: ActionSpec
    notes: tuple[str, ...]
    """Fall-backs of the environment, for the manifest."""
    knows_success: bool
    """Whether its episodes say that they succeeded."""
    is_replayable: bool = False
    """Whether it can return to the middle of an episode."""
    registered_limit: int | None = None
    """Actions after which the environment's registration or spec cuts an episode; None: nothing says so."""


def interface_of(env: BatchedEnv, spec: EnvSpec) -> EnvInterface:
    """Takes one step of one row, which ends its episode.

    Args:
        spec: what it was made of.

    Raises: EnvError for an observation that is not what the environment says, and an episode that goes on; whatever a
        custom environment raises.
    """
    actions, fields = env.action_spec, dict(env.observation_spec)
    observation = env.reset([0])
    if (problem := observation_problem(observation, fields, 1)) is not None:
        raise EnvError(f"the observation of reset(){problem}; rlinf_envs.testing.check_env finds all that is wrong")
    for name, field in fields.items():
        if field.dtype == "text" and not field.texts:
            fields[name] = replace(field, texts=tuple(observation[name]))
    first = actions.low if actions.kind == "discrete" else torch.zeros(actions.shape)
    episodes = env.step(first[None]).episodes
    if len(episodes) != 1:
        raise EnvError("an episode does not end after max_episode_steps=1; rlinf_envs.testing.check_env finds out why")
    return EnvInterface(
        fields=fields,
        actions=actions,
        notes=tuple(env.notes),
        knows_success=episodes[0].success_once is not None,
        is_replayable=isinstance(env, Replayable),
        registered_limit=kind_spec(spec.kind, spec.id).own_limit(spec.id, env),
    )


class EnvProbe(Worker):
    """Looks at environments where their packages are."""

    def look(self, spec: EnvSpec) -> EnvInterface:
        """Makes one row of `spec`, for an episode of one step."""
        env = make_env(one_step(spec))
        try:
            return interface_of(env, spec)
        finally:
            env.close()


def one_step(spec: EnvSpec) -> EnvSpec:
    """The least of an environment that shows what it is."""
    return replace(spec, num_envs=1, max_episode_steps=1, num_processes=0)
