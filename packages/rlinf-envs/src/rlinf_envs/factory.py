"""From a plain description to a running environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    if not 1 <= spec.num_processes <= spec.num_envs:
        raise EnvError(
            f"EnvSpec.num_processes={spec.num_processes} with num_envs={spec.num_envs}; "
            f"allowed: 1..num_envs, as every process holds at least one environment"
        )
    if spec.num_processes > 1:
        from rlinf_envs.subprocess_env import SubprocessVector

        return SubprocessVector(spec)
    return make_in_process(spec)


def make_in_process(spec: EnvSpec) -> BatchedEnv:
    """All of `spec` in this process, whatever its num_processes says."""
    # Imported here, so that one kind's packages are not needed for another.
    make: Callable[..., BatchedEnv]
    if spec.kind == "maniskill":
        from rlinf_envs.maniskill_env import make_maniskill as make
    elif spec.kind == "gymnasium":
        from rlinf_envs.gymnasium_env import make_gymnasium as make
    else:
        from rlinf_envs.imported_env import make_imported as make
    options: dict[str, Any] = dict(spec.options)
    reserved = {"max_episode_steps", "ignore_terminations", "num_envs"} & set(options)
    if reserved:
        raise EnvError(f"EnvSpec.options holds {', '.join(sorted(reserved))}; set the field of EnvSpec instead")
    return make(
        spec.id,
        spec.num_envs,
        max_episode_steps=spec.max_episode_steps,
        ignore_terminations=spec.ignore_terminations,
        **options,
    )
