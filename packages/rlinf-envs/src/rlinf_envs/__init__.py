"""Batched environments with replayable episodes: one protocol over Gymnasium, ManiSkill3 and your own.

A name is imported when it is first used, so that what describes environments (`kind_spec`) needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_envs.adapters.gymnasium.env import vector_of_callable
    from rlinf_envs.core.disturbance import Disturbance
    from rlinf_envs.core.env_spec import EnvSpec
    from rlinf_envs.core.factory import make_env
    from rlinf_envs.core.kind_spec import KindSpec, MachineCheck
    from rlinf_envs.core.protocol import (
        PICTURE,
        ActionSpec,
        BatchedEnv,
        EpisodeEnd,
        FieldSpec,
        Observation,
        Replayable,
        RowSnapshot,
        StepResult,
        observation_problem,
        tensor_field,
    )
    from rlinf_envs.core.seeding import episode_seed
    from rlinf_envs.core.simulator_process import awaited_processes
    from rlinf_envs.demonstrations.base import Demonstration, DemonstrationFiles, RunEnvironment
    from rlinf_envs.demonstrations.experts import record_expert
    from rlinf_envs.demonstrations.files import open_demonstrations
    from rlinf_envs.demonstrations.sources import EXPERTS, kinds_with, sources
    from rlinf_envs.errors import ConformanceError, EnvCrashedError, EnvError, RenderingUnavailableError
    from rlinf_envs.kinds import KINDS, kind_spec
    from rlinf_envs.recording.films import outcome_of, write_grid
    from rlinf_envs.recording.recorder import EpisodeRecorder, RecordedEpisode, recorded_env, with_drawing
    from rlinf_envs.recording.video import require_video
    from rlinf_envs.venv import VenvSpec

__version__ = "0.1.0"

__all__ = [
    "EnvSpec",
    "make_env",
    "vector_of_callable",
    "BatchedEnv",
    "Replayable",
    "Observation",
    "PICTURE",
    "tensor_field",
    "observation_problem",
    "StepResult",
    "EpisodeEnd",
    "RowSnapshot",
    "ActionSpec",
    "FieldSpec",
    "Disturbance",
    "episode_seed",
    "awaited_processes",
    "Demonstration",
    "DemonstrationFiles",
    "RunEnvironment",
    "open_demonstrations",
    "record_expert",
    "EXPERTS",
    "sources",
    "kinds_with",
    "RecordedEpisode",
    "EpisodeRecorder",
    "recorded_env",
    "with_drawing",
    "outcome_of",
    "write_grid",
    "require_video",
    "KINDS",
    "kind_spec",
    "KindSpec",
    "MachineCheck",
    "VenvSpec",
    "EnvError",
    "EnvCrashedError",
    "RenderingUnavailableError",
    "ConformanceError",
]

_MODULES = {
    "adapters.gymnasium.env": ("vector_of_callable",),
    "core.disturbance": ("Disturbance",),
    "core.env_spec": ("EnvSpec",),
    "core.factory": ("make_env",),
    "core.kind_spec": ("KindSpec", "MachineCheck"),
    "core.protocol": (
        "PICTURE",
        "ActionSpec",
        "BatchedEnv",
        "EpisodeEnd",
        "FieldSpec",
        "Observation",
        "Replayable",
        "RowSnapshot",
        "StepResult",
        "observation_problem",
        "tensor_field",
    ),
    "core.seeding": ("episode_seed",),
    "core.simulator_process": ("awaited_processes",),
    "demonstrations.base": ("Demonstration", "DemonstrationFiles", "RunEnvironment"),
    "demonstrations.experts": ("record_expert",),
    "demonstrations.files": ("open_demonstrations",),
    "demonstrations.sources": ("EXPERTS", "kinds_with", "sources"),
    "errors": ("ConformanceError", "EnvCrashedError", "EnvError", "RenderingUnavailableError"),
    "kinds": ("KINDS", "kind_spec"),
    "recording.films": ("outcome_of", "write_grid"),
    "recording.recorder": ("EpisodeRecorder", "RecordedEpisode", "recorded_env", "with_drawing"),
    "recording.video": ("require_video",),
    "venv": ("VenvSpec",),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
