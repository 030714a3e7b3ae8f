"""From a plain description to a running environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf_envs.errors import EnvError
from rlinf_envs.protocol import BatchedEnv

KINDS = ("gymnasium", "maniskill", "import")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Which environment, how many, with what options. Plain values only, so that it can be written down and sent.

    Example: EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=8, options={"control_mode": "pd_ee_delta_pos"})
    """

    kind: str
    """"gymnasium", "maniskill", or "import" for an environment of one's own."""
    id: str
    """A registered id; for "import" the place of a callable, "package.module:callable"."""
    num_envs: int
    max_episode_steps: int | None = None
    """Time limit in actions; None: the environment's own."""
    ignore_terminations: bool = False
    """Go on after success or failure until the time limit; what evaluations of success_at_end want."""
    num_processes: int = 1
    """1: in the calling process; more: the environments are spread over that many. The numbers are the same."""
    options: Mapping[str, bool | int | float | str | None] = field(default_factory=dict)
    """Passed to the environment's constructor."""


def make_env(spec: EnvSpec) -> BatchedEnv:
    """The environment `spec` describes. EnvError says what is wrong with a description and what was allowed."""
    if spec.kind not in KINDS:
        raise EnvError(f"EnvSpec.kind={spec.kind!r}; allowed: {', '.join(KINDS)}")
    return make_part(spec, first_env_index=0)


def make_part(spec: EnvSpec, *, first_env_index: int) -> BatchedEnv:
    """`spec` in this process; `first_env_index` is where its rows begin in the whole, for messages and records."""
    arguments: dict[str, Any] = {
        "max_episode_steps": spec.max_episode_steps,
        "ignore_terminations": spec.ignore_terminations,
        "first_env_index": first_env_index,
    }
    from rlinf_envs.maniskill_env import make_maniskill

    return make_maniskill(spec.id, spec.num_envs, **arguments, **dict(spec.options))
