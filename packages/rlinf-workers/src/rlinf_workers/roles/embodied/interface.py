"""The observations and actions of an environment, found by creating one row of it, in this process or in a worker in
the venv of its role."""

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
    begins_rows,
    has_expert,
    kind_spec,
    make_env,
    observation_problem,
    observes_rows,
)
from rlinf_workers.worker import Worker

record(EnvSpec)
record(Disturbance)
record(FieldSpec)
record(ActionSpec)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInterface:
    """The observations and actions of one row of an environment."""

    fields: dict[str, FieldSpec]
    actions: ActionSpec
    notes: tuple[str, ...]
    """Fall-backs that the environment reports, for the manifest."""
    knows_success: bool
    """Whether its episodes report success."""
    begins_rows: bool = False
    """Whether its rows can begin episodes one by one (`rlinf_envs.SupportsBegin`)."""
    has_expert: bool = False
    """Whether an expert names actions in the present states of its rows (`rlinf_envs.SupportsExpert`)."""
    observes_rows: bool = False
    """Whether its rows are simulated one by one, so that a success classifier sees each after every action."""
    is_replayable: bool = False
    """Whether it can be restored to the middle of an episode."""
    registered_limit: int | None = None
    """Actions after which the environment's registration or spec truncates an episode; None: neither sets a limit."""


def interface_of(env: BatchedEnv, spec: EnvSpec) -> EnvInterface:
    """Takes one step of one row, which ends its episode.

    Args:
        spec: the spec that `env` was created from.

    Raises: EnvError if an observation does not match the environment's spec or if the episode does not end; and any
    exception of a custom environment.
    """
    actions, fields = env.action_spec, dict(env.observation_spec)
    observation = env.reset([0])
    if (problem := observation_problem(observation, fields, 1)) is not None:
        raise EnvError(f"the observation of reset(){problem}; rlinf_envs.testing.check_env lists every problem")
    for name, field in fields.items():
        if field.dtype == "text" and not field.texts:
            fields[name] = replace(field, texts=tuple(observation[name]))
    first = actions.low if actions.kind == "discrete" else torch.zeros(actions.shape)
    episodes = env.step(first[None]).episodes
    if len(episodes) != 1:
        raise EnvError("an episode does not end after max_episode_steps=1; rlinf_envs.testing.check_env shows why")
    return EnvInterface(
        fields=fields,
        actions=actions,
        notes=tuple(env.notes),
        knows_success=episodes[0].success_once is not None,
        begins_rows=begins_rows(env),
        has_expert=has_expert(env),
        observes_rows=observes_rows(env),
        is_replayable=isinstance(env, Replayable),
        registered_limit=kind_spec(spec.kind, spec.id).own_limit(spec.id, env),
    )


class EnvProbe(Worker):
    """Inspects environments in the venv that has their packages."""

    def facts(self, spec: EnvSpec) -> dict[str, str]:
        """Returns what decides an evaluation in `spec` (`KindSpec.evaluation_facts`)."""
        return dict(kind_spec(spec.kind, spec.id).evaluation_facts(spec.id, spec.options))

    def look(self, spec: EnvSpec) -> EnvInterface:
        """Creates one row of `spec` for an episode of one step."""
        env = make_env(one_step(spec))
        try:
            return interface_of(env, spec)
        finally:
            env.close()


def one_step(spec: EnvSpec) -> EnvSpec:
    """A one-row, one-step version of the spec, enough to inspect the environment."""
    return replace(spec, num_envs=1, max_episode_steps=1, num_processes=0)
