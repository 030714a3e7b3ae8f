"""What describes an environment before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_envs.core.disturbance import Disturbance


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Which environment, how many, with what options. Plain values only, so that it can be written down and sent.

    Example: EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=8, options={"control_mode": "pd_ee_delta_pos"})
    """

    kind: str
    """A name in `rlinf_envs.kinds.KINDS`, or package.module:NAME of a custom kind."""
    id: str
    """A registered id; for "import" the place of a callable, "package.module:callable"."""
    num_envs: int
    max_episode_steps: int | None = None
    """Time limit in actions; None: the environment's own."""
    ignore_terminations: bool = False
    """Go on after success or failure until the time limit; what evaluations of success_at_end want."""
    num_processes: int = 0
    """0: in the calling process; more: the environments are spread over that many of their own, and one that crashes or
    hangs is replaced. The numbers are the same."""
    hang_limit_s: float | None = None
    """How long the answer of a process of its own to a reset or a chunk of actions may take before it counts as hung;
    None: 20 times what it took so far, at least 20 s."""
    options: Mapping[str, bool | int | float | str | tuple[str | int, ...] | None] = field(default_factory=dict)
    """Passed to the environment's constructor."""
    disturbance: Disturbance | None = None
    """What becomes of pictures and instructions; None: they are shown as they are."""
