"""Batched environments with replayable episodes: one protocol over Gymnasium, ManiSkill3 and your own."""

from rlinf_envs.errors import ConformanceError, EnvCrashedError, EnvError, RenderingUnavailableError
from rlinf_envs.factory import make_env
from rlinf_envs.protocol import (
    ActionSpec,
    BatchedEnv,
    EpisodeEnd,
    FieldSpec,
    Observation,
    Replayable,
    RowSnapshot,
    StepResult,
    tensor_field,
)
from rlinf_envs.seeding import episode_seed
from rlinf_envs.spec import EnvSpec

__version__ = "0.1.0"

__all__ = [
    "EnvSpec",
    "make_env",
    "BatchedEnv",
    "Replayable",
    "Observation",
    "tensor_field",
    "StepResult",
    "EpisodeEnd",
    "RowSnapshot",
    "ActionSpec",
    "FieldSpec",
    "episode_seed",
    "EnvError",
    "EnvCrashedError",
    "RenderingUnavailableError",
    "ConformanceError",
]
