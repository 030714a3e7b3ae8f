"""What the embodied job must know of an environment before any process starts: sizes, choices, success.

One environment is made, stepped once and closed, so that mistakes in its id, its options and its first numbers are
answered at once.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

import torch

from rlinf.errors import UserError
from rlinf_envs import BatchedEnv, EnvError, EnvSpec, make_env
from rlinf_envs.protocol import ActionSpec

MAX_CHOICES = 4096
"""Discrete choices of one action dimension that a small policy has outputs for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInterface:
    """What one row of an environment shows and takes."""

    observation_size: int
    """Numbers of the state."""
    action_size: int
    """Dimensions of an action."""
    num_choices: tuple[int, ...] | None
    """Discrete actions: choices of each dimension; None: continuous ones."""
    notes: tuple[str, ...]
    """Fall-backs of the environment, for the manifest."""
    knows_success: bool
    """Whether its episodes say that they succeeded."""


def probe(spec: EnvSpec) -> EnvInterface:
    """Makes one environment of `spec`, takes one step and closes it.

    Raises:
        UserError: it cannot be made or stepped, or shows or takes what this job's policy cannot deal with.
    """
    where = f"env.id={spec.id!r}"
    try:
        env = make_env(replace(spec, num_envs=1, max_episode_steps=1))
    except EnvError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        raise UserError(f"{where} could not be made: {_last_line(error)}", hint=_place_of(error)) from error
    try:
        return _interface(env, where)
    except EnvError as error:
        raise UserError(f"{where}: {error}", hint=_place_of(error.__cause__)) from error
    finally:
        env.close()


def _interface(env: BatchedEnv, where: str) -> EnvInterface:
    fields, actions = env.observation_spec, env.action_spec
    if "state" not in fields:
        raise UserError(
            f"{where} gives the observations {sorted(fields)}; this job's policy reads 'state'",
            hint="choose options with state observations",
        )
    num_choices = _num_choices(actions, where) if actions.kind == "discrete" else None
    env.reset([0])
    first = actions.low if num_choices else torch.zeros(actions.shape)
    (episode,) = env.step(first[None]).episodes
    return EnvInterface(
        observation_size=fields["state"].shape[0],
        action_size=actions.low.numel(),
        num_choices=num_choices,
        notes=tuple(env.notes),
        knows_success=episode.success_once is not None,
    )


def _num_choices(actions: ActionSpec, where: str) -> tuple[int, ...]:
    choices = tuple((actions.high - actions.low + 1).flatten().tolist())
    if max(choices) > MAX_CHOICES:
        raise UserError(f"{where} has {max(choices)} choices in one action; this job's policy takes {MAX_CHOICES}")
    return choices


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
