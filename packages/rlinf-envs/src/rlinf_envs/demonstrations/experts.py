"""Scripted experts: which kinds of environments have them, and one episode of theirs by its seed."""

from __future__ import annotations

from rlinf_envs.demonstrations.base import Demonstration
from rlinf_envs.errors import EnvError
from rlinf_envs.spec import EnvSpec

EXPERT_KINDS = ("metaworld",)
"""Kinds of environments that ship scripted experts."""


def record_expert(spec: EnvSpec, seed: int) -> Demonstration:
    """One episode of the expert of an environment, with the fields that the environment shows.

    Raises: EnvError for a kind without experts, and what is wrong with the spec.
    """
    if spec.kind not in EXPERT_KINDS:
        raise EnvError(f"{spec.kind} has no scripted experts; {', '.join(EXPERT_KINDS)} has")
    from rlinf_envs.demonstrations.metaworld_experts import record_demonstrations

    (shown,) = record_demonstrations(
        spec.id, 1, seed=seed, max_episode_steps=spec.max_episode_steps, **dict(spec.options)
    )
    return shown
