"""What the embodied job must know of its environment and its policy before any process starts.

One environment is made, stepped once and closed, so that mistakes in its id, its options and its first numbers are
answered at once. The policy is asked what it needs of what the environment shows and takes.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

import torch

from rlinf.doors import named_class
from rlinf.errors import UserError
from rlinf_envs import ActionSpec, BatchedEnv, EnvError, EnvSpec, FieldSpec, make_env
from rlinf_workers.policies.base import Needs, Policy, PolicyError, PolicySettings
from rlinf_workers.registry import POLICIES


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInterface:
    """What one row of an environment shows and takes."""

    fields: dict[str, FieldSpec]
    actions: ActionSpec
    notes: tuple[str, ...]
    """Fall-backs of the environment, for the manifest."""
    knows_success: bool
    """Whether its episodes say that they succeeded."""


def probe(spec: EnvSpec) -> EnvInterface:
    """Makes one environment of `spec`, takes one step and closes it.

    Raises:
        UserError: it cannot be made or stepped.
    """
    where = f"env.id={spec.id!r}"
    try:
        env = make_env(replace(spec, num_envs=1, max_episode_steps=1))
    except EnvError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise UserError(f"{where} could not be made: {_last_line(error)}", hint=_place_of(error)) from error
    try:
        return _interface(env)
    except EnvError as error:
        raise UserError(f"{where}: {error}", hint=_place_of(error.__cause__)) from error
    finally:
        env.close()


def _interface(env: BatchedEnv) -> EnvInterface:
    actions = env.action_spec
    env.reset([0])
    first = actions.low if actions.kind == "discrete" else torch.zeros(actions.shape)
    (episode,) = env.step(first[None]).episodes
    return EnvInterface(
        fields=dict(env.observation_spec),
        actions=actions,
        notes=tuple(env.notes),
        knows_success=episode.success_once is not None,
    )


def needs_of(policy: PolicySettings, env_id: str) -> Needs:
    """What the policy needs in an environment that shows and takes what its settings say.

    Raises: UserError for a policy that is not there, has no such options or cannot act in this environment.
    """
    where = f"policy.name={policy.name!r}"
    arguments, keys = (policy.fields, policy.actions), {"at": "policy.name", "options_at": "policy.options"}
    policy_class = named_class(POLICIES, policy.name, policy.options, *arguments, **keys, base=Policy, seed=policy.seed)
    try:
        needs: Needs = policy_class.needs(policy.fields, policy.actions, **policy.options)
    except PolicyError as error:
        raise UserError(f"{where} cannot act in env.id={env_id!r}: {error}") from error
    except Exception as error:  # the policy may be the user's own and raise what it likes
        raise UserError(f"{where}, policy.options: {_last_line(error)}", hint=_place_of(error)) from error
    if lacking := [name for name in needs.reads if name not in policy.fields]:
        raise UserError(
            f"{where} reads {', '.join(lacking)}, and env.id={env_id!r} shows {', '.join(sorted(policy.fields))}",
            hint="choose options of the environment that show it, or another policy",
        )
    return needs


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _place_of(error: BaseException | None) -> str | None:
    """File and line where the environment's own code raised, if that is why."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    if error is None or error.__traceback__ is None or isinstance(error, EnvError):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised in {frame.filename}:{frame.lineno}"
