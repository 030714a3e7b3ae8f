"""EnvSpec: describes an environment to be created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_envs.core.disturbance import Disturbance
from rlinf_envs.core.success_classifier import SuccessClassifier


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """The id, number and options of environments. Plain values only, so that it can be stored and sent.

    Example: EnvSpec(kind="maniskill", id="PushCube-v1", num_envs=8, options={"control_mode": "pd_ee_delta_pos"})
    """

    kind: str
    """A name in `rlinf_envs.kinds.KINDS`, or package.module:NAME of a custom kind."""
    id: str
    """A registered id; for "import" the import path of a callable, "package.module:callable"."""
    num_envs: int
    max_episode_steps: int | None = None
    """Time limit in actions; None: the environment's default."""
    ignore_terminations: bool = False
    """Continue after success or failure until the time limit, for evaluations of success_at_end."""
    num_processes: int = 0
    """0: run in the calling process; more: spread the environments over this many subprocesses, which are replaced if
    they crash or hang. The numbers are the same."""
    hang_limit_s: float | None = None
    """Seconds after which a subprocess that has not answered a reset or a chunk of actions counts as hung; None: 20
    times the longest time so far, at least 20 s."""
    options: Mapping[str, bool | int | float | str | tuple[str | int, ...] | None] = field(default_factory=dict)
    """Passed to the environment's constructor."""
    disturbance: Disturbance | None = None
    """Disturbance of images and instructions; None: no disturbance."""
    success_classifier: SuccessClassifier | None = None
    """Gives the reward in place of the environment; for environments whose rows are simulated one by one in this
    package. None: the environment's own reward."""
