"""Records an episode of an environment's scripted expert."""

from __future__ import annotations

from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.kind_spec import loaded
from rlinf_envs.demonstrations.base import Demonstration
from rlinf_envs.demonstrations.sources import EXPERTS, kinds_with
from rlinf_envs.errors import EnvError
from rlinf_envs.kinds import kind_spec


def record_expert(spec: EnvSpec, seed: int) -> Demonstration:
    """Records one episode with the environment's observation fields.

    Raises: EnvError for a kind without experts and for a wrong spec.
    """
    expert = kind_spec(spec.kind, spec.id).expert
    if not expert:
        raise EnvError(f"{spec.kind} has no scripted experts; {', '.join(kinds_with(EXPERTS))} has")
    return loaded(expert)(spec, seed)
